"""A job has succeeded when its last weights are committed, evaluated and exported, and not a moment before."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncflow.driver.driver import ChangeSignal
from asyncflow.driver.ending import Ending
from asyncflow.driver.groups import RewardTally
from asyncflow.driver.lives import Lives
from asyncflow.driver.members import Members
from asyncflow.driver.progress import RunProgress
from asyncflow.errors import DeadlineExceeded
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Heartbeat, HeartbeatReply, Member


class Job:
    """An ending with a real directory; the ledger and what is unevaluated are as set."""

    def __init__(self, folder: Path, *, export_s: float = 10.0) -> None:
        self.committed = 0
        self.unevaluated: list[int] = []
        self.suspending = False
        self.directory = Directory()
        self.changes = ChangeSignal(every_s=10.0)
        self.progress = RunProgress(folder, steps=2, now=0.0)
        catalogue = SimpleNamespace(fence=lambda attempt: None)
        weights = SimpleNamespace(catalogue=catalogue, leave=lambda worker: None)
        self.members = Members(
            self.directory,
            queue=self,
            weights=weights,
            lives=Lives(),
            swap_at="quota",
            memory=folder / "lives.json",
            started=0.0,
            changed=self.changes.notify,  # type: ignore[arg-type]
        )
        self.ending = Ending(
            folder=folder,
            queue=self,  # type: ignore[arg-type]
            progress=self.progress,
            members=self.members,
            changed=self.changes.changed,
            unevaluated=lambda: self.unevaluated,
            suspending=lambda: self.suspending,
            export_s=export_s,
            devices=1,
            rewards=RewardTally(needed=1, keep=lambda totals: None),
            prompts_skipped=lambda: 0,
        )

    async def snapshot(self, *, partition: str, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(last_committed_step=self.committed)

    def make(self, step: int) -> None:
        self.progress.step({"step": step, "attempt": 0, "at": float(step), "wall_s": 1.0})

    def trainer(self, *, index: int = 0, attempt: int = 0, exported: bool) -> None:
        incarnation = f"trainer {index} {attempt}"
        self.directory.register(Member(role="trainer", index=index, incarnation=incarnation, attempt=attempt))
        self.directory.heartbeat(
            Heartbeat(incarnation=incarnation, revision=0, status={"exported": exported, "exports": {"export": 3}})
        )

    async def goes_on(self, ended: asyncio.Task[str]) -> bool:
        for _ in range(5):
            await asyncio.sleep(0)
            self.changes.notify()
        await asyncio.sleep(0)
        return not ended.done()


async def test_success_is_the_last_of_checkpoint_evaluations_and_export(tmp_path: Path) -> None:
    job = Job(tmp_path)
    ended = asyncio.create_task(job.ending.reached())
    job.make(1)
    assert await job.goes_on(ended)
    job.make(2)
    assert await job.goes_on(ended)
    job.unevaluated = [2]
    job.committed = 2
    assert await job.goes_on(ended)
    job.unevaluated = []
    job.trainer(index=1, exported=True)
    job.trainer(exported=False)
    assert await job.goes_on(ended), "rank 0 has not written export/ yet"
    job.trainer(exported=True)
    assert not await job.goes_on(ended)
    assert await ended == "Succeeded"
    assert job.ending.checkpoint is not None
    assert job.ending.checkpoint[0] == 2


async def test_a_trainer_that_died_while_it_exported_is_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.make(2)
    job.committed = 2
    ended = asyncio.create_task(job.ending.reached())
    job.trainer(exported=False)
    assert await job.goes_on(ended)
    job.directory.leave("trainer 0 0", "killed")
    assert await job.goes_on(ended)
    job.trainer(attempt=1, exported=False)
    assert await job.goes_on(ended)
    job.trainer(attempt=1, exported=True)
    assert not await job.goes_on(ended)


async def test_an_export_without_end_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, export_s=0.05)
    job.make(2)
    job.committed = 2
    job.trainer(exported=False)
    ended = asyncio.create_task(job.ending.reached())
    await asyncio.sleep(0)
    job.changes.notify()
    with pytest.raises(DeadlineExceeded, match="did not write export/ within"):
        await ended


async def test_a_suspension_needs_no_export_but_a_checkpoint_of_the_newest_step(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.make(1)
    job.suspending = True
    ended = asyncio.create_task(job.ending.reached())
    assert await job.goes_on(ended)
    job.committed = 1
    assert not await job.goes_on(ended)
    assert await ended == "Suspended"


async def test_those_on_whom_others_rely_are_dismissed_last(tmp_path: Path) -> None:
    job = Job(tmp_path)

    waiting: dict[str, asyncio.Future[HeartbeatReply]] = {}

    def told(role: str) -> bool:
        """Return whether ``role`` is told to stop, now or while its heartbeat has been waiting."""
        answered = waiting.pop(role, None) or job.directory.heartbeat(Heartbeat(incarnation=role, revision=0))
        if isinstance(answered, HeartbeatReply):
            return answered.directives.stop
        if answered.done():
            return answered.result().directives.stop or told(role)
        waiting[role] = answered
        return False

    for role in ("controller", "storage", "rollout"):
        job.directory.register(Member(role=role, index=0, incarnation=role))
    assert not told("rollout")
    ended = asyncio.create_task(job.members.dismiss(within_s=10.0))
    await asyncio.sleep(0)
    assert (told("rollout"), told("controller"), told("storage")) == (True, False, False)
    job.directory.leave("rollout", "left")
    await asyncio.sleep(0)
    assert (told("controller"), told("storage")) == (True, True)
    job.directory.leave("controller", "left")
    job.directory.leave("storage", "left")
    await asyncio.wait_for(ended, 5)
