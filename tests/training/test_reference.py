"""The reference as a role of its own gives the gradient of the trainer's own reference, however its rows are packed."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from train_reference import TEMPERATURE, GradientKept, relative_error, samples

from asyncflow.algorithms.loss import Loss
from asyncflow.identity import Version
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.packing import pack_samples
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.model import LogprobModel, open_model
from asyncflow.training.torch.reference import ReferenceModel

LOSS = Loss(kl=0.3, kl_name="k3")


def settings_of(**more: Any) -> BackendSettings:
    optimizer = OptimizerSettings(learning_rate=1e-3, steps=1, max_grad_norm=0)
    return BackendSettings(optimizer=optimizer, loss=LOSS, temperature=TEMPERATURE, threads=1, **more)


class Moved(GradientKept):
    """A trainer whose weights are no longer θ_0, so that there is a divergence."""

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        super(GradientKept, self).load(folder, checkpoint=checkpoint)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(1.1)
        step = self._optimizer._adam.step

        def keep_and_step() -> None:
            self.kept = {name: p.grad.clone() for name, p in self._model.named_parameters()}
            step()

        self._optimizer._adam.step = keep_and_step


def computed(folder: Path, batch: MicroBatch, *, at_once: int, **more: Any) -> Jagged:
    """Return what a role of its own writes for the rows of a batch, ``at_once`` of them a claim."""
    model = ReferenceModel(folder, settings_of(**more))
    found: list[NDArray[Any]] = []
    for first in range(0, len(batch), at_once):
        chosen = list(range(first, min(first + at_once, len(batch))))
        rows = [
            LeasedRow(
                row=index,
                meta=RowMeta(
                    partition="train", serial=batch.keys[index].serial, sample=batch.keys[index].sample, step=1
                ),
                attempt=0,
                lease="1@reference-0",
                until=9.0,
                unit=0,
                bytes={},
            )
            for index in chosen
        ]
        columns = {"prompt_ids": batch.prompts.take(chosen), "response_ids": batch.responses.take(chosen)}
        found += [result["ref_logprobs"] for result in model.compute(rows, columns)]
    return Jagged.from_rows(found, more.get("weights", "float32"))


def gradient(folder: Path, batch: MicroBatch, *, given: bool) -> dict[str, torch.Tensor]:
    trainer = Moved(settings_of(reference_given=given), group=SingleProcess())
    trainer.load(folder, checkpoint=None)
    assert (trainer._reference is None) == given
    trainer.micro_batch(batch, version=Version(0, 0).packed)
    metrics = trainer.finish_step(1)
    assert metrics["kl"] > 1e-4
    return trainer.kept


SAME, OTHER = 1e-6, 5e-6
"""Relative errors in float32: of the same packs, and of others, whose rounding differs; see the test in float64."""


@pytest.mark.parametrize(
    ("at_once", "more", "within"),
    [(20, {}, SAME), (3, {"layout": "shared-prompt"}, OTHER), (7, {"pack_tokens": 24}, OTHER)],
)
def test_the_gradient_is_that_of_the_trainers_own_reference(
    tiny_folder: Path, at_once: int, more: dict[str, Any], within: float
) -> None:
    batch = samples()
    own = gradient(tiny_folder, batch, given=False)
    column = computed(tiny_folder, batch, at_once=at_once, **more)
    assert (column.lengths == batch.responses.lengths).all()
    given = gradient(tiny_folder, replace(batch, reference=column), given=True)
    assert relative_error(given, own) < within


def test_in_double_precision_they_differ_by_nothing_but_rounding(tiny_folder: Path) -> None:
    batch, double = samples(), cast(Any, "float64")
    column = computed(tiny_folder, batch, at_once=6, weights=double, compute=double)
    how = {"temperature": TEMPERATURE, "compute": torch.float64, "rows": 4096}
    models = [
        LogprobModel(open_model(tiny_folder, weights=True, device=torch.device("cpu"), dtype=torch.float64), **how)
        for _ in range(2)
    ]
    policy, reference = models
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    prompts, responses = ([one.row(i) for i in range(len(batch))] for one in (batch.prompts, batch.responses))
    (pack,) = pack_samples(prompts, responses, [key.serial for key in batch.keys], layout="separate", budget=4096)
    entries = batch.responses.offsets[pack.samples] + pack.offsets
    gradients = []
    for against in (reference.evaluate(pack), torch.from_numpy(column.values[entries])):
        assert against.dtype == torch.float64
        logprobs, _ = policy(pack, entropy=False)
        terms = LOSS.tokens(
            logprobs,
            behaviour=torch.from_numpy(batch.logprobs.values[entries]).double(),
            advantages=torch.from_numpy(batch.advantages[pack.samples]).double(),
            reference=against,
            entropy=None,
        )
        policy.zero_grad()
        terms.total.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in policy.named_parameters()})
    assert relative_error(*gradients) < 1e-12


def test_columns_of_other_tasks_travel_with_their_samples() -> None:
    batch = samples()
    marks = Jagged.from_rows([[index] for index in range(len(batch))], "int32")
    marked = replace(batch, extra={"mark": marks}, reference=batch.logprobs)
    halves = [marked.take(list(range(11, len(batch)))), marked.take(list(range(11)))]
    joined = MicroBatch.joined(halves)
    assert joined.extra["mark"].values.tolist() == list(range(len(batch)))
    assert np.array_equal(joined.reference.values, batch.logprobs.values)
    assert MicroBatch.joined([]).extra == {}
