"""The chart, rendered by a Helm that is built before the first test."""

from collections.abc import Callable
from typing import Any

import pytest

import chart
from kube.build import BuildError, binary


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build Helm now: minutes where nothing is cached, which are no part of any test's time limit."""
    wanted = any("render" in getattr(each, "fixturenames", ()) for each in session.items)
    if session.config.option.collectonly or not wanted:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    try:
        binary("helm", say=reporter.write_line if reporter is not None else lambda _: None)
    except BuildError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture
def render() -> Callable[..., list[dict[str, Any]]]:
    return chart.objects
