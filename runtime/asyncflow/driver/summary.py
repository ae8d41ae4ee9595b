"""``summary.json``: what a run did, in figures that were measured.

Invariant: each figure is computed from lines, from the audit of the ledger, or from what roles reported; nothing is
assumed, and what was not measured is null. Times are those in which the job was up (``Lives.up_s``): a run that was
suspended, or that lay dead until it was resumed, does not grow older meanwhile.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from asyncflow.api.status import RewardState
from asyncflow.driver.evaluation import EvaluationResult
from asyncflow.driver.lives import Lives
from asyncflow.driver.progress import Progress
from asyncflow.net.roster import Best
from asyncflow.queue.protocol.messages import AuditReport


def summarize(
    progress: Progress,
    *,
    audit: AuditReport,
    phase: str,
    finished: float,
    lives: Lives,
    rewards: RewardState,
    devices: int,
    prompts_skipped: int,
    best: Best | None,
) -> dict[str, Any]:
    """Return the summary.

    finished: unix seconds; devices: as ``RLJobSpec.devices`` counts them; prompts_skipped: those
    that were too long; best: what the trainer keeps as the best.
    """
    lines = progress.lines
    evaluations = [progress.evaluations[step] for step in sorted(progress.evaluations)]
    first_eval = evaluations[0] if evaluations else None
    last_eval = evaluations[-1] if evaluations else None
    dispatched = progress.at("first dispatch")
    tokens_trained = sum(int(line["tokens"]) for line in lines)
    training_s = lives.up_s(dispatched, lines[-1]["at"]) if lines and dispatched is not None else None
    samples = sum(int(line["samples"]) for line in lines)
    gaps = [float(line["logprob_gap_p99"]) for line in lines if line.get("logprob_gap_p99") is not None]
    return {
        "phase": phase,
        "steps": progress.done,
        "wall_s": lives.up_s(progress.started, finished),
        "training_s": training_s,
        "eval_prompts": last_eval.prompts if last_eval else None,
        "eval_accuracy_first": first_eval.accuracy if first_eval else None,
        "eval_accuracy_last": last_eval.accuracy if last_eval else None,
        "eval_greedy_first": first_eval.greedy if first_eval else None,
        "eval_greedy_last": last_eval.greedy if last_eval else None,
        "eval_reward_first": first_eval.reward if first_eval else None,
        "eval_reward_last": last_eval.reward if last_eval else None,
        "eval_pass_at_first": first_eval.pass_at if first_eval else {},
        "eval_pass_at_last": last_eval.pass_at if last_eval else {},
        "eval_sets_first": _sets(first_eval),
        "eval_sets_last": _sets(last_eval),
        "best": msgspec.to_builtins(best) if best else None,
        "reward_first": lines[0]["reward"] if lines else None,
        "reward_last": lines[-1]["reward"] if lines else None,
        "tokens_generated": lives.tokens_generated,
        "tokens_trained": tokens_trained,
        "tpspd": tokens_trained / training_s / devices if training_s and devices else None,
        "devices": devices,
        "staleness_start_max": max((line["staleness_start_max"] for line in lines), default=None),
        "staleness_start_mean": (
            sum(line["staleness_start_mean"] * line["samples"] for line in lines) / samples if samples else None
        ),
        "staleness_end_max": max((line["staleness_end_max"] for line in lines), default=None),
        "staleness_token_mean": (
            sum(line["staleness_token_mean"] * line["response_tokens"] for line in lines)
            / max(1, sum(line["response_tokens"] for line in lines))
            if lines
            else None
        ),
        "prompts_skipped": prompts_skipped,
        "samples_dispatched": audit.dispatched,
        "samples_trained": audit.trained,
        "samples_filtered": audit.filtered,
        "samples_dropped": audit.dropped,
        "samples_unfinished": audit.unfinished,
        "rewards_failed": rewards.failed,
        "first_failed_reward": rewards.first_failure or None,
        "samples_lost": audit.lost,
        "samples_duplicated": audit.duplicated,
        "idle_share": lives.idle_shares(finished),
        "steps_skipped": sum(int(line.get("skipped", 0)) for line in lines),
        "logprob_gap_p99": max(gaps, default=None),
        "trainer_attempts": audit.attempts,
        "redeliveries": audit.redeliveries,
    }


def _sets(evaluation: EvaluationResult | None) -> dict[str, dict[str, Any]]:
    """Return the results of the sets that have a name."""
    return {name: asdict(result) for name, result in evaluation.sets.items()} if evaluation else {}
