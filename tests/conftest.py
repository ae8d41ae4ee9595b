"""Settings of all tests: the same examples each time, no bound on how long one takes on a busy machine."""

import gc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

import browser
from kube.build import BuildError, binary

TOGETHER = (
    "tests/cluster/test_",
    "tests/cluster/server/",
    "tests/rollout/test_engine_vllm.py",
    "tests/training/",
    "tests/page/test_browser.py",
    "tests/system/test_algorithms.py",
    "tests/system/test_job_rules.py",
)
"""Tests that one worker runs, which then has the one control plane that they need, the one vLLM server, the one process
that has imported torch and the one gang of each file, the one browser, the one model that was warmed up, or the one job
that is scraped."""
BINARIES = {
    "plane": ("etcd", "kube-apiserver", "kubectl", "controller-gen"),
    "kwok_plane": ("kube-controller-manager", "kwok", "controller-gen"),
    "render": ("helm",),
    "scraped": ("promtool",),
}
"""By fixture: what must be built for it."""
LONGEST = ("system", "processes", "weights")
"""Folders whose tests begin next, so that at the end no worker waits for one of them."""

settings.register_profile("asyncflow", deadline=None, derandomize=True)
settings.load_profile("asyncflow")
gc.disable()  # until everything is imported


class Scheduling(LoadScopeScheduling):
    """A scheduler by which tests that belong together are begun first; everything else goes to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        return next((scope for scope in TOGETHER if nodeid.startswith(scope)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the garbage collector pass over what was imported: it is no garbage, and some tests collect often. Then
    build what tests need: minutes where nothing is cached, which are no part of any test's time limit.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    if session.config.option.collectonly:
        return
    wanted = {fixture for item in session.items for fixture in getattr(item, "fixturenames", ())}
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if "chromium" in wanted:
        try:
            browser.find()
        except browser.BrowserError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    for fixture in wanted & BINARIES.keys():
        for name in BINARIES[fixture]:
            try:
                binary(name, say=reporter.write_line if reporter is not None else lambda _: None)
            except BuildError as error:
                pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


def _rank(path: Path) -> int:
    return min((LONGEST.index(part) for part in path.parts if part in LONGEST), default=len(LONGEST))
