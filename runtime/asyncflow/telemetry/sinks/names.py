"""Names of figures in sinks: AsyncFlow's own, and in addition the names that verl uses in its dashboards.

AsyncFlow's own names are ``asyncflow/`` and the field of ``metrics.jsonl``; for evaluations ``asyncflow/eval/``,
followed by the name of the set if it has one. ``FIELD`` is the table of verl's names; docs/guide/outputs.md shows it.

Invariants: a name of verl is used only with the meaning that it has in verl. A figure that is missing in a line is not
written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, TypeAlias

Line: TypeAlias = Mapping[str, Any]
Formula: TypeAlias = Callable[[Line], float]

OWN = "asyncflow"
MAIN = "main"
"""Name of the main set in verl's names, which require one."""
_NO_FIGURES = frozenset(("at", "started", "ended", "step", "keys", "published", "event"))


def _of(name: str) -> Formula:
    return lambda line: float(line[name])


def _prompt_tokens(line: Line) -> float:
    return float(line["tokens"] - line["response_tokens"] - line.get("observation_tokens", 0))


def _net_reward(line: Line) -> float:
    """Return the reward. Raises KeyError if the KL is in the reward, because verl's figure is the difference."""
    if "penalty_kl" in line:
        raise KeyError("penalty_kl")
    return float(line["reward"])


def _seconds(*names: str) -> Formula:
    return lambda line: sum(float(line[name]) for name in names)


FIELD: Mapping[str, Formula] = {
    "training/global_step": _of("step"),
    "actor/loss": _of("loss"),
    "actor/grad_norm": _of("grad_norm"),
    "actor/lr": _of("learning_rate"),
    "actor/entropy": _of("entropy"),
    "actor/kl_loss": _of("kl"),
    "actor/pg_clipfrac": lambda line: float(line["clip_low"]) + float(line["clip_high"]),
    "actor/pg_clipfrac_lower": _of("clip_dual"),
    "critic/score/mean": _of("reward"),
    "critic/rewards/mean": _net_reward,
    "response_length/mean": lambda line: (line["tokens"] - _prompt_tokens(line)) / line["samples"],
    "prompt_length/mean": lambda line: _prompt_tokens(line) / line["samples"],
    "critic/vf_loss": _of("value_loss"),
    "critic/vf_clipfrac": _of("value_clip"),
    "critic/vf_explained_var": _of("explained_variance"),
    "critic/returns/mean": _of("return_mean"),
    "rollout_corr/rollout_is_mean": _of("correction_mean"),
    "rollout_corr/rollout_is_max": _of("correction_max"),
    "rollout_corr/rollout_is_min": _of("correction_min"),
    "rollout_corr/rollout_is_eff_sample_size": _of("correction_ess"),
    "rollout_corr/rollout_is_ratio_fraction_high": _of("correction_high"),
    "rollout_corr/k3_kl": _of("approx_kl"),
    "perf/total_num_tokens": _of("tokens"),
    "perf/time_per_step": _of("wall_s"),
    "timing_s/step": _of("wall_s"),
    "timing_s/gen": _of("wait_s"),
    "timing_s/update_actor": _seconds("compute_s", "optimizer_s"),
    "timing_s/save_checkpoint": _of("checkpoint_s"),
}
"""Formulas over a line of ``metrics.jsonl``, by name in verl."""


def step_values(line: Line) -> dict[str, float]:
    """Return the figures of a line of ``metrics.jsonl``, under AsyncFlow's and verl's names."""
    values = {f"{OWN}/{name}": value for name, value in _numbers(line).items()}
    for name, formula in FIELD.items():
        try:
            value = formula(line)
        except (KeyError, TypeError, ZeroDivisionError):
            continue
        if isfinite(value):
            values[name] = value
    return values


def evaluation_values(line: Line, *, samples: int) -> dict[str, float]:
    """Return the figures of an evaluation, a line of ``events.jsonl``. samples: per prompt, without the greedy one."""
    values = {"training/global_step": float(line["step"])}
    for name, result in {"": line, **line.get("sets", {})}.items():
        own = f"{OWN}/eval/{name}" if name else f"{OWN}/eval"
        values |= {f"{own}/{figure}": value for figure, value in _numbers(result).items()}
        passing = {int(k): float(value) for k, value in result.get("pass_at", {}).items()}
        values |= {f"{own}/pass@{k}": value for k, value in passing.items()}
        field = f"val-core/{name or MAIN}"
        values[f"{field}/acc/mean@{samples}"] = float(result["accuracy"])
        if result.get("reward") is not None:
            values[f"{field}/reward/mean@{samples}"] = float(result["reward"])
        values |= {f"{field}/acc/best@{k}/mean": value for k, value in passing.items()}
    return values


def _numbers(line: Line) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if name not in _NO_FIGURES and isinstance(value, int | float) and isfinite(value)
    }
