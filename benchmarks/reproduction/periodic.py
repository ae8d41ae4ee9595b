"""Periodic Asynchrony: the speedup of asynchrony, the tokens that shared prompts save, and the wait before a step.

By eq. 12 and 13, synchronous training waits in each step for the last response of D_k, and asynchronous training for
the first group. Over a run, these waits are a sum of maxima and a sum of minima. ``start_up`` runs both modes with the
same lengths and compares the trainer's waits with these sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from bench_async.points import MANIFEST, MOST, SIZE, TOKENS, WITHOUT, Point, predicted
from bench_async.results import Results
from emulation import emulate
from reproduction.figures import Figure

from asyncflow.identity import SampleKey
from asyncflow.rollout.lengths import Lengths
from asyncflow.training.packing import pack_samples

SYNC_TPSPD, ASYNC_TPSPD = 99.966, 192.259
"""Tokens per second and device of the 8B model (Table 2)."""
TOKENS_M, SHARED_M = 84.192, 60.926
"""Millions of tokens in an epoch of GSM8K, without and with shared prompts (Table 3)."""
PROMPTS = 7473
"""The number of prompts in the training set of GSM8K."""
START_S = 0.05
"""The largest accepted difference of the wait of a step, in seconds."""
STEPS, PROMPTS_EACH, TOKEN_S = 10, 8, 0.05
SAMPLE_S = {"sync": 0.05, "periodic": 0.7}
"""Seconds per sample in the trainer. In periodic, the trainer must be busy from the first group to the last."""


def shared_tokens(*, prompt: int, response: int, size: int) -> tuple[int, int]:
    """Return the number of tokens that the trainer computes for a group, without and with a shared prompt."""
    prompts, responses = [np.arange(prompt)] * size, [np.arange(response + 1)] * size
    counts = []
    for layout in ("separate", "shared-prompt"):
        packs = pack_samples(prompts, responses, [0] * size, layout=layout, budget=1 << 30)
        counts.append(sum(len(pack.ids) for pack in packs))
    return counts[0], counts[1]


def shape(*, size: int) -> tuple[int, int]:
    """Return the mean lengths of prompts and responses that give Table 3 for groups of ``size`` (unpublished)."""
    prompt = (TOKENS_M - SHARED_M) * 1e6 / (PROMPTS * (size - 1))
    return round(prompt), round(TOKENS_M * 1e6 / (PROMPTS * size) - prompt)


@dataclass(frozen=True, kw_only=True)
class StartUp:
    """Mean seconds per step for which the trainer waited in a run, and those that eq. 12 or 13 expects."""

    mode: str
    waited: float
    expected: float


def start_up_settings(mode: str) -> list[str]:
    """Return the fields of a run, as for ``--set``, in which each response has a slot from the start of its step."""
    return [
        f"schedule.mode={mode}",
        f"algorithm.steps={STEPS}",
        f"algorithm.promptsPerStep={PROMPTS_EACH}",
        "rollout.replicas=2",
        f"rollout.engine.slots={PROMPTS_EACH}",
        f"rollout.engine.options={{tokens: {TOKENS}, sigma: 0.5, token_s: {TOKEN_S}}}",
        f"trainer.backend.options.sample_s={SAMPLE_S[mode]}",
    ]


def expected_waits(mode: str) -> list[float]:
    """Return the trainer's wait by eq. 12 (sync) or eq. 13 (periodic), for each counted step."""
    lengths = Lengths(tokens=TOKENS, sigma=0.5)
    found = []
    for first in range(PROMPTS_EACH * WITHOUT, PROMPTS_EACH * STEPS, PROMPTS_EACH):
        groups = [
            max(lengths.of(SampleKey(serial, sample), seed=0, most=MOST) for sample in range(SIZE))
            for serial in range(first, first + PROMPTS_EACH)
        ]
        found.append(TOKEN_S * (max(groups) if mode == "sync" else min(groups)))
    return found


def start_up(folder: Path) -> Iterator[StartUp]:
    """Carry out a synchronous and a periodic run, whose trainer waits only for the first samples of a step."""
    for mode in ("sync", "periodic"):
        run = emulate(MANIFEST, folder / f"start-{mode}", start_up_settings(mode))
        waited = [line["wait_s"] for line in run.steps[WITHOUT:]]
        yield StartUp(mode=mode, waited=fmean(waited), expected=fmean(expected_waits(mode)))


def figures(folder: Path | None, *, bench: Path) -> Iterator[Figure]:
    """Yield the figures. folder: for real runs, None for no real runs; bench: results of ``bench_async``, if any."""
    balanced = {
        result.point.mode: result.seconds
        for result in Results(bench).all
        if (result.point.sigma, result.point.ratio, result.point.seed) == (0.5, 1.0, 1)
    }
    sync, periodic = (Point(mode=mode, sigma=0.5, ratio=1.0, seed=1) for mode in ("sync", "periodic"))
    yield Figure(
        what="asynchronous over synchronous, 8B",
        paper=ASYNC_TPSPD / SYNC_TPSPD,
        measured=balanced["sync"] / balanced["periodic"] if {"sync", "periodic"} <= balanced.keys() else None,
        simulated=predicted(sync) / predicted(periodic),
        how="predicted",
        why="from balance (T_train = T_gen), which the paper does not state",
        bar=0.05,
    )
    for size in (8, 16, 32):
        prompt, response = shape(size=size)
        apart, shared = shared_tokens(prompt=prompt, response=response, size=size)
        yield Figure(
            what=f"tokens with shared prompts over without, groups of {size} of {prompt} + {response} tokens",
            paper=SHARED_M / TOKENS_M,
            measured=shared / apart,
            how="fitted",
            why="the mean prompt, for a group size that is not published",
        )
    for each in start_up(folder) if folder is not None else ():
        yield Figure(
            what=f"wait before a step is trained, {each.mode} ({'eq. 12' if each.mode == 'sync' else 'eq. 13'})",
            paper=each.expected,
            unit=" s",
            measured=each.waited,
            how="computed",
            bar=START_S / each.expected,
        )
    yield Figure(
        what="linearity from 16 to 64 devices", paper=0.867, how="missed", why="it needs devices that are not here"
    )
