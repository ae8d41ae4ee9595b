"""The gradient of a step is that of one big padded batch, however the step was cut.

The reference is naive on purpose: transformers on a right-padded batch, and each formula written out. Both compute in
float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_reference import (
    HORIZON,
    TEMPERATURE,
    GradientKept,
    padded_logprobs,
    part,
    reference_gradient,
    reference_step,
    reference_weights,
    relative_error,
    samples,
)
from transformers import AutoModelForCausalLM

from asyncflow.algorithms.correction import Correction
from asyncflow.algorithms.loss import Aggregation, AggregationName, Loss
from asyncflow.algorithms.losses import Clip
from asyncflow.identity import Version
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings

EXACT = 1e-6
DOUBLE: Any = "float64"
AGGREGATIONS: tuple[AggregationName, ...] = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def backend(folder: Path, loss: Loss, **more: Any) -> GradientKept:
    optimizer = OptimizerSettings(learning_rate=1e-3, steps=1, max_grad_norm=0)
    settings = BackendSettings(optimizer=optimizer, loss=loss, temperature=TEMPERATURE, threads=1, **more)
    made = GradientKept(settings, group=SingleProcess())
    made.load(folder, checkpoint=None)
    return made


def cuts(batch: MicroBatch) -> Iterator[tuple[str, list[list[int]], dict[str, Any]]]:
    everything = list(range(len(batch)))
    shuffled = np.random.default_rng(5).permutation(len(batch)).tolist()
    # One that is silent, one that is empty, one that is masked, and one like any other.
    alone, others = [2, 5, 9, 14], [i for i in shuffled if i not in (2, 5, 9, 14)]
    yield "one slot", [everything], {"pack_tokens": 4096}
    yield (
        "slots of one sample, an empty one, shuffled",
        [others[:9], *([i] for i in alone), [], others[9:]],
        {"pack_tokens": 40},
    )
    yield (
        "logits a few at a time, layers computed again",
        [everything],
        {"pack_tokens": 4096, "options": {"head_tokens": 5, "gradient_checkpointing": True}},
    )
    yield "shared prompts", [everything], {"layout": "shared-prompt", "pack_tokens": 4096}
    yield (
        "shared prompts, small packs, shuffled",
        [shuffled[:9], shuffled[9:]],
        {"layout": "shared-prompt", "pack_tokens": 24},
    )


LOSSES = {
    "clip-higher": Loss(clip=Clip(low=0.2, high=0.28)),
    "dual clip and KL": Loss(clip=Clip(low=0.1, high=0.3, dual=1.5), kl=0.05, kl_name="k3"),
    "recompute": Loss(old="recompute"),
    "entropy": Loss(entropy=0.05),
    "entropy and KL": Loss(entropy=0.02, kl=0.05, kl_name="k3+"),
    "recompute and KL": Loss(old="recompute", kl=0.05, kl_name="k2"),
}


PAIRS = [
    (AGGREGATIONS[number % len(AGGREGATIONS)], name)
    for offset in (0, 2)
    for number, name in enumerate(LOSSES, start=offset)
]
"""Each loss by two aggregations, and each of those with two losses or more; every pair is in
``tests/algorithms/test_objectives.py``, without a model."""


@pytest.mark.parametrize(("aggregation", "name"), PAIRS)
def test_streamed_gradient_is_that_of_one_padded_batch(
    tiny_folder: Path, in_float64: None, aggregation: AggregationName, name: str
) -> None:
    chosen = LOSSES[name]
    loss = replace(chosen, aggregation=Aggregation(name=aggregation, horizon=HORIZON))
    batch = samples()
    value, expected = reference_step(tiny_folder, batch, loss)
    for what, slots, more in cuts(batch):
        trainer = backend(tiny_folder, loss, weights=DOUBLE, **more)
        for slot in slots:
            trainer.micro_batch(part(batch, slot), version=Version(0, 0).packed)
        metrics = trainer.finish_step(1)
        assert relative_error(trainer.kept, expected) < EXACT, what
        assert metrics["loss"] == pytest.approx(value, rel=EXACT), what
        assert metrics["skipped"] == 0
        assert metrics["clip_low"] + metrics["clip_high"] > 0 or chosen.old == "recompute"


CORRECTED: dict[str, tuple[AggregationName, Loss]] = {
    "tokens truncated": ("token-mean", Loss(old="recompute", correction=Correction(low=0.6, high=1.5))),
    "responses truncated": (
        "seq-mean-token-mean",
        Loss(old="recompute", correction=Correction(level="sequence", high=2.0)),
    ),
    "responses masked": (
        "token-mean",
        Loss(old="recompute", correction=Correction(kind="mask", level="sequence", low=0.01, high=4.0)),
    ),
    "geometric means masked, KL": (
        "seq-mean-token-sum",
        Loss(
            old="lagged",
            correction=Correction(kind="mask", level="geometric", low=0.8, high=1.2),
            kl=0.05,
            kl_name="k3",
        ),
    ),
    "behaviour, tokens masked": ("token-mean", Loss(correction=Correction(kind="mask", low=0.5, high=2.0))),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_a_corrected_gradient_and_its_figures_are_those_of_one_padded_batch(
    tiny_folder: Path, in_float64: None, name: str
) -> None:
    aggregation, chosen = CORRECTED[name]
    loss = replace(chosen, aggregation=Aggregation(name=aggregation, horizon=HORIZON))
    batch, figures = samples(), []
    value, expected = reference_step(tiny_folder, batch, loss)
    for what, slots, more in cuts(batch):
        trainer = backend(tiny_folder, loss, weights=DOUBLE, **more)
        for slot in slots:
            trainer.micro_batch(part(batch, slot), version=Version(0, 0).packed)
        metrics = trainer.finish_step(1)
        assert relative_error(trainer.kept, expected) < EXACT, what
        assert metrics["loss"] == pytest.approx(value, rel=EXACT), what
        figures.append({key: value for key, value in metrics.items() if key.startswith("correction_")})
    assert figures[0] == pytest.approx(corrected_figures(tiny_folder, batch, loss), rel=1e-4)
    for each in figures[1:]:
        assert each == pytest.approx(figures[0], rel=1e-5)
    assert 0 < figures[0]["correction_high"] + figures[0]["correction_low"] < 1


def corrected_figures(folder: Path, batch: MicroBatch, loss: Loss) -> dict[str, float]:
    """The figures of importance weights, from one padded batch; what is silent is not computed, and not counted."""
    assert batch.loss_mask is not None
    assert loss.correction is not None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    mask, behaviour = torch.zeros(len(batch), HORIZON), torch.zeros(len(batch), HORIZON)
    for i in np.flatnonzero(~loss.silent(batch.advantages)).tolist():
        mask[i, : len(batch.loss_mask.row(i))] = torch.from_numpy(batch.loss_mask.row(i).astype(np.float32))
        behaviour[i, : len(batch.logprobs.row(i))] = torch.from_numpy(batch.logprobs.row(i).copy())
    with torch.no_grad():
        distance = (padded_logprobs(model, batch, HORIZON) - behaviour) * mask
    counted = mask > 0
    weights = reference_weights(distance, mask, loss)
    unbounded = replace(loss, old="recompute", correction=Correction(level=loss.correction.level, high=1e9))
    ratios = reference_weights(distance, mask, unbounded)
    if loss.correction.level == "token":
        weights, ratios = weights[counted], ratios[counted]
    else:
        first = [int(row.nonzero()[0]) for row in mask if row.any()]
        weights, ratios = (each[counted.any(1), first] for each in (weights, ratios))
    distance = distance[counted]
    return {
        "correction_ess": (weights.sum() ** 2 / (len(weights) * weights.square().sum())).item(),
        "correction_mean": weights.mean().item(),
        "correction_max": weights.max().item(),
        "correction_min": weights.min().item(),
        "correction_high": (ratios > loss.correction.high).float().mean().item(),
        "correction_low": (ratios < loss.correction.low).float().mean().item(),
        "correction_k1": -distance.mean().item(),
        "correction_k3": (distance.exp() - 1 - distance).mean().item(),
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_compiled_layers_give_the_same_gradient(tiny_folder: Path, compute: Any) -> None:
    batch = samples()
    exact = reference_gradient(tiny_folder, batch, Loss())
    errors = []
    for compiled in (False, True):
        options = {"compile": compiled, "gradient_checkpointing": compiled}
        trainer = backend(tiny_folder, Loss(), compute=compute, layout="shared-prompt", pack_tokens=60, options=options)
        trainer.micro_batch(batch, version=Version(0, 0).packed)
        trainer.finish_step(1)
        errors.append(relative_error(trainer.kept, exact))
    assert errors[1] < max(1e-5, 1.5 * errors[0])


def test_logprobs_are_those_of_transformers(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32, attn_implementation="eager")
    batch = samples()
    with torch.no_grad():
        exact = padded_logprobs(model, batch, HORIZON)
    rows = [exact[i, : len(batch.responses.row(i))].numpy() for i in range(len(batch))]
    same = MicroBatch(
        keys=batch.keys,
        prompts=batch.prompts,
        responses=batch.responses,
        logprobs=Jagged.from_rows(rows, "float32"),
        versions=batch.versions,
        advantages=np.ones(len(batch), np.float32),
    )
    for layout in ("separate", "shared-prompt"):
        trainer = backend(tiny_folder, Loss(), layout=layout)
        trainer.micro_batch(same, version=Version(0, 0).packed)
        metrics = trainer.finish_step(1)
        assert metrics["logprob_gap_tokens"] == sum(map(len, rows))
        assert metrics["logprob_gap_p99"] < 1e-4
        assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
