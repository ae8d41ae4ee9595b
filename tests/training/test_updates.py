"""Several optimizer updates a step: how samples are divided, what the updates are, and what a step reports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_torch_backend import assert_same_bits, backend, weights
from train_reference import TEMPERATURE, part, samples
from train_world import GROUPS, PARTITION, SIZE, JoinedTrainer, World, counting, join_trainer, training

from asyncflow.algorithms.loss import Loss
from asyncflow.algorithms.reinforce import ReinforcePlusPlus
from asyncflow.errors import Diverged, ManifestError
from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.rpc.columns import Jagged
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.loops import combined, mini_batches
from asyncflow.training.ranks import GroupLeft, ProcessGroup
from asyncflow.training.settings import OptimizerSettings

STEPS = 4
ON_POLICY = Schedule(steps=STEPS, lag=0, exact=True)


@given(st.lists(st.integers(0, 30), max_size=24), st.integers(1, 6), st.integers(1, 3), st.randoms())
def test_mini_batches_hold_whole_groups_evenly_on_every_rank(
    serials: list[int], count: int, ranks: int, order: Any
) -> None:
    order.shuffle(serials)
    shares = [np.array(serials[rank::ranks], dtype=np.int64) for rank in range(ranks)]
    groups = np.concatenate([np.unique(share) for share in shares])
    number: dict[int, int] = {}
    made = [mini_batches(share, groups=groups, count=count) for share in shares]
    known = sorted(set(serials))
    assert {len(parts) for parts in made} == {max(1, min(count, len(known)))}
    for share, parts in zip(shares, made, strict=True):
        assert sorted(index for chosen in parts for index in chosen) == list(range(len(share)))
        for mine, chosen in enumerate(parts):
            for serial in share[chosen].tolist():
                assert number.setdefault(serial, mine) == mine
    assert [number[serial] for serial in known] == sorted(number.values())
    sizes = np.bincount(list(number.values())) if number else [0]
    assert max(sizes) - min(sizes) <= 1


def test_the_metrics_of_a_step_are_sums_means_and_maxima_of_its_updates() -> None:
    first = {"loss": 1.0, "ratio": 1.5, "ratio_max": 2.0, "computed_tokens": 10.0, "skipped": 0.0, "logprob_gap": 0.1}
    second = {"loss": 3.0, "computed_tokens": 0.0, "skipped": 1.0, "logprob_gap": 0.0}
    third = {"loss": 2.0, "ratio": 0.5, "ratio_max": 5.0, "computed_tokens": 30.0, "skipped": 0.0, "grad_norm": 4.0}
    expected = {
        "loss": 2.0,
        "ratio": 0.75,
        "ratio_max": 5.0,
        "computed_tokens": 40.0,
        "skipped": 0.0,
        "logprob_gap": 0.1,
    }
    assert combined([first, second, third]) == expected | {"grad_norm": 4.0}
    assert combined([second, second])["skipped"] == 1
    assert combined([first]) == first


def test_batches_are_joined_in_the_order_of_their_keys() -> None:
    batch = samples()
    shuffled = np.random.default_rng(2).permutation(len(batch)).tolist()
    joined = MicroBatch.joined([MicroBatch.empty(), part(batch, shuffled[:7]), part(batch, shuffled[7:])])
    assert joined.keys == batch.keys
    for name in ("prompts", "responses", "logprobs", "versions", "loss_mask"):
        assert np.array_equal(getattr(joined, name).values, getattr(batch, name).values)
        assert np.array_equal(getattr(joined, name).offsets, getattr(batch, name).offsets)
    assert np.array_equal(joined.advantages, batch.advantages)
    assert len(MicroBatch.joined([MicroBatch.empty()])) == 0


def test_updates_of_one_step_are_those_of_as_many_steps(tiny_folder: Path) -> None:
    constant = OptimizerSettings(learning_rate=1e-3, steps=9)
    several, single = (backend(tiny_folder, optimizer=constant) for _ in range(2))
    halves, made = [samples().take(range(start, start + 10)) for start in (0, 10)], []
    for number, half in enumerate(halves * 2):
        several.micro_batch(half, version=None if number else 0)
        if number < 3:
            several.update(1)
        single.micro_batch(half, version=None)
        made.append(single.finish_step(number + 1))
    assert several.trained == 40
    metrics = several.finish_step(1)
    assert_same_bits(weights(several), weights(single))
    assert metrics["grad_norm"] == pytest.approx(np.mean([each["grad_norm"] for each in made]))
    assert metrics["computed_tokens"] == sum(each["computed_tokens"] for each in made)
    assert metrics["logprob_gap_tokens"] == halves[0].loss_lengths().sum() - halves[0].loss_lengths()[2]
    assert several.trained == 0


def test_the_learning_rate_of_all_updates_is_that_of_the_step(tiny_folder: Path) -> None:
    trainer = backend(tiny_folder, optimizer=OptimizerSettings(learning_rate=1e-3, steps=9, warmup_steps=4))
    trainer.micro_batch(samples(), version=0)
    trainer.update(2)
    trainer.micro_batch(samples(), version=None)
    assert trainer.finish_step(2)["learning_rate"] == pytest.approx(5e-4)


def test_recomputed_log_probs_are_those_before_the_first_update(tiny_folder: Path) -> None:
    batch = samples()
    recompute = Loss(old="recompute")
    trainers = [backend(tiny_folder, loss=loss, temperature=TEMPERATURE) for loss in (recompute, Loss())]
    before = trainers[0].prepare(batch)
    assert before.old is not None
    assert trainers[1].prepare(batch) is batch
    same = replace(batch, logprobs=Jagged(before.old.values, before.old.offsets))
    metrics = []
    for trainer, given_ in zip(trainers, (before, same), strict=True):
        for number in range(3):
            trainer.micro_batch(given_, version=None)
            if number < 2:
                trainer.update(1)
        metrics.append(trainer.finish_step(1))
    assert metrics[0]["ratio_max"] == metrics[1]["ratio_max"] > 1.01
    assert_same_bits(weights(trainers[0]), weights(trainers[1]))


def test_a_step_is_skipped_only_where_no_update_moved(tiny_folder: Path) -> None:
    trainer, broken = backend(tiny_folder), samples()
    broken.advantages[3] = np.nan

    def step(number: int, *batches: MicroBatch) -> float:
        for index, batch in enumerate(batches):
            if index:
                trainer.update(number)
            trainer.micro_batch(batch, version=None)
        return trainer.finish_step(number)["skipped"]

    assert [step(1, broken, broken), step(2, broken, samples()), step(3, broken, broken)] == [1, 0, 1]
    assert step(4, broken, broken) == 1
    with pytest.raises(Diverged, match="steps 3 to 5"):
        step(5, broken, broken)


async def joined_on_policy(
    world: World, made: Callable[[ProcessGroup], TrainerBackend], *, attempt: int = 0, **more: Any
) -> JoinedTrainer:
    return await join_trainer(world.places, made, attempt=attempt, schedule=ON_POLICY, checkpoint_every=1, **more)


async def test_every_sample_is_trained_once_in_each_epoch(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        await world.dispatch(1, STEPS, shuffled=1)
        joined = await joined_on_policy(world, counting(steps=STEPS), epochs=3, mini_batches=2, slot_tokens=16)
        assert await joined.run() == STEPS
        assert world.catalogue.newest == Version(0, STEPS)
        await world.queue.close_partition(partition=PARTITION, step=STEPS, timeout=10)
    latest = Checkpoints(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert np.load(latest.folder / "counts.npy").tolist() == [3] * (STEPS * GROUPS * SIZE)
    assert {said.samples for said in joined.talk.reports} == {GROUPS * SIZE}
    report = audit_ledger(tmp_path / "ledger")
    assert report.ok, report
    assert report.trained == STEPS * GROUPS * SIZE


async def test_advantages_of_a_whole_step_do_not_depend_on_slots_and_arrival(tmp_path: Path, tiny_folder: Path) -> None:
    loss = Loss(algorithm=ReinforcePlusPlus(penalised=True), kl=0.1, kl_name="k1", penalised=True)

    async def train(folder: Path, *, slot_tokens: int, shuffled: int) -> dict[str, torch.Tensor]:
        async with World(folder) as world:
            await world.dispatch(1, STEPS, shuffled=shuffled)
            joined = await joined_on_policy(
                world, training(steps=STEPS, loss=loss), model=tiny_folder, slot_tokens=slot_tokens
            )
            assert await joined.run() == STEPS
        assert all("penalty_kl" in said.metrics for said in joined.talk.reports)
        latest = Checkpoints(folder / "checkpoints").latest()
        assert latest is not None
        return load_file(latest.folder / "model.safetensors")

    few = await train(tmp_path / "few", slot_tokens=4096, shuffled=1)
    many = await train(tmp_path / "many", slot_tokens=16, shuffled=2)
    before = load_file(tiny_folder / "model.safetensors")
    assert any((few[name] - before[name]).abs().max() > 1e-4 for name in few)
    for name, tensor in few.items():
        torch.testing.assert_close(tensor, many[name], rtol=0, atol=1e-6)


async def test_a_run_with_several_updates_goes_on_with_the_same_bits(tmp_path: Path, tiny_folder: Path) -> None:
    more = {"model": tiny_folder, "epochs": 2, "mini_batches": GROUPS, "slot_tokens": 16}

    async def train(folder: Path, *, leaves_in: int | None) -> bytes:
        async with World(folder, whole=True) as world:
            await world.dispatch(1, STEPS)
            first = await joined_on_policy(world, training(steps=STEPS), **more)
            leave_in_the_midst(first, leaves_in)
            done = await first.run()
            if leaves_in is not None:
                assert done == leaves_in
                assert await (await joined_on_policy(world, training(steps=STEPS), attempt=1, **more)).run() == STEPS
        latest = Checkpoints(folder / "checkpoints").latest()
        assert latest is not None
        return (latest.folder / "model.safetensors").read_bytes()

    assert await train(tmp_path / "once", leaves_in=None) == await train(tmp_path / "twice", leaves_in=2)


async def test_weights_between_the_updates_of_a_step_are_never_saved(tmp_path: Path, tiny_folder: Path) -> None:
    async with World(tmp_path, whole=True) as world:
        await world.dispatch(1, STEPS)
        joined = await joined_on_policy(world, training(steps=STEPS), model=tiny_folder, epochs=2, mini_batches=GROUPS)
        update, updates = joined.trainer._backend.update, iter(range(100))

        def fails_in_the_second_step(number: int) -> None:
            update(number)
            if number == 2 and next(updates) == 1:
                raise ManifestError("out of memory", where="here")

        joined.trainer._backend.update = fails_in_the_second_step  # type: ignore[method-assign]
        with pytest.raises(ManifestError, match="out of memory"):
            await joined.run()
    latest = Checkpoints(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert latest.manifest.step == 1
    saved = load_file(latest.folder / "model.safetensors")
    now = {name: array for name, array in joined.trainer._backend.tensors() if isinstance(array, np.ndarray)}
    assert any(not np.array_equal(saved[name].numpy(), array) for name, array in now.items())


def leave_in_the_midst(joined: JoinedTrainer, step: int | None) -> None:
    """Tell the trainer to leave after the first update of ``step``; a group that has left gathers nothing."""
    trainer, loop = joined.trainer, asyncio.get_running_loop()
    update, gather = trainer._backend.update, trainer._group.gather
    told, left = threading.Event(), threading.Event()

    def leave() -> None:
        trainer.leave()
        told.set()

    def updated(number: int) -> None:
        update(number)
        if number == step and not told.is_set():
            loop.call_soon_threadsafe(leave)
            assert told.wait(10)

    def gathered(array: Any, *, what: str) -> Any:
        if left.is_set():
            raise GroupLeft
        return gather(array, what=what)

    trainer._backend.update = updated  # type: ignore[method-assign]
    trainer._group = copy(trainer._group)  # checkpoints keep theirs
    trainer._group.gather, trainer._group.leave = gathered, left.set  # type: ignore[method-assign]
