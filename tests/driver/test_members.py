"""What members told is known up to their last heartbeat, and is known to the next driver."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncflow.api.names import HANDED_ON
from asyncflow.driver.lives import Lives
from asyncflow.driver.members import Members
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Beat, Member


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
        swap_at="quota",
        memory=folder / "lives.json",
        started=started,
        changed=lambda: None,
    )


def beat(directory: Directory, worker: str, **status: float) -> None:
    directory.heartbeat(Beat(incarnation=worker, revision=0, status=dict(status)))


def join(directory: Directory, worker: str, *, index: int = 0) -> None:
    directory.register(Member(role="rollout", index=index, incarnation=worker))


def test_a_member_is_known_to_have_lived_up_to_its_last_heartbeat(tmp_path: Path) -> None:
    clock = Clock()
    directory = Directory(clock=clock)
    seen = members(directory, tmp_path)
    join(directory, "a")
    clock.now = 4.0
    beat(directory, "a", busy_s=1.0, tokens_generated=7, age_s=4.0)
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
    first.save(20.0)
    directory = Directory()
    second = members(directory, tmp_path, started=50.0)
    join(directory, "b", index=1)
    beat(directory, "b", busy_s=5.0, tokens_generated=25)
    second.observe(60.0)
    assert second.lives.tokens_generated == 35
    assert second.lives.up_s(0.0, 60.0) == pytest.approx(60.0, abs=1.0), "b lived while there was no driver"


async def test_who_left_as_told_is_not_taken_for_lost(tmp_path: Path) -> None:
    directory = Directory()
    there = members(directory, tmp_path)
    for index, (worker, reason) in enumerate((("a", HANDED_ON), ("b", "silent for 5 s"))):
        join(directory, worker, index=index)
        beat(directory, worker, busy_s=1.0)
        there.observe(10.0)
        directory.leave(worker, reason)
    there.save(20.0)
    known = members(Directory(), tmp_path).lives.dump()
    assert {name: life["left"] for name, life in known.items() if name in "ab"} == {"a": True, "b": False}


async def test_a_role_that_has_left_counts_as_none_and_is_not_left_out(tmp_path: Path) -> None:
    directory = Directory()
    there = members(directory, tmp_path)
    assert dict(there.counts) == {}
    join(directory, "a")
    assert dict(there.counts) == {"rollout": 1}
    directory.leave("a", "killed")
    assert dict(there.counts) == {"rollout": 0}


LIFE = b'{"a":{"role":"rollout","started":0,"seen":1,"busy_s":-1}}'


@pytest.mark.parametrize("damaged", [b"", bytes(99), b"[]", b'{"a":7}', b'{"a":{"role":"rollout"}}', LIFE])
def test_a_damaged_memory_costs_figures_and_no_run(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "lives.json").write_bytes(damaged)
    there = members(Directory(), tmp_path)
    assert there.lives.dump() == {}
    assert (tmp_path / "lives.json.bad").read_bytes() == damaged
    there.save(1.0)
    assert list(members(Directory(), tmp_path).lives.dump()) == ["driver 0.0"]


def test_a_memory_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = members(Directory(), tmp_path / "none")
    for now in (1.0, 2.0):
        there.save(now)
    assert ["cannot be written" in record.message for record in caplog.records] == [True]
    (tmp_path / "none").mkdir()
    there.save(3.0)
    assert (tmp_path / "none" / "lives.json").exists()


async def test_hearing_ends_when_everybody_was_heard_since(tmp_path: Path) -> None:
    directory = Directory()
    there = members(directory, tmp_path)
    await there.await_heartbeats(within_s=10.0)
    for index, worker in enumerate("ab"):
        join(directory, worker, index=index)
    hearing = asyncio.create_task(there.await_heartbeats(within_s=10.0))
    await asyncio.sleep(0.1)
    beat(directory, "a")
    await asyncio.sleep(0.1)
    assert not hearing.done()
    beat(directory, "b")
    await hearing
    await there.await_heartbeats(within_s=0.1)


async def test_nobody_waits_for_a_follower_at_the_end(tmp_path: Path) -> None:
    directory = Directory()
    there = members(directory, tmp_path)
    directory.register(Member(role="follower", index=9, incarnation="follower-9-a"))
    await there.dismiss(within_s=60.0)
    told = directory.heartbeat(Beat(incarnation="follower-9-a", revision=0))
    assert told.directives.stop
    there.observe(1.0)
    assert "follower" not in there.lives.idle_shares(1.0)


async def test_who_leaves_last_hears_of_the_end_once_all_others_are_gone(tmp_path: Path) -> None:
    directory = Directory()
    there = members(directory, tmp_path)
    for index, worker in enumerate("ab"):
        join(directory, worker, index=index)
    directory.register(Member(role="storage", index=0, incarnation="unit"))
    dismissing = asyncio.create_task(there.dismiss(within_s=60.0))
    await asyncio.sleep(0)
    assert not directory.heartbeat(Beat(incarnation="unit", revision=0)).directives.stop
    waiting = directory.heartbeat(Beat(incarnation="unit", revision=0))
    directory.leave("a", "left")
    await asyncio.sleep(0.05)
    assert not waiting.done(), "one of several that have left is nothing to tell the others"
    directory.leave("b", "left")
    assert (await asyncio.wait_for(waiting, 10)).directives.stop
    directory.leave("unit", "left")
    await dismissing
