"""PPO with the critic inside the trainer: gradients, values and losses are those of one padded batch in float64."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ppo_reference import Wanted, reference, rewarded
from test_equivalence import AGGREGATIONS, cuts
from test_trainer import PowerCut, stop_at
from train_reference import (
    HALF,
    HORIZON,
    REFERENCE_SCALE,
    STOCHASTIC,
    TEMPERATURE,
    assert_same_bits,
    relative_error,
    samples,
)
from train_world import GROUPS, PARTITION, SIZE, World, join_trainer

from asyncflow.algorithms.loss import Aggregation, AggregationName, Loss
from asyncflow.algorithms.losses import Clip
from asyncflow.algorithms.ppo import Ppo, PpoOptions
from asyncflow.api.workers import LoraSpec
from asyncflow.errors import CheckpointError
from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, CriticSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.training.torch.critic import CRITIC_FILE, CRITIC_STATE_FILE
from asyncflow.training.torch.figures import StepFigures, metrics_of
from asyncflow.training.torch.optimizer import Applied, FlatAdamW
from asyncflow.training.torch.shards import TensorShard

EXACT = 1e-6
_ADAM = OptimizerSettings(learning_rate=1e-3, steps=4)
SETTINGS = BackendSettings(
    optimizer=_ADAM, critic=CriticSettings(optimizer=_ADAM, warmup_steps=1), loss=Loss(algorithm=Ppo()), threads=1
)
OPTIONS = PpoOptions(gamma=0.9, lam=0.8, value_clip=0.1)
FORMULA: dict[str, Any] = {
    "temperature": TEMPERATURE,
    "gamma": 0.9,
    "lam": 0.8,
    "low": 0.2,
    "high": 0.28,
    "value_clip": 0.1,
}


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "stochastic rounding": STOCHASTIC,
    "layers computed again": HALF,
    "adapters": {"lora": LoraSpec(rank=2)},
}


class Kept(TorchBackend):
    """The backend itself, whose optimizers keep the gradient that they are given, and move nothing."""

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        super().load(folder, checkpoint=checkpoint)
        if self._reference is not None:
            with torch.no_grad():
                for parameter in self._reference.parameters():  # type: ignore[attr-defined]
                    parameter.mul_(REFERENCE_SCALE)
        self.kept: dict[str, dict[str, torch.Tensor]] = {}
        assert self._critic is not None
        for what, optimizer in (("policy", self._optimizer), ("critic", self._critic.optimizer)):
            optimizer.move = partial(self._keep, what, optimizer)  # type: ignore[method-assign]

    def _keep(self, what: str, optimizer: FlatAdamW, _step: int, *, norm: float) -> None:
        assert norm > 0
        grads = {shard.name: own.grad.clone() for shard, own in optimizer._held}
        self.kept[what] = {f"value_{name}" if name.startswith("head.") else name: g for name, g in grads.items()}


def backend(
    folder: Path,
    chosen: PpoOptions = OPTIONS,
    *,
    kind: type[TorchBackend] = Kept,
    penalty: float = 0,
    how: AggregationName = "token-mean",
    **more: Any,
) -> Any:
    optimizer = OptimizerSettings(learning_rate=1e-3, steps=4, max_grad_norm=0)
    given: dict[str, Any] = {
        "optimizer": optimizer,
        "critic": CriticSettings(optimizer=optimizer),
        "loss": Loss(
            algorithm=Ppo(chosen, penalised=penalty > 0),
            clip=Clip(low=0.2, high=0.28),
            aggregation=Aggregation(name=how, horizon=HORIZON),
            kl=penalty,
            kl_name="k1",
            penalised=penalty > 0,
        ),
        "temperature": TEMPERATURE,
        "threads": 1,
        "weights": "float64" if kind is Kept else "float32",
    }
    made = kind(BackendSettings(**(given | more)), group=SingleProcess())
    made.load(folder, checkpoint=None)
    if kind is Kept:
        unsettle(critic_of(made), seed=1, by=0.05)
    return made


def unsettle(shards: Sequence[TensorShard], *, seed: int, by: float) -> None:
    """Move weights, each by about this part of what its tensor holds; what holds nothing, the critic's head, by it."""
    generator = torch.Generator().manual_seed(seed)
    for shard in shards:
        noise = torch.randn(shard.tensor.shape, generator=generator, dtype=torch.float64).to(shard.tensor.dtype)
        shard.tensor.add_(by * noise * (shard.tensor.square().mean().sqrt() if shard.tensor.any() else 1))


def critic_of(trainer: TorchBackend) -> list[TensorShard]:
    assert trainer._critic is not None
    return trainer._critic.state()[CRITIC_FILE]


def copies(shards: Sequence[TensorShard]) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in shards}


def assert_as(wanted: Wanted, trainer: Kept, metrics: dict[str, float], what: str) -> None:
    for model in ("policy", "critic"):
        assert relative_error(trainer.kept[model], getattr(wanted, model)) < EXACT, f"{model}: {what}"
    assert metrics["loss"] == pytest.approx(wanted.policy_loss, rel=EXACT), what
    assert metrics["value_loss"] == pytest.approx(wanted.value_loss, rel=EXACT), what
    assert metrics["value_clip"] == pytest.approx(wanted.clipped, abs=1e-9), what


@pytest.mark.parametrize(("name", "how"), [*(("discounted", how) for how in AGGREGATIONS), ("plain", "token-mean")])
def test_a_streamed_step_is_that_of_one_padded_batch(
    tiny_folder: Path, in_float64: None, name: str, how: AggregationName
) -> None:
    changes = {} if name == "discounted" else {"gamma": 1.0, "lam": 1.0, "value_clip": None}
    options, formula = msgspec.structs.replace(OPTIONS, **changes), FORMULA | changes
    batch = rewarded(samples())
    wanted = None
    for what, slots, more in cuts(batch):
        trainer = backend(tiny_folder, options, how=how, **more)
        wanted = wanted or reference(tiny_folder, batch, critic=copies(critic_of(trainer)), how=how, **formula)
        for slot in slots:
            trainer.micro_batch(batch.take(slot), version=0)
        metrics = trainer.finish_step(1)
        assert_as(wanted, trainer, metrics, what)
        chosen = wanted.returns[wanted.mask > 0]
        errors = chosen - wanted.values[wanted.mask > 0]
        assert metrics["return_mean"] == pytest.approx(chosen.mean().item(), rel=EXACT)
        explained = 1 - errors.var(correction=0) / chosen.var(correction=0)
        assert metrics["explained_variance"] == pytest.approx(explained.item(), rel=1e-5)
        assert metrics["computed_tokens"] == wanted.mask.sum()


def test_of_returns_that_differ_only_by_rounding_nothing_is_explained() -> None:
    figures = StepFigures()
    sums = {"value_tokens": 100, "return": 110, "return_squares": 121 + 3e-12, "value_error_squares": 1}
    figures.count(sums.items())
    metrics = metrics_of(figures.merged(SingleProcess(), step=1), divisor=1, applied=Applied(1, 1, moved=True))
    assert metrics["explained_variance"] == 0


@pytest.mark.parametrize(("whiten", "penalty"), [(False, 0), (True, 0), (False, 0.3)])
def test_all_updates_keep_the_values_from_before_the_step(
    tiny_folder: Path, in_float64: None, whiten: bool, penalty: float
) -> None:
    options, batch = msgspec.structs.replace(OPTIONS, whiten=whiten), rewarded(samples())
    before = wanted = None
    for what, slots, more in list(cuts(batch))[1::5]:
        trainer = backend(tiny_folder, options, penalty=penalty, **more)
        before = before or reference(
            tiny_folder, batch, critic=copies(critic_of(trainer)), whiten=whiten, penalty=penalty, **FORMULA
        )
        prepared = trainer.prepare(batch)
        unsettle(critic_of(trainer), seed=2, by=0.05)
        unsettle(trainer._shards, seed=3, by=0.02)
        wanted = wanted or reference(
            tiny_folder,
            batch,
            critic=copies(critic_of(trainer)),
            policy=copies(trainer._shards),
            before=before,
            **FORMULA,
        )
        for slot in slots:
            trainer.micro_batch(prepared.take(slot), version=None)
        assert_as(wanted, trainer, trainer.finish_step(1), what)
        assert wanted.clipped > 0.1
    for i in np.flatnonzero(batch.loss_lengths()).tolist():
        counted, found = batch.loss_mask.row(i), prepared.values.row(i)
        np.testing.assert_allclose(found[counted], before.values[i, : len(found)][counted], rtol=EXACT, atol=EXACT)


def moving(folder: Path, **more: Any) -> TorchBackend:
    """A backend that trains, in float32; larger epsilons, so that nothing is blown up."""
    optimizer = OptimizerSettings(learning_rate=1e-3, steps=6, epsilon=1e-4)
    critic = CriticSettings(optimizer=optimizer, warmup_steps=more.pop("warmup_steps", 0))
    made: TorchBackend = backend(folder, kind=TorchBackend, optimizer=optimizer, critic=critic, **more)
    return made


def train(trainer: TorchBackend, first: int, last: int) -> dict[str, float]:
    batch, metrics = rewarded(samples()), {}
    for step in range(first, last + 1):
        prepared = trainer.prepare(batch)
        for number, half in enumerate((range(10), range(10, 20))):
            if number:
                trainer.update(step)
            trainer.micro_batch(prepared.take(half), version=None)
        metrics = trainer.finish_step(step)
    return metrics


def arrays(trainer: TorchBackend) -> dict[str, np.ndarray]:
    both = {"policy": trainer._shards, "critic": critic_of(trainer)}
    return {
        f"{name}/{shard.name}": shard.tensor.float().numpy().copy() for name, found in both.items() for shard in found
    }


def test_a_warm_up_trains_the_critic_alone(tiny_folder: Path) -> None:
    trainer = moving(tiny_folder, warmup_steps=2)
    before = arrays(trainer)
    metrics = train(trainer, 1, 2)
    assert (metrics["skipped"], metrics["learning_rate"]) == (0, 0)
    assert metrics["critic_learning_rate"] == 1e-3
    after = arrays(trainer)
    assert_same_bits(*({name: array for name, array in each.items() if "policy" in name} for each in (after, before)))
    assert all((after[name] != before[name]).any() for name in after if "critic" in name and "norm" not in name)
    assert train(trainer, 3, 3)["learning_rate"] == 1e-3
    assert (arrays(trainer)["policy/lm_head.weight"] != after["policy/lm_head.weight"]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_goes_on_with_its_critic_bit_for_bit(
    tiny_folder: Path, tmp_path: Path, kind: str
) -> None:
    trainer = moving(tiny_folder, **KINDS[kind])
    train(trainer, 1, 2)
    trainer.snapshot()(tmp_path)
    saved, generator = arrays(trainer), torch.get_rng_state()
    metrics = train(trainer, 3, 4)
    resumed = moving(tiny_folder, **KINDS[kind])
    resumed.load(tiny_folder, checkpoint=tmp_path)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_same_bits(arrays(resumed), saved)
    assert train(resumed, 3, 4) == metrics
    assert_same_bits(arrays(resumed), arrays(trainer))
    (tmp_path / CRITIC_FILE).unlink()
    with pytest.raises(CheckpointError, match="do not fit the model"):
        moving(tiny_folder, **KINDS[kind]).load(tiny_folder, checkpoint=tmp_path)


def test_the_critic_is_not_published(tiny_folder: Path) -> None:
    trainer = moving(tiny_folder)
    assert dict(trainer.tensors()).keys() == {shard.name for shard in trainer._shards}
    assert not any("value_head" in name for name in dict(trainer.tensors()))


@pytest.mark.parametrize("epochs", [1, 2])
async def test_a_run_that_was_killed_and_resumed_ends_with_the_same_critic(
    tmp_path: Path, tiny_folder: Path, epochs: int
) -> None:
    schedule = Schedule(steps=4, lag=0, exact=True)

    async def run(folder: Path, *, killed_after: int) -> list[bytes]:
        async with World(folder, whole=True) as world:
            await world.dispatch(1, 4)
            for attempt in (0, 1):
                joined = await join_trainer(
                    world.places,
                    lambda group: TorchBackend(SETTINGS, group=group),
                    attempt=attempt,
                    schedule=schedule,
                    model=tiny_folder,
                    whole=True,
                    epochs=epochs,
                    checkpoint_every=1,
                )
                if attempt == 0:
                    joined.trainer._checkpoints.write = stop_at(  # type: ignore[method-assign]
                        killed_after, joined.trainer._checkpoints
                    )
                with suppress(PowerCut):
                    assert await joined.run() == 4
            assert world.catalogue.newest == Version(1, 4)
            await world.queue.close_partition(partition=PARTITION, step=4, timeout=10)
        report = audit_ledger(folder / "ledger")
        assert report.ok, report
        assert report.trained == 4 * GROUPS * SIZE
        latest = Checkpoints(folder / "checkpoints").latest()
        assert latest is not None
        return [(latest.folder / name).read_bytes() for name in ("model.safetensors", CRITIC_FILE, CRITIC_STATE_FILE)]

    assert await run(tmp_path / "once", killed_after=4) == await run(tmp_path / "twice", killed_after=2)


@pytest.mark.parametrize("spoilt", ["policy", "critic"])
def test_where_one_gradient_is_not_finite_neither_model_moves(tiny_folder: Path, spoilt: str) -> None:
    trainer = moving(tiny_folder)
    train(trainer, 1, 1)
    before = arrays(trainer)
    trainer.micro_batch(rewarded(samples()), version=None)
    assert trainer._critic is not None
    {"policy": trainer._optimizer, "critic": trainer._critic.optimizer}[spoilt].gradient[7] = float("nan")
    assert trainer.finish_step(2)["skipped"] == 1
    assert_same_bits(arrays(trainer), before)
