"""The chart, rendered by Helm."""

from collections.abc import Callable
from typing import Any

import pytest

import chart


@pytest.fixture
def render() -> Callable[..., list[dict[str, Any]]]:
    return chart.objects
