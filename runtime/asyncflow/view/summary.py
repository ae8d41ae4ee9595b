"""Summary at the end of a run: the figures of ``summary.json`` and where the files are. Pure.

Invariant: it shows what the run has measured and nothing else; a figure that is not there is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from asyncflow.plan.describe import ABSENT, duration
from asyncflow.view.words import amount, failures, score, share

_ROWS: tuple[tuple[str, Callable[[Any], str], tuple[str, ...]], ...] = (
    ("steps", amount, ("steps",)),
    ("time", duration, ("wall_s",)),
    ("accuracy, first → last", score, ("eval_accuracy_first", "eval_accuracy_last")),
    ("greedy, first → last", score, ("eval_greedy_first", "eval_greedy_last")),
    ("eval reward, first → last", score, ("eval_reward_first", "eval_reward_last")),
    ("reward, first → last", score, ("reward_first", "reward_last")),
    ("tokens generated", amount, ("tokens_generated",)),
    ("tokens trained", amount, ("tokens_trained",)),
    ("tokens / s / device", amount, ("tpspd",)),
    ("staleness at start, mean / max", amount, ("staleness_start_mean", "staleness_start_max")),
    ("staleness at end, max", amount, ("staleness_end_max",)),
    ("prompts too long, skipped", str, ("prompts_skipped",)),
    ("samples dispatched", str, ("samples_dispatched",)),
    ("trained / filtered", str, ("samples_trained", "samples_filtered")),
    ("dropped / unfinished", str, ("samples_dropped", "samples_unfinished")),
    ("rewards failed", failures, ("rewards_failed",)),
    ("lost / duplicated", str, ("samples_lost", "samples_duplicated")),
    ("steps without an update", str, ("steps_skipped",)),
    ("log-prob gap, p99", amount, ("logprob_gap_p99",)),
)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Render the summary that the driver wrote."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    for title, written, keys in _ROWS:
        arrow = " → " if "→" in title else " / "
        values = [summary.get(key) for key in keys]
        table.add_row(title, arrow.join(ABSENT if value is None else written(value) for value in values))
    first, last = _evaluated(summary, "first"), _evaluated(summary, "last")
    for title, value in last.items():
        table.add_row(f"{title}, first → last", f"{score(first.get(title))} → {score(value)}")
    if isinstance(best := summary.get("best"), Mapping):
        table.add_row("best checkpoint", f"step {best['step']}, {best['by']} {score(best['value'])}")
    idle = summary.get("idle_share")
    if isinstance(idle, Mapping):
        table.add_row("idle share", "  ".join(f"{role} {share(part)}" for role, part in sorted(idle.items())))
    return table


def _evaluated(summary: Mapping[str, Any], which: str) -> dict[str, float]:
    """Return pass@k and the results of named sets, of the first or the last evaluation, by what they are."""
    figures = {f"pass@{k}": value for k, value in summary.get(f"eval_pass_at_{which}", {}).items()}
    for name, result in summary.get(f"eval_sets_{which}", {}).items():
        figures[f"{name}: accuracy"] = result["accuracy"]
        figures |= {f"{name}: pass@{k}": value for k, value in result["pass_at"].items()}
    return figures


def files_line(folder: str, names: list[str]) -> str:
    """Return the line that says where the files are; ``names`` are those of the folder's entries that exist."""
    return f"files in {folder}: {', '.join(names)}" if names else f"files in {folder}"
