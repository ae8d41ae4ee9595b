"""What holds for all tests: the same examples each time, no bound on how long one takes on a busy machine."""

from pathlib import Path

import pytest
from hypothesis import settings

LONGEST = ("cluster", "system", "processes")
"""Folders whose tests begin first, so that at the end no worker waits for one of them."""

settings.register_profile("asyncflow", deadline=None, derandomize=True)
settings.load_profile("asyncflow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(item.path))


def _rank(path: Path) -> int:
    return min((LONGEST.index(part) for part in path.parts if part in LONGEST), default=len(LONGEST))
