"""What members told is known up to their last heartbeat, and is known to the next driver."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncflow.driver.lives import Lives
from asyncflow.driver.members import Members
from asyncflow.net.directory import Beat, Directory, Member


class Clock:
    """Monotonic seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def members(directory: Directory, folder: Path, *, started: float = 0.0) -> Members:
    weights = SimpleNamespace(fence=lambda attempt: None, leave=lambda worker: None)

    async def expire(*, worker: str, timeout: float) -> None:
        return None

    queue = SimpleNamespace(expire=expire)
    return Members(
        directory,
        queue=queue,  # type: ignore[arg-type]
        weights=weights,  # type: ignore[arg-type]
        lives=Lives(opened=0.0),
        memory=folder / "lives.json",
        started=started,
        changed=lambda: None,
    )


def beat(directory: Directory, worker: str, **status: float) -> None:
    directory.heartbeat(Beat(incarnation=worker, revision=0, status=dict(status)))


def join(directory: Directory, worker: str, *, index: int = 0) -> None:
    directory.register(Member(role="rollout", index=index, incarnation=worker, info={"started": 0.0}))


def test_a_member_is_known_to_have_lived_up_to_its_last_heartbeat(tmp_path: Path) -> None:
    clock = Clock()
    directory = Directory(clock=clock)
    seen = members(directory, tmp_path)
    join(directory, "a")
    clock.now = 4.0
    beat(directory, "a", busy_s=1.0, tokens_generated=7)
    clock.now = 6.0
    seen.observe(6.0)
    assert seen.lives.idle_shares(6.0) == {"rollout": pytest.approx(0.75)}
    assert seen.lives.tokens_generated == 7


async def test_figures_survive_the_driver_and_those_who_died_before_it(tmp_path: Path) -> None:
    directory = Directory()
    first = members(directory, tmp_path)
    for index, worker in enumerate("ab"):
        join(directory, worker, index=index)
        beat(directory, worker, busy_s=1.0, tokens_generated=10)
    first.observe(10.0)
    directory.leave("a", "killed")
    first.remember(20.0)
    directory = Directory()
    second = members(directory, tmp_path, started=50.0)
    join(directory, "b", index=1)
    beat(directory, "b", busy_s=5.0, tokens_generated=25)
    second.observe(60.0)
    assert second.lives.tokens_generated == 35
    assert second.lives.up_s(0.0, 60.0) == pytest.approx(60.0, abs=1.0), "b lived while there was no driver"


async def test_hearing_ends_when_everybody_was_heard_since(tmp_path: Path) -> None:
    directory = Directory()
    there = members(directory, tmp_path)
    await there.hear(within_s=10.0)
    for index, worker in enumerate("ab"):
        join(directory, worker, index=index)
    hearing = asyncio.create_task(there.hear(within_s=10.0))
    await asyncio.sleep(0.1)
    beat(directory, "a")
    await asyncio.sleep(0.1)
    assert not hearing.done()
    beat(directory, "b")
    await hearing
    await there.hear(within_s=0.1)
