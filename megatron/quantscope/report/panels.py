"""Small multiples: panels of one grid with the same axes, one a site or a kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.report.style import SEQUENTIAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Panels:
    """A grid of panels.

    Attributes:
        grid: [rows, columns] axes; those that are not used are invisible.
        of: Name -> its axes, in the order of the grid; the name is the panel's title.
    """

    grid: npt.NDArray[np.object_]
    of: dict[str, Axes]

    @property
    def first(self) -> Axes:
        """The first panel: its limits and scales are those of all, where they share axes."""
        return next(iter(self.of.values()))

    def label(self, *, x: str | None = None, y: str | None = None) -> None:
        """Name the x axis under the lowest panel of each column, with its ticks, and the y axis at the left."""
        for column in self.grid.T:
            shown = [axes for axes in column if axes.get_visible()]
            if shown and x is not None:
                shown[-1].set_xlabel(x)
                shown[-1].tick_params(labelbottom=True)
        if y is not None:
            for axes in self.grid[:, 0]:
                axes.set_ylabel(y)


def rows_for(count: int, columns: int) -> int:
    """Rows that so many panels take."""
    return -(-count // columns)


def add_panels(page: Figure, names: Sequence[str], columns: int, **sharing: Any) -> Panels:
    """Panels of these names, row by row; `sharing` goes to `Figure.subplots`."""
    columns = min(columns, len(names))
    cells = {name: divmod(place, columns) for place, name in enumerate(names)}
    return add_placed_panels(page, cells, **sharing)


def add_placed_panels(page: Figure, cells: dict[str, tuple[int, int]], **sharing: Any) -> Panels:
    """Panels at given places (row, column)."""
    rows = 1 + max(row for row, _ in cells.values())
    columns = 1 + max(column for _, column in cells.values())
    grid = page.subplots(rows, columns, squeeze=False, **sharing)
    for axes in grid.flat:
        axes.set_visible(False)
    of = {name: grid[place] for name, place in cells.items()}
    for name, axes in of.items():
        axes.set_visible(True)
        axes.set_title(name)
    return Panels(grid, of)


def layer_colors(layers: Iterable[float]) -> ScalarMappable:
    """The colours of layers along the depth; `to_rgba(layer)` gives one, and a colour bar takes it."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    present = list(layers)
    return ScalarMappable(Normalize(min(present), max(max(present), min(present) + 1)), SEQUENTIAL)


def color_bar(page: Figure, image: ScalarMappable, axes: Any, label: str, **options: Any) -> Any:
    """A colour bar without a frame beside `axes`."""
    bar = page.colorbar(image, ax=axes, label=label, **({"aspect": 30, "pad": 0.015} | options))
    bar.outline.set_visible(False)
    return bar


def note_right(axes: Axes, text: str, color: str) -> None:
    """A short fact at the right of a panel's title line."""
    axes.set_title(text, loc="right", fontsize=6.5, fontweight="normal", color=color)
