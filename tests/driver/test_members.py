"""Reports of members are known up to their last heartbeat, and are known to the next driver."""

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from asyncflow.api.names import HANDED_ON
from asyncflow.driver.lives import Lives
from asyncflow.driver.members import Members
from asyncflow.errors import DeadlineExceeded, StaleHandle
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Best, Directives, Heartbeat, HeartbeatReply, Member


class Clock:
    """Monotonic seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def members(directory: Directory, folder: Path, *, started: float = 0.0, calls: list[Any] | None = None) -> Members:
    """calls: takes the workers whose leases end, and the attempts that fence older ones."""
    called = [] if calls is None else calls
    weights = SimpleNamespace(catalogue=SimpleNamespace(fence=called.append))

    async def expire(*, worker: str, timeout: float) -> None:
        called.append(worker)

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


def beat(directory: Directory, worker: str, **status: Any) -> None:
    directory.heartbeat(Heartbeat(incarnation=worker, revision=0, status=dict(status)))


def join(directory: Directory, worker: str, *, index: int = 0, role: str = "rollout", attempt: int = 0) -> None:
    directory.register(Member(role=role, index=index, incarnation=worker, attempt=attempt))


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
    known = seen.lives.dump()["a"]
    assert (known.started, known.seen) == (0.0, 4.0)
    (there,) = seen.present()
    assert (there.silent_s, there.age_s) == (2.0, 6.0)


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
    assert {name: life.left for name, life in known.items() if name in "ab"} == {"a": True, "b": False}


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
    told = directory.heartbeat(Heartbeat(incarnation="follower-9-a", revision=0))
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
    assert not directory.heartbeat(Heartbeat(incarnation="unit", revision=0)).directives.stop
    waiting = directory.heartbeat(Heartbeat(incarnation="unit", revision=0))
    directory.leave("a", "left")
    await asyncio.sleep(0.05)
    assert not waiting.done(), "one of several that have left is nothing to tell the others"
    directory.leave("b", "left")
    assert (await asyncio.wait_for(waiting, 10)).directives.stop
    directory.leave("unit", "left")
    await dismissing


async def test_who_works_under_leases_and_is_gone_loses_them_at_once_until_the_end(tmp_path: Path) -> None:
    directory, calls = Directory(), list[Any]()
    there = members(directory, tmp_path, calls=calls)
    for role in ("rollout", "task-judge", "reference", "trainer", "storage", "controller", "follower"):
        join(directory, role, role=role)
    calls.clear()
    for role in ("rollout", "task-judge", "trainer", "storage", "controller", "follower"):
        directory.leave(role, "killed")
    await asyncio.sleep(0)
    assert calls == ["rollout", "task-judge"]
    dismissing = asyncio.create_task(there.dismiss(within_s=60.0))
    await asyncio.sleep(0)
    directory.leave("reference", "left")
    await dismissing
    assert calls == ["rollout", "task-judge"], "what is over is given to nobody again"


async def test_a_newer_attempt_of_the_trainer_fences_the_weights_of_older_ones(tmp_path: Path) -> None:
    directory, calls = Directory(), list[Any]()
    there = members(directory, tmp_path, calls=calls)
    for attempt in (0, 2):
        join(directory, f"t{attempt}", role="trainer", attempt=attempt)
    join(directory, "a")
    assert (there.trainer_attempt, calls) == (2, [0, 2])


async def test_what_is_wanted_of_a_member_is_said_in_every_answer_until_it_changes(tmp_path: Path) -> None:
    directory = Directory()
    there = members(directory, tmp_path)
    join(directory, "a")
    join(directory, "b", index=1)
    join(directory, "t", role="trainer")

    def beaten(worker: str) -> asyncio.Future[HeartbeatReply]:
        """The heartbeat of a member that has heard all that there was to say."""
        answer = directory.heartbeat(Heartbeat(incarnation=worker, revision=0))
        return answer if isinstance(answer, asyncio.Future) else beaten(worker)

    def told(worker: str) -> Directives:
        waiting = beaten(worker)
        directory.answer_all()
        return waiting.result().directives

    for want in (lambda: there.drain("a"), there.ask_for_checkpoint, there.ask_for_checkpoint):
        waiting = beaten("a")
        want()
        assert waiting.done(), "it is told at once"
    there.judged, there.best = 7, Best(step=4, by="greedy", value=0.5)
    everybody = Directives(checkpoint=2, judged=7, best=there.best)
    assert [told(worker) for worker in "bt"] == [everybody] * 2
    assert [told("a") for _ in range(2)] == [replace(everybody, drain=True)] * 2
    for nobody in ("c", "t"):
        with pytest.raises(StaleHandle, match=f"no rollout {nobody}"):
            there.drain(nobody)


async def test_what_the_first_rank_and_the_rollouts_say_of_their_work_is_known(tmp_path: Path) -> None:
    directory = Directory()
    there = members(directory, tmp_path)
    assert (there.kept_best, there.exports, there.exported, there.sample_rates()) == (None, {}, False, {})
    for index in (0, 1):
        join(directory, f"t{index}", index=index, role="trainer")
        join(directory, f"r{index}", index=index)
    beat(directory, "t1", best={"step": 9, "by": "reward", "value": 9.0}, exports={"other": 9}, exported=True)
    assert (there.kept_best, there.exports, there.exported) == (None, {}, False)
    beat(directory, "t0", best={"step": 4, "by": "greedy", "value": 0.5}, exports={"best": 4}, exported=True)
    assert (there.kept_best, there.exports) == (Best(step=4, by="greedy", value=0.5), {"best": 4})
    assert there.exported
    beat(directory, "r0", delivered=6, busy_s=3.0)
    beat(directory, "r1", busy_s=0.0)
    assert there.sample_rates() == {"r0": 2.0}
    assert [rollout.id for rollout in there.rollouts(newest=None, lag=1)] == ["r0", "r1"]


async def test_gathering_ends_when_all_are_there_or_says_who_is_missing(tmp_path: Path) -> None:
    directory, waiting = Directory(), ["b", "a"]
    there = members(directory, tmp_path)

    async def changed() -> None:
        join(directory, waiting[-1], index=len(waiting))
        waiting.pop()

    await there.gather(Counter(rollout=2), changed=changed, within_s=60.0)
    assert waiting == []
    with pytest.raises(DeadlineExceeded, match=r"rollout, trainer did not join within 0 s"):
        await there.gather(Counter(rollout=2, trainer=1), changed=lambda: asyncio.sleep(0.001), within_s=0.0)
