"""A headless Chromium, and pages that record what must not happen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
_REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) => console.error(`policy: ${event.violatedDirective}`));
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; the test is skipped, with the reason, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"there is no Chromium: none of {', '.join(_NAMES)} is in the path")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=_OPTIONS)
        yield browser
        browser.close()


class Tab:
    """A page of the browser.

    Attributes:
        page: Playwright's.
        errors: messages on the console about errors or violated policies, and exceptions.
        requests: URLs that the page asked for.
    """

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url, self.errors, self.requests = url, [], []
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(30_000)
        self.page.add_init_script(_REPORT_VIOLATIONS)
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"{url}/")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait(self, selector: str, text: str) -> None:
        """Wait until an element has this text, and no other."""
        code = "([selector, text]) => document.querySelector(selector).textContent === text"
        self.page.wait_for_function(code, arg=[selector, text])

    def generated(self) -> str:
        """The generated text of the last request."""
        return "".join(self.page.locator(".turn:last-child .part").all_text_contents())

    def close(self) -> None:
        """Close the page, which has asked nobody but its server for anything, nor had errors that were not expected."""
        self.page.close()
        assert self.errors == []
        assert {url.startswith(self.url) for url in self.requests} == {True}
