"""The table of checks, and the examination of a run by all of them.

Invariant: findings are sorted by severity, then by the order of the table; the names of checks are unique.
"""

from __future__ import annotations

from asyncflow.doctor import balance, learning, running
from asyncflow.doctor.evidence import Evidence
from asyncflow.doctor.finding import SEVERITIES, Check, Finding

CHECKS: tuple[Check, ...] = (
    Check("stalled", "fault", running.stalled),
    Check("constant-reward", "fault", learning.constant_reward),
    Check("skipped-steps", "fault", learning.skipped_steps),
    Check("logprob-gap", "fault", learning.logprob_gap),
    Check("kl-runaway", "fault", learning.kl_runaway),
    Check("entropy-collapse", "fault", learning.entropy_collapse),
    Check("gradient-norm", "fault", learning.gradient_norm),
    Check("insecure", "fault", running.insecure),
    Check("rewards-fail", "warning", running.rewards_fail),
    Check("clip-fraction", "warning", learning.clip_fraction),
    Check("cut-responses", "warning", learning.cut_responses),
    Check("equal-groups", "warning", learning.equal_groups),
    Check("few-effective", "warning", learning.few_effective),
    Check("lost-processes", "warning", running.lost_processes),
    Check("lease-timeouts", "warning", running.lease_timeouts),
    Check("storage-full", "warning", running.storage_full),
    Check("slow-ledger", "warning", running.slow_ledger),
    Check("slow-link", "warning", balance.slow_link),
    Check("prompts-skipped", "warning", running.prompts_skipped),
    Check("sinks-fail", "warning", running.sinks_fail),
    Check("trainer-starved", "advice", balance.trainer_starved),
    Check("rollouts-starved", "advice", balance.rollouts_starved),
    Check("taking-turns", "advice", balance.taking_turns),
    Check("slow-rewards", "advice", balance.slow_rewards),
    Check("tail", "advice", balance.tail),
    Check("data-plane", "advice", balance.data_plane),
    Check("checkpoint-stall", "advice", balance.checkpoint_stall),
    Check("publication-stall", "advice", balance.publication_stall),
    Check("swap-stall", "advice", balance.swap_stall),
    Check("evaluation-share", "advice", balance.evaluation_share),
)


def examine(evidence: Evidence) -> list[Finding]:
    """Return the findings of all checks, the most severe first."""
    found = [
        Finding(name=check.name, severity=check.severity, **words._asdict())
        for check in CHECKS
        if (words := check.examine(evidence)) is not None
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
