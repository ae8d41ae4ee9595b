"""Processes that feed sinks: whatever becomes of them, the driver goes on, and counts."""

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "telemetry"))
from sinks_world import RunFolder, job_with, step, third_party

from asyncflow.driver import sinks as module
from asyncflow.driver.sinks import Sinks

pytestmark = pytest.mark.process


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunFolder, Sinks, Counter[str]]]:
    """A run with the sink ``lines`` of a third party."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(third_party(tmp_path)), *os.environ.get("PYTHONPATH", "").split()])
    )
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)

    def made(**options: Any) -> tuple[RunFolder, Sinks, Counter[str]]:
        folder, failures = (
            RunFolder(tmp_path / "run", job_with([{"kind": "lines", "options": options}])),
            Counter[str](),
        )
        job = folder.path / "job.yaml"
        sinks = Sinks(["lines"], job=job, folder=folder.path, failed=lambda kind: failures.update([kind]))
        return folder, sinks, failures

    return made


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not ready():
            await asyncio.sleep(0.02)


def lines(folder: RunFolder) -> list[str]:
    file = folder.path / "sinks" / "lines" / "lines"
    return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []


async def test_a_sink_that_fails_is_started_again_and_goes_on_until_the_end(make: Any, caplog: Any) -> None:
    folder, sinks, failures = make(raises=2)
    folder.steps(step(1))
    with caplog.at_level(logging.WARNING):
        sinks.start()
        await until(lambda: lines(folder) == ["1"])
    folder.steps(step(2))
    sinks.notify()
    await until(lambda: lines(folder) == ["1", "2"])
    folder.steps(step(3))
    folder.ended("Succeeded")
    await sinks.close(within_s=60)
    assert lines(folder) == ["1", "2", "3", "closed"]
    assert failures == {"lines": 2}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1, "the same words are logged once"
    assert "exit status 1: error: sink lines: ConnectionError: the server is away: 0.25, " in said[0]


async def test_a_sink_that_hangs_is_not_waited_for(make: Any, caplog: Any) -> None:
    folder, sinks, failures = make(hangs=True)
    folder.steps(step(1))
    sinks.start()
    await until(lambda: lines(folder) == ["1"])
    process = sinks._running["lines"]
    await sinks.close(within_s=0.2)
    assert await process.wait() < 0
    assert "asyncflow sinks can write the rest" in caplog.text
    assert failures == {}


async def test_where_there_are_no_sinks_there_is_no_process(tmp_path: Path) -> None:
    sinks = Sinks([], job=tmp_path / "job.yaml", folder=tmp_path, failed=lambda _: None)
    sinks.start()
    sinks.notify()
    await sinks.close()
    assert sinks._running == {}
