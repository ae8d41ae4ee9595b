"""The trainer against the real queue and the real catalogue."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_world import GROUPS, PARTITION, SIZE, Process, World, counting, join_trainer, training

from asyncflow.errors import Diverged, Fenced, PeerLost, ProtocolError, RowsLost, StaleHandle
from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rpc.membership import Directives
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.ranks import ProcessGroup

STEPS = 5
DELAYED = Schedule(steps=STEPS, lag=1, exact=True)


def counts(folder: Path) -> list[int]:
    latest = Checkpoints(folder / "checkpoints").latest()
    assert latest is not None
    latest.verify()
    return np.load(latest.folder / "counts.npy").tolist()


async def until(condition: object, what: str, *, within_s: float = 20) -> None:
    assert callable(condition)
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("whole", [True, False])
async def test_every_sample_is_trained_once_and_every_step_is_told(tmp_path: Path, whole: bool) -> None:
    async with World(tmp_path, whole=whole) as world:
        joined = await join_trainer(
            world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED, whole=whole, slot_tokens=16
        )
        running = asyncio.create_task(joined.run())
        await world.dispatch(1, STEPS, shuffled=1)
        assert await running == STEPS
        assert counts(tmp_path) == [1] * (STEPS * GROUPS * SIZE)
        assert world.catalogue.newest == Version(0, STEPS)
        await world.queue.close_partition(partition=PARTITION, step=STEPS, timeout=10)
    report = audit_ledger(tmp_path / "ledger")
    assert report.ok, report
    assert report.trained == STEPS * GROUPS * SIZE
    assert [said.step for said in joined.talk.reports] == list(range(1, STEPS + 1))
    assert {said.reward for said in joined.talk.reports} == {0.5}
    assert {said.samples for said in joined.talk.reports} == {GROUPS * SIZE}
    assert [said.staleness_start_max for said in joined.talk.reports] == [0, 1, 1, 1, 1]
    assert len({said.keys for said in joined.talk.reports}) == STEPS
    for said in joined.talk.reports:
        assert said.seconds.wall >= said.seconds.compute + said.seconds.optimizer + said.seconds.wait - 1e-3
    assert sum(said.seconds.checkpoint for said in joined.talk.reports) > 0


async def test_versions_that_are_evaluated_have_a_checkpoint_where_asked_for(tmp_path: Path) -> None:
    schedule = Schedule(steps=STEPS, lag=1, exact=True, eval_every=2)
    async with World(tmp_path) as world:
        joined = await join_trainer(
            world.places,
            counting(steps=STEPS),
            attempt=0,
            schedule=schedule,
            checkpoint_every=100,
            checkpoint_evaluated=True,
        )
        written: list[int] = []
        joined.trainer._saver._checkpoints = Checkpoints(
            tmp_path / "checkpoints", also=lambda steps: set(written.extend(steps[-1:]) or steps)
        )
        running = asyncio.create_task(joined.run())
        await world.dispatch(1, STEPS)
        assert await running == STEPS
    assert written == [2, 4, 5]


async def test_a_resumed_trainer_goes_on_at_its_checkpoint(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        first = await join_trainer(
            world.places, counting(steps=STEPS), attempt=0, schedule=Schedule(steps=3, lag=1, exact=True)
        )
        first.trainer._checkpoints.write = stop_at(2, first.trainer._checkpoints)  # type: ignore[method-assign]
        with pytest.raises(PowerCut):
            await first.run()
        second = await join_trainer(world.places, counting(steps=STEPS), attempt=1, schedule=DELAYED)
        assert await second.run() == STEPS
        assert [said.step for said in second.talk.reports] == [3, 4, 5]
        assert counts(tmp_path) == [1] * (STEPS * GROUPS * SIZE)
    assert audit_ledger(tmp_path / "ledger").trained == STEPS * GROUPS * SIZE


async def test_a_run_that_was_killed_and_resumed_ends_with_the_same_bits(tmp_path: Path, tiny_folder: Path) -> None:
    schedule = Schedule(steps=4, lag=0, exact=True)

    async def train(folder: Path, *, killed_after: int) -> bytes:
        async with World(folder, whole=True) as world:
            await world.dispatch(1, 4)
            for attempt in (0, 1):
                joined = await join_trainer(
                    world.places,
                    training(steps=4),
                    attempt=attempt,
                    schedule=schedule,
                    model=tiny_folder,
                    whole=True,
                    checkpoint_every=1,
                )
                if attempt == 0:
                    joined.trainer._checkpoints.write = stop_at(  # type: ignore[method-assign]
                        killed_after, joined.trainer._checkpoints
                    )
                with suppress(PowerCut):
                    assert await joined.run() == 4
            assert [said.step for said in joined.talk.reports] == list(range(killed_after + 1, 5))
        latest = Checkpoints(folder / "checkpoints").latest()
        assert latest is not None
        return (latest.folder / "model.safetensors").read_bytes()

    assert await train(tmp_path / "once", killed_after=4) == await train(tmp_path / "twice", killed_after=2)


class PowerCut(Exception):
    pass


def stop_at(step: int, checkpoints: Checkpoints) -> object:
    """Write checkpoints up to ``step``; the next one fails, as if the process had died before it."""
    write = checkpoints.write

    def guarded(manifest: object, *fill: object) -> object:
        if manifest.step > step:  # type: ignore[attr-defined]
            raise PowerCut
        return write(manifest, *fill)  # type: ignore[arg-type]

    return guarded


async def test_a_checkpoint_carries_the_versions_that_steps_after_it_still_need(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        first = await join_trainer(world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED)
        first.trainer._checkpoints.write = stop_at(4, first.trainer._checkpoints)  # type: ignore[method-assign]
        with pytest.raises(PowerCut):
            await first.run()
        latest = Checkpoints(tmp_path / "checkpoints").latest()
        assert latest is not None
        assert latest.manifest.carried == [3]
        second = await join_trainer(world.places, counting(steps=STEPS), attempt=1, schedule=DELAYED)
        await second.trainer._start()
        assert second.sender.versions == [Version(1, 3), Version(1, 4)]
        held = second.sender._holder.copies
        assert held[Version(1, 3)].arena.tensors["counts"].sum() == 3 * GROUPS * SIZE
        assert held[Version(1, 4)].arena.tensors["counts"].sum() == 4 * GROUPS * SIZE
        await second.run()


async def test_an_older_attempt_is_fenced(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, 1)
        old = await join_trainer(world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED)
        running = asyncio.create_task(old.run())
        await until(lambda: old.trainer.step == 1, "the first step")
        new = await join_trainer(world.places, counting(steps=STEPS), attempt=1, schedule=DELAYED)
        following = asyncio.create_task(new.run())
        with pytest.raises(Fenced):
            await running
        await world.dispatch(2, STEPS)
        assert await following == STEPS
        assert counts(tmp_path) == [1] * (STEPS * GROUPS * SIZE)


async def test_leaving_writes_what_is_done_and_commits_it(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, 3)
        joined = await join_trainer(
            world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED, checkpoint_every=0
        )
        running = asyncio.create_task(joined.run())
        await until(lambda: joined.trainer.status()["waiting_for"] == "slot 0 of step 4", "the fourth step")
        joined.trainer.leave()
        assert await running == 3
        assert counts(tmp_path)[: 3 * GROUPS * SIZE] == [1] * (3 * GROUPS * SIZE)
        state = await world.queue.snapshot(partition=PARTITION, timeout=10)
        assert state.last_committed_step == 3


async def test_leaving_writes_what_is_done_although_a_publication_fails(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, 3)
        joined = await join_trainer(
            world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED, checkpoint_every=0
        )
        announce, fails = joined.sender.announce, asyncio.Event()

        async def failing(copied: Any, part: Any, **how: Any) -> bool:
            if copied.version.step == 3:
                await fails.wait()
                raise ProtocolError("it cannot be announced", where="driver")
            return await announce(copied, part, **how)

        joined.sender.announce = failing  # type: ignore[method-assign]
        running = asyncio.create_task(joined.run())
        await until(lambda: joined.trainer.status()["waiting_for"] == "slot 0 of step 4", "the fourth step")
        fails.set()
        joined.trainer.leave()
        with pytest.raises(ProtocolError, match="it cannot be announced"):
            await running
        assert counts(tmp_path)[: 3 * GROUPS * SIZE] == [1] * (3 * GROUPS * SIZE)


@pytest.mark.parametrize("asked_before", [False, True])
async def test_leaving_without_a_controller_is_over_in_time_and_leaves_no_checkpoint_that_the_ledger_may_lack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked_before: bool
) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, 3)
        joined = await join_trainer(
            world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED, checkpoint_every=2
        )
        running = asyncio.create_task(joined.run())
        await until(lambda: joined.trainer.status()["waiting_for"] == "slot 0 of step 4", "the fourth step")
        tried = asyncio.Event()

        async def away(**_: float) -> None:
            tried.set()
            raise PeerLost("nobody answers", where="controller")

        joined.queue.sync = away  # type: ignore[assignment, method-assign]
        if asked_before:
            joined.talk.directives = Directives(checkpoint=1)
            await asyncio.wait_for(tried.wait(), 20)
        joined.trainer.leave()
        async with asyncio.timeout(8):
            assert await running == 3
    assert (
        "step 3 is not written, because the trainer leaves: trainer: the ledger was not on disk within 2 s"
        in caplog.text
    )
    saved = Checkpoints(tmp_path / "checkpoints").latest()
    assert saved is not None
    assert saved.manifest.step == 2


@pytest.mark.parametrize("leaves", [False, True])
async def test_steps_are_trained_while_a_checkpoint_of_one_before_is_written(tmp_path: Path, leaves: bool) -> None:
    disk = threading.Event()

    def slow(group: ProcessGroup) -> TrainerBackend:
        made = counting(steps=STEPS)(group)
        snapshot = made.snapshot

        def waiting(*, shared: bool = True) -> Callable[[Path], None]:
            write = snapshot(shared=shared)
            return lambda folder: (disk.wait(60), write(folder))[1]

        made.snapshot = waiting  # type: ignore[method-assign]
        return made

    def saved(step: int) -> int:
        return int(np.load(tmp_path / f"checkpoints/step-{step:06d}/counts.npy").sum())

    async with World(tmp_path) as world:
        await world.dispatch(1, 3 if leaves else STEPS)
        joined = await join_trainer(world.places, slow, attempt=0, schedule=DELAYED, checkpoint_every=2)
        running = asyncio.create_task(joined.run())
        await until(lambda: joined.trainer.step == (3 if leaves else 4), "steps beside the checkpoint of step 2")
        assert joined.trainer.status()["saving"]
        if leaves:
            joined.trainer.leave()
        await asyncio.sleep(0.3)
        assert joined.trainer.step == (3 if leaves else 4), "the checkpoint of step 4 waits for that of step 2"
        assert not list((tmp_path / "checkpoints").glob("step-*"))
        state = await world.queue.snapshot(partition=PARTITION, timeout=10)
        assert state.last_committed_step == 0
        disk.set()
        last = await running
        state = await world.queue.snapshot(partition=PARTITION, timeout=10)
    assert last == state.last_committed_step == (3 if leaves else STEPS)
    kept = [2, 3] if leaves else [4, STEPS]
    assert [saved(step) for step in kept] == [step * GROUPS * SIZE for step in kept]


async def test_directives_are_obeyed_between_micro_batches(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, 2)
        joined = await join_trainer(
            world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED, checkpoint_every=0
        )
        running = asyncio.create_task(joined.run())
        await until(lambda: joined.trainer.status()["waiting_for"] == "slot 0 of step 3", "the third step")
        joined.talk.directives = Directives(checkpoint=1)
        await until(lambda: Checkpoints(tmp_path / "checkpoints").latest() is not None, "the checkpoint")
        joined.talk.directives = Directives(stop=True)
        assert await running == 2


async def test_samples_lost_with_a_unit_cost_the_step_in_hand_only(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        joined = await join_trainer(
            world.places, counting(steps=STEPS), attempt=0, schedule=DELAYED, checkpoint_every=0
        )
        fetch = joined.queue.fetch

        async def lost(rows: list[LeasedRow], *columns: object, **how: object) -> object:
            if rows[0].meta.step == 4:
                raise StaleHandle("the row was lost")
            return await fetch(rows, *columns, **how)  # type: ignore[arg-type]

        joined.queue.fetch = lost  # type: ignore[assignment, method-assign]
        with pytest.raises(RowsLost, match="the row was lost"):
            await joined.run()
        state = await world.queue.snapshot(partition=PARTITION, timeout=10)
        assert state.last_committed_step == 3
        again = await join_trainer(world.places, counting(steps=STEPS), attempt=1, schedule=DELAYED)
        assert await again.run() == STEPS
        assert counts(tmp_path) == [1] * (STEPS * GROUPS * SIZE)


async def test_training_that_diverged_leaves_a_checkpoint_of_what_was_complete(tmp_path: Path) -> None:
    def diverging(group: ProcessGroup) -> TrainerBackend:
        made = counting(steps=STEPS)(group)
        finish = made.finish_step

        def until_four(step: int) -> dict[str, float]:
            if step == 4:
                raise Diverged("nan", where="trainer")
            return finish(step)

        made.finish_step = until_four  # type: ignore[method-assign]
        return made

    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        joined = await join_trainer(world.places, diverging, attempt=0, schedule=DELAYED)
        with pytest.raises(Diverged):
            await joined.run()
        state = await world.queue.snapshot(partition=PARTITION, timeout=10)
        assert state.last_committed_step == 3


async def test_a_step_that_lost_samples_on_the_way_is_refused(tmp_path: Path) -> None:
    def forgetful(group: ProcessGroup) -> TrainerBackend:
        return counting(steps=STEPS)(group)

    async with World(tmp_path) as world:
        await world.dispatch(1, 1)
        joined = await join_trainer(world.places, forgetful, attempt=0, schedule=DELAYED)
        joined.trainer._tally.samples = -1
        with pytest.raises(ProtocolError, match=f"has {GROUPS * SIZE} samples, but {GROUPS * SIZE - 1} came"):
            await joined.run()


@pytest.mark.parametrize("exact", [True, False])
async def test_the_engine_is_measured_in_every_step_although_its_samples_are_of_older_weights(
    tmp_path: Path, tiny_folder: Path, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS)
        delayed = Schedule(steps=STEPS, lag=1, exact=exact)
        first = await join_trainer(
            world.places,
            training(steps=STEPS),
            attempt=0,
            schedule=Schedule(steps=3, lag=1, exact=exact),
            model=tiny_folder,
        )
        assert await first.run() == 3
        again = await join_trainer(world.places, training(steps=STEPS), attempt=1, schedule=delayed, model=tiny_folder)
        assert await again.run() == STEPS
    tokens = [said.metrics["logprob_gap_tokens"] for said in (*first.talk.reports, *again.talk.reports)]
    at_hand = [True, True, True, exact, True]
    assert [measured > 0 for measured in tokens] == at_hand, "θ_2 is in the checkpoint of step 3 only where it must be"
    unmeasured = [record for record in caplog.records if "leaves out samples whose weights are not kept" in record.msg]
    assert len(unmeasured) == (0 if exact else 1)


async def test_both_loops_make_the_same_weights(tmp_path: Path, tiny_folder: Path) -> None:
    from asyncflow.training.settings import BackendSettings, OptimizerSettings
    from asyncflow.training.torch.backend import TorchBackend

    settings = BackendSettings(optimizer=OptimizerSettings(learning_rate=1e-3, steps=2), threads=1)
    made = []
    for whole in (True, False):
        async with World(tmp_path / str(whole), whole=whole) as world:
            backends = []

            def backend(group: ProcessGroup, backends: list[TorchBackend] = backends) -> TorchBackend:
                backends.append(TorchBackend(settings, group=group))
                return backends[0]

            joined = await join_trainer(
                world.places,
                backend,
                attempt=0,
                schedule=Schedule(steps=2, lag=0, exact=True),
                model=tiny_folder,
                whole=whole,
                slot_tokens=16,
            )
            running = asyncio.create_task(joined.run())
            await world.dispatch(1, 2, shuffled=3)
            assert await running == 2
            made.append({name: array.copy() for name, array in backends[0].tensors()})
    for name, array in made[0].items():
        np.testing.assert_allclose(made[1][name], array, atol=2e-6, err_msg=name)


@pytest.mark.process
async def test_killed_again_and_again_each_sample_counts_once(tmp_path: Path) -> None:
    steps, rng, kills = 20, random.Random(4), 0
    async with World(tmp_path) as world:
        await world.dispatch(1, steps)
        for attempt in range(40):
            trainer = Process(world.places, attempt=attempt, steps=steps, sleep_s=0.03)
            begun = Version(attempt, 0)
            await until(lambda v=begun: (world.catalogue.newest or Version(-1, 0)) >= v, f"a version from {begun} on")
            status = await trainer.ended(rng.uniform(0.0, 1.0) if attempt < 6 else 30)
            if status is None:
                trainer.process.kill()
                await trainer.ended(10)
                kills += 1
            elif status == 0:
                break
        assert status == 0
        assert kills >= 4
        await world.queue.close_partition(partition=PARTITION, step=steps, timeout=10)
    assert counts(tmp_path) == [1] * (steps * GROUPS * SIZE)
    report = audit_ledger(tmp_path / "ledger")
    assert report.ok, report
    assert report.trained == steps * GROUPS * SIZE


@pytest.mark.process
async def test_two_ranks_share_each_step_and_leave_together(tmp_path: Path) -> None:
    steps = 6
    async with World(tmp_path) as world:
        await world.dispatch(1, 3)
        ranks = [Process(world.places, attempt=0, steps=steps, rank=rank, world=2) for rank in range(2)]
        await until(lambda: world.catalogue.newest == Version(0, 3), "the third version")
        for rank in ranks:
            rank.process.terminate()
        assert [await rank.ended(10) for rank in ranks] == [3, 3]
        await world.dispatch(4, steps)
        ranks = [Process(world.places, attempt=1, steps=steps, rank=rank, world=2) for rank in range(2)]
        assert [await rank.ended(30) for rank in ranks] == [0, 0]
    assert counts(tmp_path) == [1] * (steps * GROUPS * SIZE)


@pytest.mark.process
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("order", "epochs"), [([0, 1], 1), ([1, 0], 1), ([1, 0], 3)])
async def test_ranks_in_the_midst_of_collectives_leave_after_the_same_step(
    tmp_path: Path, tiny_folder: Path, order: list[int], epochs: int
) -> None:
    steps, rng = 200, random.Random(2)
    async with World(tmp_path) as world:
        await world.dispatch(1, steps)
        ranks = [
            Process(world.places, attempt=0, steps=steps, rank=rank, world=2, model=tiny_folder, epochs=epochs)
            for rank in range(2)
        ]
        await until(lambda: (world.catalogue.newest or Version(0, 0)) >= Version(0, 3), "a third step", within_s=120)
        for rank in order:
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            ranks[rank].process.terminate()
        assert [await rank.ended(30) for rank in ranks] == [3, 3]
        latest = Checkpoints(tmp_path / "checkpoints").latest()
        assert latest is not None
        latest.verify()
        step = latest.manifest.step
        assert [int((tmp_path / f"ended-0-{rank}").read_text()) for rank in range(2)] == [step, step]
        state = await world.queue.snapshot(partition=PARTITION, timeout=10)
        assert state.last_committed_step == step


@pytest.mark.process
async def test_the_number_of_ranks_changes_between_attempts_and_each_sample_counts_once(tmp_path: Path) -> None:
    steps, worlds = 10, (1, 2, 4, 1)
    async with World(tmp_path) as world:
        await world.dispatch(1, steps)
        for attempt, ranks in enumerate(worlds):
            gang = [
                Process(
                    world.places,
                    attempt=attempt,
                    steps=steps,
                    rank=rank,
                    world=ranks,
                    sleep_s=0.03,
                    private=attempt % 2 == 1,
                )
                for rank in range(ranks)
            ]
            last = attempt == len(worlds) - 1
            if not last:
                begun = Version(attempt, 2 * attempt + 1)
                await until(lambda v=begun: (world.catalogue.newest or Version(-1, 0)) >= v, f"{begun}", within_s=60)
                gang[-1].process.kill() if attempt % 2 else gang[-1].process.terminate()
                for rank in gang[:-1]:
                    rank.process.terminate()
            ended = [await rank.ended(30) for rank in gang]
            assert None not in ended
        assert ended == [0]
        await world.queue.close_partition(partition=PARTITION, step=steps, timeout=10)
    assert counts(tmp_path) == [1] * (steps * GROUPS * SIZE)
    report = audit_ledger(tmp_path / "ledger")
    assert (report.ok, report.trained) == (True, steps * GROUPS * SIZE), report


@pytest.mark.process
@pytest.mark.timeout(400)
async def test_a_rank_that_is_killed_ends_the_gang_which_goes_on_from_its_checkpoint_with_another_number_of_ranks(
    tmp_path: Path, tiny_folder: Path
) -> None:
    steps = 12
    async with World(tmp_path) as world:
        await world.dispatch(1, steps)
        gang = [
            Process(world.places, attempt=0, steps=steps, rank=rank, world=2, model=tiny_folder, checkpoint_every=2)
            for rank in range(2)
        ]
        await until(lambda: (world.catalogue.newest or Version(0, 0)) >= Version(0, 4), "a version", within_s=120)
        newest = world.catalogue.newest
        assert newest is not None
        slices = [piece for entry in world.catalogue.manifest(newest).tensors for piece in entry.slices]
        assert {piece.holder for piece in slices} == {"trainer-0-0", "trainer-1-0"}
        gang[1].process.kill()
        assert await gang[0].ended(60) not in (None, 0)
        again = await join_trainer(
            world.places,
            training(steps=steps),
            attempt=1,
            schedule=Schedule(steps=steps, lag=1, exact=True),
            model=tiny_folder,
        )
        assert await again.run() == steps
        await world.queue.close_partition(partition=PARTITION, step=steps, timeout=10)
    assert latest_step(tmp_path) == steps
    report = audit_ledger(tmp_path / "ledger")
    assert (report.ok, report.trained) == (True, steps * GROUPS * SIZE), report


def latest_step(folder: Path) -> int:
    latest = Checkpoints(folder / "checkpoints").latest()
    return latest.manifest.step if latest is not None else 0


@pytest.mark.process
async def test_where_one_rank_is_told_to_leave_all_save_and_leave(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, 3)
        ranks = [Process(world.places, attempt=0, steps=6, rank=rank, world=2, checkpoint_every=5) for rank in range(2)]
        await until(lambda: world.catalogue.newest == Version(0, 3), "the third version")
        ranks[1].process.terminate()
        assert [await rank.ended(20) for rank in ranks] == [3, 3]
        assert counts(tmp_path)[: 3 * GROUPS * SIZE] == [1] * (3 * GROUPS * SIZE)
        state = await world.queue.snapshot(partition=PARTITION, timeout=10)
        assert state.last_committed_step == 3
