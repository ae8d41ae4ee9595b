"""The old policy of one step behind: its log-probs are those of θ_{k-2} as it was published, also after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_torch_backend import assert_same_bits, backend, weights
from test_trainer import PowerCut, stop_at
from train_reference import TEMPERATURE, samples
from train_world import World, join_trainer

from asyncflow.algorithms.correction import Correction
from asyncflow.algorithms.loss import Loss
from asyncflow.flow.schedule import Schedule
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.ranks import ProcessGroup, SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend

STEPS = 4
ON_POLICY = Schedule(steps=STEPS, lag=0, exact=True)
LAGGED = Loss(old="lagged", correction=Correction(high=1.5))


def test_log_probs_under_older_weights_are_those_that_a_model_with_them_gives(tiny_folder: Path) -> None:
    batch = samples()
    newer, older = (backend(tiny_folder, loss=LAGGED, temperature=TEMPERATURE) for _ in range(2))
    first = weights(older)
    newer.micro_batch(batch, version=0)
    newer.finish_step(1)
    second = weights(newer)
    expected = older.prepare(batch).old
    found = newer.prepare(batch, weights=first).old
    own = newer.prepare(batch).old
    assert expected is not None
    assert found is not None
    assert own is not None
    np.testing.assert_array_equal(found.values, expected.values)
    assert not np.array_equal(own.values, expected.values)
    assert_same_bits(weights(newer), second)


class Watched:
    """Backends that keep the weights after each step, and what their log-probs were to be computed with."""

    def __init__(self) -> None:
        self.made: dict[int, dict[str, np.ndarray]] = {}
        self.given: dict[int, dict[str, np.ndarray]] = {}
        self.ratios: dict[int, float] = {}
        self.batches = 0

    def __call__(self, group: ProcessGroup) -> TrainerBackend:
        optimizer = OptimizerSettings(learning_rate=1e-2, steps=STEPS)
        made = TorchBackend(BackendSettings(optimizer=optimizer, loss=LAGGED, threads=1), group=group)
        load, finish, prepare = made.load, made.finish_step, made.prepare
        step = 0

        def loaded(folder: Path, *, checkpoint: Path | None) -> None:
            load(folder, checkpoint=checkpoint)
            self.made[step] = weights(made)

        def finished(number: int) -> dict[str, float]:
            nonlocal step
            metrics, step = finish(number), number
            self.made[step], self.ratios[step] = weights(made), metrics["ratio_max"]
            return metrics

        def prepared(batch: MicroBatch, *, weights: Mapping[str, Any] | None = None) -> MicroBatch:
            assert weights is not None
            self.batches += 1
            self.given[step + 1] = {name: array.copy() for name, array in weights.items()}
            return prepare(batch, weights=weights)

        made.load, made.finish_step, made.prepare = loaded, finished, prepared  # type: ignore[method-assign]
        return made


async def test_each_step_has_the_weights_of_one_step_behind_and_a_killed_run_ends_with_the_same_bits(
    tmp_path: Path, tiny_folder: Path
) -> None:
    async def train(folder: Path, *, killed_after: int) -> tuple[bytes, list[int]]:
        async with World(folder, whole=True) as world:
            await world.dispatch(1, STEPS)
            for attempt in range(1 if killed_after == STEPS else 2):
                watched = Watched()
                joined = await join_trainer(
                    world.places,
                    watched,
                    attempt=attempt,
                    schedule=ON_POLICY,
                    model=tiny_folder,
                    whole=True,
                    checkpoint_every=1,
                )
                if attempt == 0:
                    joined.trainer._checkpoints.write = stop_at(  # type: ignore[method-assign]
                        killed_after, joined.trainer._checkpoints
                    )
                with suppress(PowerCut):
                    assert await joined.run() == STEPS
                if killed_after == STEPS:
                    assert sorted(watched.given) == [2, 3, 4]
                    for step, given in watched.given.items():
                        assert_same_bits(given, watched.made[step - 2])
                    assert watched.ratios[1] == 1
                    assert min(watched.ratios[step] for step in (2, 3, 4)) > 1
        latest = Checkpoints(folder / "checkpoints").latest()
        assert latest is not None
        return (latest.folder / "model.safetensors").read_bytes(), latest.manifest.carried

    once, twice = await train(tmp_path / "once", killed_after=STEPS), await train(tmp_path / "twice", killed_after=2)
    assert once == twice
    assert once[1] == [STEPS - 1]


class Asked(SingleProcess):
    """A group that notes what its ranks were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def gather(self, array: np.ndarray, *, what: str) -> np.ndarray:
        self.asked.append(what)
        return super().gather(array, what=what)


async def test_without_older_weights_a_step_has_the_policy_as_its_old_one_and_the_ranks_are_asked_once_a_step(
    tmp_path: Path, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def recomputing(group: ProcessGroup) -> TrainerBackend:
        optimizer, loss = OptimizerSettings(learning_rate=1e-2, steps=STEPS), Loss(old="recompute")
        return TorchBackend(BackendSettings(optimizer=optimizer, loss=loss, threads=1), group=group)

    async with World(tmp_path, whole=True) as world:
        await world.dispatch(1, STEPS)
        before = Schedule(steps=2, lag=0, exact=True)
        joined = await join_trainer(
            world.places, recomputing, attempt=0, schedule=before, model=tiny_folder, whole=True
        )
        assert await joined.run() == 2
        group, watched = Asked(), Watched()
        joined = await join_trainer(
            world.places,
            watched,
            attempt=1,
            group=group,
            schedule=ON_POLICY,
            model=tiny_folder,
            slot_tokens=16,
            whole=True,
        )
        assert await joined.run() == STEPS
    assert sorted(watched.given) == [4]
    assert watched.ratios[3] == 1
    assert watched.ratios[4] > 1
    assert [what for what in group.asked if what.startswith("the holders of θ_")] == [
        "the holders of θ_1",
        "the holders of θ_2",
    ]
    assert watched.batches > 2
    assert [r.getMessage() for r in caplog.records if "older weights" in r.getMessage()] == [
        "step 3 has no older weights: its old policy is θ_2"
    ]
