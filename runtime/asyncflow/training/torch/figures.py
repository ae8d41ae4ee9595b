"""The figures of a step: measurements of every pack, and the metrics computed from them.

Invariants: figures of packs stay on the device that computed them, without synchronisation, until ``merged`` or
``take`` reads all of them. A figure that was not computed, or that has no tokens, is NaN and not among the metrics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.algorithms.correction import CorrectionTerms, effective_share
from asyncflow.algorithms.loss import TokenLoss
from asyncflow.algorithms.losses import MAX_LOG_RATIO
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.report import StepMeter
from asyncflow.training.torch.optimizer import Applied

_SUMS = (
    "tokens", "sequences", "computed", "loss", "kl", "entropy", "surprise", "ratio", "approx_kl",
    "clip_low", "clip_high", "clip_dual", "silent", "packed_tokens", "gap_tokens", "gap",
    "correction_units", "correction_weights", "correction_squares", "correction_high", "correction_low",
    "correction_k1", "correction_k3", "penalty_tokens", "penalty", "value_tokens", "value_loss", "value_clip",
    "return", "return_squares", "value_error", "value_error_squares", "critic_norm",
)  # fmt: skip
_OF_VALUES = ("value_loss", "value_clip", "return", "return_squares", "value_error", "value_error_squares")
_MAXIMA = ("ratio_max", "correction_max", "correction_least")
"""``correction_least`` is the smallest weight, negated."""
_ROUNDING = 1e-9
"""Variance of equal returns, relative to their mean square, that rounding can cause."""
_MEANS = ("kl", "entropy", "surprise", "ratio", "approx_kl", "clip_low", "clip_high", "clip_dual")


class StepFigures:
    """The figures of one rank's packs since the last step. own: names of the figures that the algorithm measures."""

    def __init__(self, own: tuple[str, ...] = ()) -> None:
        self._own = own
        self._meter = _meter(own)
        self._packs: list[tuple[tuple[str, ...], Tensor, Tensor]] = []
        self._values: list[Tensor] = []

    def count(self, values: Iterable[tuple[str, float]]) -> None:
        """Add numbers that are in host memory, by name."""
        self._meter.add(values)

    def gaps(self, gap: NDArray[np.floating]) -> None:
        """Add absolute differences of log-probs between engine and trainer, one per token."""
        self._meter.add([("gap_tokens", float(len(gap))), ("gap", float(gap.sum(dtype=np.float64)))])
        self._meter.histogram.add(gap)

    def pack(
        self,
        terms: TokenLoss,
        *,
        loss: Tensor,
        logprobs: Tensor,
        behaviour: Tensor,
        entropy: Tensor | None,
        on_policy: Tensor,
    ) -> None:
        """Compute the figures of a pack on its device.

        on_policy: 1 for targets that the current weights generated.
        """
        policy, logratio = terms.policy, logprobs - behaviour
        gap, unknown = logratio.abs(), logprobs.new_full((), math.nan)
        values = {
            "loss": loss,
            "kl": unknown if terms.kl is None else terms.kl.detach().sum(),
            "entropy": unknown if entropy is None else entropy.detach().sum(),
            "surprise": -logprobs.sum(),
            "ratio": policy.ratio.sum(),
            "ratio_max": policy.ratio.max(),
            "approx_kl": (logratio.clamp(max=MAX_LOG_RATIO).exp() - 1 - logratio).sum(),
            "clip_low": policy.clipped_low.sum(),
            "clip_high": policy.clipped_high.sum(),
            "clip_dual": policy.clipped_dual.sum(),
            "gap_tokens": on_policy.sum(),
            "gap": (gap * on_policy).sum(),
        }
        values |= {name: policy.figures[name].sum() for name in self._own}
        if terms.correction is not None:
            values |= _correction(terms.correction)
        gaps = torch.where(on_policy > 0, gap, float("nan"))
        self._packs.append((tuple(values), torch.stack(list(values.values())), gaps))

    def values(self, *, loss: Tensor, clipped: Tensor) -> None:
        """Add the sums of a critic's pack: of its loss, and of its number of clipped tokens."""
        self._values.append(torch.stack([loss, clipped]))

    def take(self) -> dict[str, float]:
        """Return the sums that are not 0, and reset all figures; waits for every pack since the last step."""
        self._read()
        sums, self._meter = self._meter.sums, _meter(self._own)
        return {name: value for name, value in sums.items() if value}

    def merged(self, group: ProcessGroup, *, step: int) -> StepMeter:
        """Return the figures of all ranks, and reset. Collective; waits for every pack since the last step."""
        self._read()
        rows = group.gather(self._meter.array(), what=f"the counts of step {step}")
        meter, self._meter = self._meter.merged(rows), _meter(self._own)
        return meter

    def _read(self) -> None:
        for row in torch.stack(self._values).tolist() if self._values else ():
            self._meter.add(zip(("value_loss", "value_clip"), row, strict=True))
        self._values = []
        if not self._packs:
            return
        names, figures, gaps = zip(*self._packs, strict=True)
        self._packs = []
        for name, row in zip(names, torch.stack(figures).tolist(), strict=True):
            self._meter.add(zip(name, row, strict=True))
        self._meter.histogram.add(torch.cat(gaps).cpu().numpy())


def metrics_of(meter: StepMeter, *, divisor: float, applied: Applied, own: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the finite metrics of a step by name.

    own: names of the figures that the algorithm measures; divisor: divisor of the sums of the loss and its gradient.
    """
    sums = meter.sums
    computed, gap_tokens = sums["computed"] or math.nan, sums["gap_tokens"]
    metrics = {name: sums[name] / computed for name in (*_MEANS, *own)} | {
        "loss": sums["loss"] / divisor,
        "ratio_max": meter.maxima["ratio_max"],
        "grad_norm": applied.grad_norm,
        "learning_rate": applied.learning_rate,
        "skipped": float(not applied.moved),
        "silent_samples": sums["silent"],
        "computed_tokens": sums["computed"],
        "packed_tokens": sums["packed_tokens"],
        "logprob_gap_tokens": gap_tokens,
        "logprob_gap": sums["gap"] / (gap_tokens or math.nan),
        "logprob_gap_p99": meter.histogram.quantile(0.99),
    }
    if tokens := sums["penalty_tokens"]:
        metrics["penalty_kl"] = sums["penalty"] / tokens
    if units := sums["correction_units"]:
        metrics |= {
            "correction_ess": effective_share(
                units=units, weights=sums["correction_weights"], squares=sums["correction_squares"]
            ),
            "correction_mean": sums["correction_weights"] / units,
            "correction_max": meter.maxima["correction_max"],
            "correction_min": -meter.maxima["correction_least"],
            "correction_high": sums["correction_high"] / units,
            "correction_low": sums["correction_low"] / units,
            "correction_k1": sums["correction_k1"] / computed,
            "correction_k3": sums["correction_k3"] / computed,
        }
    if tokens := sums["value_tokens"]:
        metrics |= _values_of({name: sums[name] / tokens for name in _OF_VALUES})
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def critic_metrics(applied: Applied) -> dict[str, float]:
    """Return the finite metrics of an optimizer step of the critic."""
    metrics = {"critic_grad_norm": applied.grad_norm, "critic_learning_rate": applied.learning_rate}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _values_of(means: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a critic from means over tokens.

    ``explained_variance`` is 1 - Var(R - V) / Var(R), or 0 if the returns differ by no more than rounding errors.
    """
    spread = means["return_squares"] - means["return"] ** 2
    unexplained = means["value_error_squares"] - means["value_error"] ** 2
    return {
        "value_loss": means["value_loss"],
        "value_clip": means["value_clip"],
        "return_mean": means["return"],
        "explained_variance": 1 - unexplained / spread if spread > _ROUNDING * means["return_squares"] else 0.0,
    }


def _correction(terms: CorrectionTerms) -> dict[str, Tensor]:
    """Return the figures of importance weights, as sums over tokens or responses, depending on the correction level."""
    weight, unit = terms.weight, terms.unit
    return {
        "correction_units": unit.sum(),
        "correction_weights": (weight * unit).sum(),
        "correction_squares": (weight.square() * unit).sum(),
        "correction_max": weight.max(),
        "correction_least": (-weight).max(),
        "correction_high": (terms.above * unit).sum(),
        "correction_low": (terms.below * unit).sum(),
        "correction_k1": terms.k1.sum(),
        "correction_k3": terms.k3.sum(),
    }


def _meter(own: tuple[str, ...]) -> StepMeter:
    return StepMeter(sums=(*_SUMS, *own), maxima=_MAXIMA)
