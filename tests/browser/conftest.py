import pytest

from tests.browser.captures import report_of, write_hostile, write_small
from tests.browser.chromium import OpenedReport, launched


@pytest.fixture(scope="session")
def chromium():
    with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def small(chromium, tmp_path_factory):
    """(study, report) of `write_small`; made only where there is a browser to open it."""
    return report_of(write_small(tmp_path_factory.mktemp("small")), tmp_path_factory.mktemp("small-report"))


@pytest.fixture(scope="session")
def hostile(chromium, tmp_path_factory):
    """(study, report) of `write_hostile`."""
    return report_of(write_hostile(tmp_path_factory.mktemp("hostile")), tmp_path_factory.mktemp("hostile-report"))


@pytest.fixture
def opened(chromium):
    """Opens a report; at the end of the test nothing may have gone wrong in any that was opened."""
    reports = []

    def open_report(path, hash="#/", **context):
        reports.append(OpenedReport(chromium, path, **context))
        return reports[-1].open(hash)

    yield open_report
    for report in reports:
        report.check("at the end")
        report.context.close()
