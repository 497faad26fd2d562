"""The harness itself: what goes wrong in a page is seen, so that a test of the report can fail."""

import pytest

from tests.browser.chromium import OpenedReport

PAGE = "<!doctype html><html data-ready=true><body><script>{script}</script></body></html>"
FAULTS = {
    "console": "console.error('broken')",
    "uncaught": "throw new Error('broken')",
    "rejected": "Promise.reject(new Error('broken'))",
    "dialog": "setTimeout(() => alert('broken'))",
    "image": "new Image().src = 'https://broken.invalid/x.png'",
    "request": "fetch('https://broken.invalid/x').catch(() => null)",
    "told": "document.documentElement.dataset.error = 'broken'",
}


def opened_page(chromium, tmp_path, script):
    (tmp_path / "page.html").write_text(PAGE.format(script=script))
    report = OpenedReport(chromium, tmp_path / "page.html").open("")
    for _ in range(10):
        report.settle()
    return report


@pytest.mark.parametrize("script", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(chromium, tmp_path, script):
    report = opened_page(chromium, tmp_path, script)
    with pytest.raises(AssertionError, match="broken"):
        report.check()
    report.context.close()


def test_a_page_without_faults_passes(chromium, tmp_path):
    report = opened_page(chromium, tmp_path, "console.log('fine')")
    report.check()
    report.context.close()
