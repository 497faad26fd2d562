"""Names out of files are shown as they are, whatever they look like, and nothing of them runs."""

from urllib.parse import quote

import pandas
import pytest

from tests.browser.captures import HOSTILE

VIEWS = ("", "heatmap", "tensor", "attention", "compare", "table")


def unharmed(report, what=""):
    assert report.page.evaluate("typeof window.hacked") == "undefined", what
    assert report.page.locator("img, iframe, object, embed").count() == 0, what
    report.check(what)


@pytest.mark.parametrize("view", VIEWS)
def test_no_name_runs_in_any_view(hostile, opened, view):
    report = opened(hostile[1], f"#/{view}")
    for name in report.selects():
        control = report.page.locator(f"select[data-control={name}]:visible").first
        if name == "theme" or control.is_disabled():
            continue
        for value in control.locator("option").evaluate_all("(options) => options.map((option) => option.value)")[:3]:
            report.choose(control, value)
            unharmed(report, f"{view}: {name} = {value}")
    unharmed(report, view)


def test_links_to_hostile_names_show_them_as_text(hostile, opened):
    sites = sorted(hostile[0].summary["site"].unique())
    report = opened(hostile[1], "#/tensor")
    for name in HOSTILE:
        site = next(site for site in sites if name in site)
        report.follow(f"#/tensor/bf16/{quote(site, safe='')}/1")
        report.page.mouse.move(400, 500)
        unharmed(report, site)
        text = report.page.locator("section[data-view=tensor]").inner_text()
        assert "".join(name.split())[:40] in "".join(text.split())
        wide = report.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, site


def test_hovering_over_the_heatmap_runs_nothing(hostile, opened):
    report = opened(hostile[1], "#/heatmap?metric=amax")
    box = report.page.locator("[data-plot=heatmap]").bounding_box()
    for step in range(12):
        report.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * (step + 0.5) / 12)
        report.page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")
    unharmed(report)


def test_hostile_filters_are_words(hostile, opened):
    report = opened(hostile[1], "#/table")
    for name in HOSTILE:
        report.follow(f"#/table?filter={quote(name, safe='')}")
        unharmed(report, name)


def test_hostile_hashes_open_something(hostile, opened):
    report = opened(hostile[1], "#/%")
    for hash in ("#/tensor", "#/tensor/%E0%A4%A/<img>/x", "#/heatmap?metric=__proto__&format=constructor", "#<b>"):
        report.follow(hash)
        unharmed(report, hash)


def test_the_csv_starts_no_formula(hostile, opened, tmp_path):
    report = opened(hostile[1], "#/table")
    with report.page.expect_download() as download:
        report.page.locator("[data-action=csv]").click()
    download.value.save_as(tmp_path / "rows.csv")
    rows = pandas.read_csv(tmp_path / "rows.csv")
    assert len(rows) == len(hostile[0].summary)
    assert not rows["site"].str.match(r"[=+@-]").any()
