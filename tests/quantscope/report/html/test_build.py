import dataclasses
import re

import numpy as np
import pandas
import pytest

from megatron.quantscope.report.html import build, data_images, encode
from megatron.quantscope.report.html.data import page_data

TYPES = ("bf16", "fp16", "mxfp8", "mxfp4", "hifp8")
MOST_BYTES = 10_000_000
HOSTILE = (
    '<img src=x onerror="window.hacked=1">',
    "</script><script>window.hacked=1</script>",
    "'\"><svg/onload=alert(1)>",
    "{{ 7 * 7 }}{% include 'x' %}",
    "模块 ünïcode \U0001f642",
    "x" * 5000,
)


@pytest.fixture(scope="module")
def hostile_study(small_study):
    """Every text that comes from files, hostile."""
    summary = small_study.summary.copy()
    sites = sorted(summary["site"].unique())
    renamed = {site: HOSTILE[number % len(HOSTILE)] + str(number) for number, site in enumerate(sites)}
    summary["site"] = summary["site"].map(renamed)
    info = {"run_id": HOSTILE[0], "command": list(HOSTILE), "versions": {HOSTILE[1]: HOSTILE[0]}}
    return dataclasses.replace(
        small_study,
        summary=summary,
        source=f"/captures/{HOSTILE[1].replace('/', '')}",
        run_info=dict.fromkeys(small_study.types, info),
        problems=list(HOSTILE),
    )


def data_in(page):
    return encode.unpack(re.search(r'id="data">([A-Za-z0-9+/=]+)</script>', page).group(1))


def test_the_page_carries_its_data(small_study, tmp_path):
    path = build.write_report(small_study, tmp_path / "report.html")
    assert path == tmp_path / "report.html"
    found, expected = data_in(path.read_text(encoding="utf-8")), page_data(small_study)
    assert found["cells"] == expected["cells"]
    assert found["details"] == expected["details"]


def spread(study):
    """48 layers, the inputs, weights and output gradients of 4 modules, 5 types, no two rows alike."""
    random = np.random.default_rng(0)
    rows = study.summary[study.summary["symbol"].isin(["x", "w", "dy"]) & (study.summary["layer_idx"] == 0)]
    assert len(rows) == 4 * 3
    places = [(quant_type, layer) for quant_type in TYPES for layer in range(48)]
    parts = [rows.assign(quant_type=quant_type, layer_idx=layer) for quant_type, layer in places]
    summary = pandas.concat(parts, ignore_index=True)
    for column in summary.select_dtypes("float"):
        if column not in ("iteration", "rank", "layer_idx", "micro_batch", "sample_idx"):
            summary[column] = summary[column] * random.uniform(0.5, 2, len(summary))
    for column in (name for name in summary if name.endswith((".underflow", ".saturated"))):
        summary[column] = random.integers(0, 1000, len(summary))
    for column in (name for name in summary if name.endswith("exponent_counts")):
        summary[column] = [np.asarray(row) * random.integers(1, 999, len(row)) for row in summary[column]]
    summary["channel_amax"] = [random.lognormal(size=1536).astype(np.float32) for _ in range(len(summary))]
    summary["quantiles"] = [np.sort(random.standard_normal(len(row))) for row in summary["quantiles"]]
    summary["file"] = [f"20261121_120000_{number:04d}_linear_L_forward.pt" for number in range(len(summary))]
    return dataclasses.replace(study, summary=summary, surfaces=[], attention=[], comparison=None)


def test_48_layers_of_5_types_fit(small_study, tmp_path):
    study = spread(small_study)
    path = build.write_report(study, tmp_path / "report.html")
    assert len(data_in(path.read_text())["cells"]["site"]) == 48 * 4 * 3 * 5
    images = (data_images.MOST_SURFACES * 96 * 144 + data_images.MOST_MAP_VALUES) * 2 * 4 / 3  # float16 in base64
    assert path.stat().st_size + images < MOST_BYTES


def test_nothing_is_fetched(small_study, tmp_path):
    page = build.write_report(small_study, tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"<script[^>]+src=|<link[^>]+href=[\"'](?!data:)|@import|url\((?!data:)", page)
    assert "default-src 'none'" in page


def test_hostile_names_are_no_markup(hostile_study, tmp_path):
    page = build.write_report(hostile_study, tmp_path / "report.html").read_text(encoding="utf-8")
    plain = build.render_page("title", encode.pack({}))
    for name in HOSTILE:
        assert name not in page
    for tag in ("<script", "</script", "<img", "<svg", "onerror", "{{", "{%"):
        assert page.count(tag) == plain.count(tag), tag
    assert data_in(page)["problems"] == list(HOSTILE)


def test_the_title_is_escaped():
    page = build.render_page(HOSTILE[1], encode.pack({}))
    assert HOSTILE[1] not in page
    assert "&lt;/script&gt;&lt;script&gt;window.hacked=1&lt;/script&gt;" in page


def test_a_report_that_can_not_be_made_leaves_the_old_one(small_study, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("the old one")
    monkeypatch.setattr(build, "pack", lambda data: (_ for _ in ()).throw(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        build.write_report(small_study, path)
    assert path.read_text() == "the old one"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_script_of_the_package_can_not_end_its_element(tmp_path):
    (tmp_path / "bad.js").write_text("'</SCRIPT>'")
    with pytest.raises(ValueError, match=r"bad\.js"):
        build._inline(tmp_path / "bad.js")
