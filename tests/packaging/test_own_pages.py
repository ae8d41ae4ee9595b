"""The pages about what users write themselves: each fits on a screen, and a test runs what it shows."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDER = TESTS.parent / "docs" / "guide" / "own"
SCREEN = 60
"""Lines of a screen."""
RUN_IN = {
    "algorithm": "algorithms/test_own.py",
    "engine": "rollout/test_own_engine.py",
    "loop": "session/test_pages.py",
    "reward": "rewards/test_own.py",
    "task": "tasks/test_documentation.py",
}
"""By page: the test that runs it, or compares it with the example that is run."""


@pytest.mark.parametrize("page", sorted(FOLDER.iterdir()), ids=lambda page: page.stem)
def test_a_page_fits_on_a_screen_and_is_run(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= SCREEN
    test = (TESTS / RUN_IN[page.stem]).read_text()
    assert page.name in test
    assert "own" in test
