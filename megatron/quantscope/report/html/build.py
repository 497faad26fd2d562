"""report.html from a study: the template, filled and written complete or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.report.html.data import page_data
from megatron.quantscope.report.html.encode import pack, pack_text
from megatron.quantscope.report.text import write_text

if TYPE_CHECKING:
    from megatron.quantscope.analysis.study import Study

_HERE = Path(__file__).parent
TEMPLATE, STYLE, SCRIPTS = "page.html.j2", "style.css", "app/*.js"


def write_report(study: Study, path: str | os.PathLike[str]) -> Path:
    """Write the page of a study; returns `path`.

    Raises:
        OSError: it can not be written; what was there before is still there.
    """
    path = Path(path)
    data = page_data(study)
    write_text(path, render_page(data["title"], pack(data)))
    return path


def render_page(title: str, data: str) -> str:
    """The page of packed data. Text from files stands in it escaped (the title) or packed (all else).

    Args:
        title: Of the document.
        data: What `encode.pack` gave.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    loader = FileSystemLoader(_HERE)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    scripts = [{"name": file.name, "text": _inline(file)} for file in sorted(_HERE.glob(SCRIPTS))]
    return environment.get_template(TEMPLATE).render(
        title=title,
        data=data,
        style=(_HERE / STYLE).read_text(encoding="utf-8"),
        scripts=scripts,
        plotly=pack_text(get_plotlyjs()),
    )


def _inline(file: Path) -> str:
    """A script of the package, as it may stand in a script element.

    Raises:
        ValueError: it holds what would end the element.
    """
    text = file.read_text(encoding="utf-8")
    if "</script" in text.lower():
        raise ValueError(f"{file.name} must not spell the end of a script element")
    return text
