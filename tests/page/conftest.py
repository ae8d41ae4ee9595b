"""One headless Chromium, and pages of it that reach what is served here and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, sync_playwright

import browser

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "benchmarks", ROOT / "tests" / "system", ROOT / "tests" / "page"):
    sys.path.insert(0, str(folder))

from watched_page import Watched  # noqa: E402  it lies beside


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser. While it is there an event loop runs in this thread, so that no other test can have one."""
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=browser.find(), args=list(browser.FLAGS))
        yield made
        made.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Watched]]:
    """Open a page at a width; what went wrong on it fails the test."""
    opened: list[Watched] = []

    def at(url: str, *, width: int = 1280, scheme: str = "light", shows: str = "#tiles dd") -> Watched:
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        parts = urlsplit(url)
        watched = Watched(page, f"{parts.scheme}://{parts.netloc}")
        opened.append(watched)
        page.goto(url)
        page.wait_for_selector(shows)
        return watched

    yield at
    for watched in opened:
        watched.page.close()
        assert watched.wrong == []
