"""The progress of the step that is being made: real counts of the queue, the trainer's ranks and the rollouts."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncflow.api.status import StepProgress
from asyncflow.driver.progress import RunProgress, StepWatch, log_progress
from asyncflow.queue.protocol.messages import PartitionSnapshot, StepState


class Told:
    """A queue that tells of one step, and that all ranks have finished step ``staged``."""

    def __init__(self, *, staged: int) -> None:
        self.asked: list[int] = []
        self.staged = staged

    async def snapshot(self, *, partition: str, step: int, timeout: float) -> PartitionSnapshot:
        self.asked.append(step)
        done = {"rollout": 13, "advantage": 8}
        return PartitionSnapshot(
            next_serial=5,
            missing=[],
            steps={step: StepState(serials=[0, 1, 2, 3, 4], done=done, undone={}, filtered=8, excluded=2)},
            attempt=1,
            last_committed_step=0,
            last_staged_step=self.staged,
            closed=None,
        )


async def test_what_is_generated_trained_and_published_is_told(tmp_path: Path) -> None:
    queue, clock, progress = Told(staged=3), iter([3.0, 5.0]), RunProgress(tmp_path, steps=10, now=0.0)
    progress.catch_up(3, attempt=1)
    told = {
        "trainer": [
            {"step": 3, "trained": 3, "publishing": 3, "saving": False},
            {"step": 2, "trained": 30, "publishing": -1, "saving": False},
        ],
        "rollout": [{"running": 5}, {"running": 4}],
    }
    members = SimpleNamespace(statuses=told.__getitem__, lives=SimpleNamespace(tokens_generated=300))
    watch = StepWatch(
        queue,  # type: ignore[arg-type]
        progress=progress,
        members=members,  # type: ignore[arg-type]
        samples=32,
        clock=lambda: next(clock),
    )
    first = await watch.observe()
    assert first == StepProgress(
        step=4, samples=32, generated=13, filtered=8, trained=3, running=9, tokens_per_second=0.0, publishing=3
    ), "the second rank is still in the step before"
    told["trainer"][1] = {"step": 3, "trained": 4, "publishing": -1, "saving": False}
    members.lives.tokens_generated = 360
    second = await watch.observe()
    assert second is not None
    assert (second.trained, second.tokens_per_second) == (7, 30)
    assert queue.asked == [4, 4]


async def test_a_step_that_was_reported_to_a_driver_now_gone_is_noticed(tmp_path: Path) -> None:
    queue, progress = Told(staged=5), RunProgress(tmp_path, steps=7, now=0.0)
    progress.catch_up(5, attempt=1)
    members = SimpleNamespace(statuses=lambda role: [], lives=SimpleNamespace(tokens_generated=0))
    watch = StepWatch(queue, progress=progress, members=members, samples=32)  # type: ignore[arg-type]
    await watch.observe()
    queue.staged = 6
    await watch.observe()
    assert progress.done == 6, "the last rank finished it after this driver had read the ledger"
    queue.staged = 7
    await watch.observe()
    assert progress.done == 7
    assert await watch.observe() is None
    assert queue.asked == [6, 6, 7]


async def test_the_log_tells_of_progress_at_least_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, told = 0.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 60.0:
            raise TimeoutError

    def words() -> str:
        told.append(now)
        return f"step 4 at {now:g}"

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with caplog.at_level(logging.INFO), pytest.raises(TimeoutError):
        await log_progress(words)
    assert [record.message for record in caplog.records] == [f"step 4 at {at:g}" for at in told]
    assert 3.0 < max(after - before for before, after in pairwise([0.0, *told, now])) <= 8.0, "a busy loop has 2 s"


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            StepProgress(step=4, samples=1024, generated=412, trained=128, running=96, tokens_per_second=3100),
            "step 4: generated 412 of 1024, trained 128 of 1024; 96 sequences running, 3100 tokens/s",
        ),
        (
            StepProgress(step=4, samples=8, generated=8, trained=8, publishing=3, saving=True),
            "step 4: generated 8 of 8, trained 8 of 8; publishing θ_3, writing a checkpoint",
        ),
        (
            StepProgress(step=1, samples=8, filtered=640, running=1),
            "step 1: generated 0 of 8, trained 0 of 8; 640 filtered, 1 sequence running",
        ),
    ],
)
def test_it_is_one_sentence(progress: StepProgress, words: str) -> None:
    assert progress.words == words
