"""A page in the browser that is watched, and the process that serves one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Page, Route

PATIENCE_MS = 100_000
"""A driver that was killed is back after seconds, on a busy machine after a minute."""


class Watched:
    """A page and what it asked for. expected: words of errors that the test causes."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.asked: list[str] = []
        self.expected: list[str] = []
        self._errors: list[str] = []
        self._origin = origin
        page.set_default_timeout(PATIENCE_MS)
        page.route("**/*", self._request)
        page.on("pageerror", lambda error: self._errors.append(str(error)))
        page.on("console", lambda line: line.type == "error" and self._errors.append(line.text))
        page.on("dialog", lambda dialog: self._errors.append(dialog.message))

    def _request(self, route: Route) -> None:
        parts = urlsplit(route.request.url)
        self.asked.append(route.request.url)
        if parts.scheme == "data" or f"{parts.scheme}://{parts.netloc}" == self._origin:
            route.continue_()
        else:
            self._errors.append(f"asked for {route.request.url}")
            route.abort()

    @property
    def wrong(self) -> list[str]:
        """Errors of the program, and what its policy refused, except for expected ones."""
        return [error for error in self._errors if not any(words in error for words in self.expected)]

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def remember_changes(self, selector: str) -> None:
        """Keep in ``window.changes`` the text and the kind that an element has after each change from now on."""
        self.page.evaluate(
            """selector => {
                const element = document.querySelector(selector)
                const keep = () => window.changes.push({ text: element.textContent, kind: element.dataset.kind })
                window.changes = []
                new MutationObserver(keep).observe(
                    element, { childList: true, characterData: true, subtree: true, attributes: true })
            }""",
            selector,
        )

    def until(self, condition: str) -> None:
        """Wait until JavaScript says so."""
        self.page.wait_for_function(condition, timeout=PATIENCE_MS)


@contextmanager
def shown(run: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a run by ``asyncflow ui``: its address with the key, and the process."""
    command = [sys.executable, "-m", "asyncflow", "ui", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            yield serving.stdout.readline().split()[-1], serving
        finally:
            serving.terminate()
