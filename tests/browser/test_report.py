"""The report of a small capture as a reader uses it: every control, link, key and file that it gives."""

import re
import time

import numpy as np
import pandas
import pytest

VIEWS = ("overview", "heatmap", "tensor", "attention", "compare", "table")
CONTROLS = {"heatmap": {"metric", "format", "rule", "gemm", "type", "family", "rank", "iteration"}}
FORMATS = ("mxfp8", "mxfp4")
CELL = ["quant_type", "iteration", "rank", "site", "layer_idx"]
NARROW = {"width": 400, "height": 800}


def sqnr_db(sums, name):
    decibels = 10 * np.log10(sums["sum_squares"] / sums[f"{name}.error_squares"])
    return decibels.where(sums[f"{name}.lost"] == 0, -np.inf)


@pytest.fixture(scope="module")
def cells(small):
    """The cells of the page worked out by pandas from the summary table: micro-batches put together."""
    groups = small[0].summary.groupby(CELL)
    errors = [f"{name}.{part}" for name in FORMATS for part in ("error_squares", "lost")]
    sums = groups[["sum_squares", "count", "nan", "inf", "zero", *errors]].sum()
    finite = sums["count"] - sums["nan"] - sums["inf"]
    return pandas.DataFrame(
        {
            "amax": groups["amax"].max(),
            "rms": np.sqrt(sums["sum_squares"] / finite),
            "zero_percent": 100 * sums["zero"] / sums["count"],
        }
        | {f"sqnr_{name}": sqnr_db(sums, name) for name in FORMATS}
    ).sort_index()


def place_of(report, row):
    """The key of a row of the table among `cells`."""
    place = report.page.evaluate("(cell) => Report.data.placeOf(cell)", int(row.get_attribute("data-row")))
    return tuple(place[name] for name in ("type", "iteration", "rank", "site", "layer"))


def test_it_opens_from_disk_and_shows_the_runs(small, opened, capsys):
    began = time.perf_counter()
    report = opened(small[1])
    with capsys.disabled():
        size = small[1].stat().st_size / 1e6
        print(f"\nreport.html of {size:.1f} MB opened in {time.perf_counter() - began:.1f} s")
    assert report.view() == "overview"
    assert report.page.locator("[data-run]").evaluate_all("(runs) => runs.map((run) => run.dataset.run)") == [
        "bf16",
        "mxfp8",
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_every_control_takes_every_option(small, opened, view):
    report = opened(small[1], "#/" if view == "overview" else f"#/{view}")
    assert report.view() == view
    changed = set()
    for name in report.selects():
        control = report.page.locator(f"select[data-control={name}]:visible").first
        if control.is_disabled():
            continue
        before = control.input_value()
        options = control.locator("option").evaluate_all("(options) => options.map((option) => option.value)")
        for value in [*(option for option in options if option != before), before]:
            report.choose(control, value)
            report.check(f"{view}: {name} = {value}")
            assert control.input_value() == value
            assert report.view() == view
        changed.add(name)
    assert changed >= CONTROLS.get(view, set()) | {"theme"}


def test_a_cell_of_the_heatmap_opens_its_tensor(small, opened):
    report = opened(small[1], "#/heatmap?metric=amax&type=mxfp8&iteration=1&rank=1")
    x, y, site, layer = report.page.evaluate(
        """() => {
            const node = document.querySelector("[data-plot=heatmap]");
            const { xaxis, yaxis, _size } = node._fullLayout;
            const box = node.getBoundingClientRect();
            const [column, row] = [1, 3];
            return [box.left + _size.l + xaxis.c2p(column), box.top + _size.t + yaxis.c2p(row),
                    yaxis.ticktext[row], xaxis.ticktext[column]];
        }"""
    )
    report.page.mouse.move(x - 1, y - 1)
    report.page.mouse.click(x, y)
    report.wait_for("location.hash.startsWith('#/tensor/')")
    assert report.hash.startswith(f"#/tensor/mxfp8/{site}/{layer}?")
    assert "iteration=1" in report.hash
    assert "rank=1" in report.hash
    assert report.view() == "tensor"


def test_a_deep_link_opens_that_tensor(small, opened, cells):
    report = opened(small[1], "#/tensor/mxfp8/fc2.x/1?iteration=1&rank=0")
    assert report.view() == "tensor"
    text = report.page.locator("section[data-view=tensor]").inner_text()
    assert "fc2.x" in text
    assert "layer 1" in text
    amax = cells.loc[("mxfp8", 1, 0, "fc2.x", 1), "amax"]
    assert f"{amax:.4g}" in text


def test_a_link_to_what_is_not_there_says_so(small, opened):
    report = opened(small[1], "#/tensor/bf16/nothing.x/77")
    assert "no nothing.x" in report.page.locator("section[data-view=tensor]").inner_text()


def test_findings_lead_to_what_they_are_about(small, opened):
    report = opened(small[1])
    links = report.page.locator("[data-finding] a[data-action=show]").evaluate_all("(all) => all.map((a) => a.hash)")
    assert links
    for link in links:
        report.follow(link)
        assert report.view() in VIEWS
        assert not re.search("not captured", report.page.locator("main").inner_text(), re.IGNORECASE), link
        report.check(link)


def test_the_table_sorts(small, opened, cells):
    report = opened(small[1], "#/table")
    head = report.page.locator("[data-table] th[data-column=amax] button")
    for ascending in (False, True):
        head.click()
        report.settle()
        rows = report.page.locator("[data-table] tr[data-row]").all()[:12]
        shown = [cells.loc[place_of(report, row), "amax"] for row in rows]
        assert shown == sorted(cells["amax"], reverse=not ascending)[: len(rows)]


def test_the_table_filters(small, opened, cells):
    report = opened(small[1], "#/table")
    report.page.locator("[data-control=filter]").fill("fc2 layer=1 sqnr_mxfp4<19")
    names = cells.index.get_level_values("site")
    wanted = cells[
        names.str.contains("fc2") & (cells.index.get_level_values("layer_idx") == 1) & (cells["sqnr_mxfp4"] < 19)
    ]
    report.wait_for("location.hash.includes('filter')")
    found = {place_of(report, row) for row in report.page.locator("[data-table] tr[data-row]").all()}
    assert 0 < len(wanted) < len(cells)
    assert found <= set(wanted.index)
    assert f"{len(wanted)} of {len(cells)} rows" in report.page.locator("section[data-view=table]").inner_text()


def test_the_csv_holds_the_numbers_of_the_summary(small, opened, cells, tmp_path):
    report = opened(small[1], "#/table?filter=mxfp8")
    with report.page.expect_download() as download:
        report.page.locator("[data-action=csv]").click()
    download.value.save_as(tmp_path / "rows.csv")
    rows = pandas.read_csv(tmp_path / "rows.csv").rename(columns={"type": "quant_type", "layer": "layer_idx"})
    rows = rows.set_index(CELL).sort_index()
    expected = cells.loc[["mxfp8"]]
    assert list(rows.index) == list(expected.index)
    assert np.isneginf(expected["sqnr_mxfp8"]).any()
    for column in expected:
        found = rows[column].replace({"lost": -np.inf, "exact": np.inf}).astype(float)
        np.testing.assert_allclose(found, expected[column], rtol=1e-5, err_msg=column)


def test_the_keyboard_moves_opens_and_returns(small, opened):
    report = opened(small[1], "#/heatmap")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        report.page.keyboard.press(key)
        report.settle()
    chosen = report.page.evaluate("Report.router.state().params")
    sites = report.page.evaluate("document.querySelector('[data-plot=heatmap]')._fullLayout.yaxis.ticktext")
    assert (chosen["site"], chosen["layer"]) == (sites[1], "1")
    report.page.keyboard.press("Enter")
    report.wait_for("location.hash.startsWith('#/tensor/')")
    assert f"/{sites[1]}/1" in report.hash
    report.page.keyboard.press("Escape")
    report.wait_for("location.hash.startsWith('#/heatmap')")
    assert report.view() == "heatmap"
    report.page.keyboard.press("/")
    report.wait_for("document.activeElement?.dataset.control === 'filter'")
    assert report.view() == "table"
    report.page.keyboard.press("Escape")
    report.page.keyboard.press("?")
    report.page.wait_for_selector("dialog[open]")
    report.page.keyboard.press("Escape")
    report.page.wait_for_selector("dialog[open]", state="detached")


def ground(report):
    return report.page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_the_theme_is_chosen_and_kept(small, opened):
    report = opened(small[1], color_scheme="light")
    light = ground(report)
    report.choose(report.page.locator("[data-control=theme]"), "dark")
    assert report.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert ground(report) != light
    report.page.reload()
    report.settle()
    assert ground(report) != light


def test_the_theme_follows_the_system(small, opened):
    light, dark = (opened(small[1], color_scheme=scheme) for scheme in ("light", "dark"))
    assert ground(light) != ground(dark)
    assert light.page.evaluate("document.documentElement.dataset.theme") == "light"
    assert dark.page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_reload_keeps_the_place(small, opened):
    report = opened(small[1], "#/heatmap")
    report.choose(report.page.locator("select[data-control=metric]:visible"), "kurtosis")
    report.choose(report.page.locator("select[data-control=type]:visible"), "mxfp8")
    before = report.hash
    report.page.reload()
    report.settle()
    assert report.hash == before
    assert report.page.locator("select[data-control=metric]:visible").input_value() == "kurtosis"
    assert report.page.locator("select[data-control=type]:visible").input_value() == "mxfp8"


@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 900}, NARROW], ids=["wide", "narrow"])
def test_nothing_is_wider_than_the_screen(small, opened, viewport):
    report = opened(small[1], viewport=viewport)
    for view in VIEWS:
        report.follow(f"#/{'' if view == 'overview' else view}")
        assert report.view() == view
        wide = report.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, view
