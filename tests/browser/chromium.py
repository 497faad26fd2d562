"""A report opened in the distribution's Chromium, without a network, with everything that goes wrong collected."""

import os
import shutil
import time
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
ARGUMENTS = ["--enable-unsafe-swiftshader", "--use-angle=swiftshader"]  # WebGL without a graphics card
OF_THE_FILE = ("file:", "data:", "blob:")
READY = "html[data-ready=true]"
MILLISECONDS = 60_000  # a machine that does other work, too
NEXT_FRAME = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))"


@contextmanager
def launched():
    """The browser; the test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium on the PATH: {', '.join(NAMES)}")
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS, *as_root])
        except sync_api.Error as error:
            pytest.skip(f"{path} does not start: {str(error).partition(chr(10))[0]}")
        yield browser
        browser.close()


class OpenedReport:
    """One report in a context of its own: no cookies, no history, no network.

    Attributes:
        page: Playwright's.
        problems: One line for every console error, uncaught error, dialog and request that leaves the file.
    """

    def __init__(self, browser, path, **context):
        self.path, self.problems = path, []
        self.context = browser.new_context(offline=True, **{"viewport": {"width": 1280, "height": 900}} | context)
        self.context.set_default_timeout(MILLISECONDS)
        self.context.route("**/*", self._request)
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        self.page.on("dialog", self._dialog)

    def _request(self, route):
        if route.request.url.startswith(OF_THE_FILE):
            route.continue_()
            return
        self.problems.append(f"request: {route.request.url}")
        route.abort()

    def _console(self, message):
        if message.type == "error":  # warnings are the driver's, of WebGL without a graphics card
            self.problems.append(f"console: {message.text}")

    def _dialog(self, dialog):
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, hash="#/"):
        """As if the link was opened fresh."""
        self.page.goto("about:blank")
        self.page.goto(self.path.as_uri() + hash)
        self.page.wait_for_selector(READY)
        return self

    def follow(self, hash):
        """As if a link in the report was clicked."""
        self.page.evaluate("(hash) => { location.hash = hash; }", hash)
        self.settle()

    def settle(self):
        """Wait until what was just done is drawn."""
        self.page.evaluate(NEXT_FRAME)
        self.page.wait_for_selector(READY)

    def wait_for(self, expression):
        """Wait until a JavaScript expression is true; `Page.wait_for_function` needs eval, which the page forbids."""
        give_up = time.monotonic() + MILLISECONDS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < give_up, f"in vain: {expression}"
            self.page.evaluate(NEXT_FRAME)
        self.settle()

    def check(self, what=""):
        """Nothing has gone wrong so far."""
        error = self.page.evaluate("document.documentElement.dataset.error")
        assert error is None, f"{what}: {error}"
        assert not self.problems, f"{what}: {self.problems}"

    @property
    def hash(self):
        return self.page.evaluate("location.hash")

    def view(self):
        """The name of the one view that is seen."""
        seen = [
            view.get_attribute("data-view")
            for view in self.page.locator("section[data-view]").all()
            if view.is_visible()
        ]
        assert len(seen) == 1, seen
        return seen[0]

    def selects(self):
        """data-control -> locator of every drop-down list in sight."""
        found = self.page.locator("select[data-control]").all()
        return {one.get_attribute("data-control"): one for one in found if one.is_visible()}

    def choose(self, select, value):
        select.select_option(value)
        self.settle()
