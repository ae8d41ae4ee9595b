"""Findings about operation: processes, leases, failed rewards, storage, ledger, sinks, prompts, certificates."""

from __future__ import annotations

from asyncflow.api.names import TASK
from asyncflow.doctor.evidence import Evidence
from asyncflow.doctor.finding import Words, percent, seconds

LOST = 2
"""Minimum number of lost processes of a role: one may be chance."""
FAILED = 0.01
"""Share of the samples without a reward."""
FULL = 0.05
"""Share of a storage unit's life for which puts waited for room."""
SYNC_S = {"always": 0.02, "interval": 0.5}
"""Mean seconds of one sync of the ledger, by ``storage.ledger.sync``: a solid-state disk takes 0.1 to 5 ms, a network
volume 10 ms and more. With ``always`` each acknowledgement waits for a sync; with ``interval`` a crash of the node
loses correspondingly more work."""
FEWEST_SYNCS = 10
_BUDGET = {
    **{role: role for role in ("driver", "controller", "storage", "trainer")},
    **dict.fromkeys(("holder", "master"), "storage"),
    "critic": "trainer",
}
"""The part of ``failurePolicy`` that limits the restarts of a role; ``rollout`` for all other roles."""
_PLACE = {
    **{role: role for role in ("driver", "rollout", "trainer", "reference")},
    **{role: f"{role}.role" for role in ("reward", "critic")},
    "storage": "transferQueue",
}
"""Field of the manifest with the resources of a role. It has no field for controllers, masters and holders."""
SKIPPED = 0.05
"""Share of the training prompts that are too long."""


def stalled(evidence: Evidence) -> Words | None:
    """Find a live job that makes no progress."""
    status = evidence.status
    if status is None or not (status.phase == "Paused" or "stalled" in status.waiting_for):
        return None
    failure = f"; the first sample without a reward: {status.rewards.first_failure}" if status.phase == "Paused" else ""
    return Words(
        "the job makes no progress",
        f"it waits for {status.waiting_for or 'a user to resume it'}, at step {status.step} of {status.steps}{failure}",
        "fix the reward and POST /v1/resume"
        if status.phase == "Paused"
        else "check the logs of the role that it waits for",
    )


def lost_processes(evidence: Evidence) -> Words | None:
    """Find roles that lose processes repeatedly."""
    often = {role: count for role, count in evidence.lost.items() if count >= LOST}
    if not often:
        return None
    named = ", ".join(f"{count} {role}" for role, count in sorted(often.items()))
    role = max(often, key=lambda name: often[name])
    task = role.removeprefix(f"{TASK}-")
    place = _PLACE.get(role) if task == role else f"tasks[{task}]"
    memory = f": raise {place}.resources" if place is not None else ""
    redone = evidence.figure("controller", "redeliveries_total")
    return Words(
        f"processes are lost and started again: {named}",
        f"{sum(often.values())} processes ended while the job was up; {redone:.0f} rows were leased again, and their "
        f"unsaved results were computed again",
        f"logs/{role}-*.log says how they ended (exit status 137 or SIGKILL is usually memory"
        f"{memory}); failurePolicy.{_BUDGET.get(role, 'rollout')}.maxRestarts ends the job if they continue to fail",
    )


def lease_timeouts(evidence: Evidence) -> Words | None:
    """Find leases that expire although their holders are alive."""
    ended, lease = evidence.figure("controller", "lease_timeouts_total"), evidence.spec.rollout.lease_seconds
    if ended < 1:
        return None
    redone = evidence.figure("controller", "redeliveries_total")
    return Words(
        "leases expire while their holders are alive",
        f"{ended:.0f} leases were not renewed within rollout.leaseSeconds ({lease:g} s; a holder renews them every "
        f"{lease / 3:.2g} s), and {redone:.0f} rows were leased again although their responses were being generated",
        f"rollout.leaseSeconds: {max(10.0, 5 * lease):g} instead of {lease:g}: longer than a rollout may be silent "
        "while it changes weights or its machine is busy",
    )


def rewards_fail(evidence: Evidence) -> Words | None:
    """Find samples without a reward."""
    failed = sum(evidence.failed.values())
    whole = failed + evidence.scored
    if not whole or failed / whole < FAILED:
        return None
    by = ", ".join(f"{count} {why}" for why, count in sorted(evidence.failed.items(), key=lambda item: -item[1]))
    first = evidence.first_failure.strip().rpartition("\n")[2]
    late = evidence.failed.get("timeout", 0)
    limit, workers = evidence.spec.reward.timeout_seconds, evidence.spec.reward.workers.max
    change = (
        f"reward.timeoutSeconds: {3 * limit:g} instead of {limit:g}, or reward.workers.max: {2 * workers} instead of "
        f"{workers} if they wait for a process"
        if 2 * late > failed
        else "fix the function: the first failure shows the place"
    )
    return Words(
        f"{percent(failed / whole)} of the samples get no reward",
        f"{failed} of {whole} ({by}): they were generated but are not trained"
        + (f"; the first: {first[:200]}" if first else ""),
        change,
    )


def storage_full(evidence: Evidence) -> Words | None:
    """Find storage units in which writers wait for room."""
    lived, waited = evidence.lived_s("storage"), evidence.figure("storage", "budget_waited_seconds_total")
    if lived <= 0 or waited / lived < FULL:
        return None
    queue, waits = evidence.spec.transfer_queue, evidence.figure("storage", "budget_waits_total")
    return Words(
        "the storage units are full: writers wait for room",
        f"{waits:.0f} puts waited {seconds(waited)} in total in {seconds(lived)} of {queue.storage_units} units of "
        f"{queue.bytes_per_unit}",
        f"transferQueue.bytesPerUnit: {_twice(queue.bytes_per_unit.bytes)} instead of {queue.bytes_per_unit}, or "
        f"storage.checkpoints.every below {evidence.spec.storage.checkpoints.every}: a checkpoint frees its samples",
    )


def slow_ledger(evidence: Evidence) -> Words | None:
    """Find a ledger on a slow disk."""
    sync = evidence.spec.storage.ledger.sync
    count = evidence.figure("controller", "ledger_syncs_total")
    spent = evidence.figure("controller", "ledger_sync_seconds_total")
    if sync not in SYNC_S or count < FEWEST_SYNCS or (mean := spent / count) < SYNC_S[sync]:
        return None
    lived = max(evidence.lived_s("controller"), 1e-6)
    effect = "every acknowledgement waits for a sync" if sync == "always" else "a crash of the node loses more work"
    return Words(
        "the ledger is on a slow disk",
        f"{count:.0f} syncs took {seconds(spent)}, {seconds(mean)} each ({percent(min(1.0, spent / lived))} of the "
        f"controller's life); with storage.ledger.sync: {sync} {effect}",
        f"another disk or storage class (a local solid-state disk takes below 5 ms, {mean / 0.005:.0f} times less), or "
        f"sync: {'interval' if sync == 'always' else 'process'}",
    )


def sinks_fail(evidence: Evidence) -> Words | None:
    """Find sinks whose processes fail."""
    lives = [life for life in evidence.lives.values() if life.role == "driver"]
    failures = {
        name.partition("{")[2].rstrip("}"): evidence.figure("driver", name)
        for life in lives
        for name, count in life.figures.items()
        if name.startswith("sink_failures_total") and count
    }
    if not failures:
        return None
    named = ", ".join(f"{kind} {count:.0f} times" for kind, count in sorted(failures.items()))
    return Words(
        f"sinks fail: {named}",
        f"the process that feeds {' and '.join(sorted(failures))} ended with a failure; figures are missing there",
        "logs/driver-0.log says why; asyncflow sinks DIR writes the missing figures",
    )


def insecure(evidence: Evidence) -> Words | None:
    """Find processes that serve other hosts without a certificate."""
    roles = sorted({life.role for life in evidence.lives.values() if life.figures.get("insecure")})
    if not roles:
        return None
    return Words(
        "processes serve other hosts without a certificate",
        f"{', '.join(roles)}: everyone who can reach their ports can read and change the whole job",
        "remove --insecure, and let the substrate issue certificates (docs/guide/operator.md)",
    )


def prompts_skipped(evidence: Evidence) -> Words | None:
    """Find prompts that are skipped because they are too long; each driver's figure includes those of earlier ones."""
    skipped = max((life.figures.get("prompts_skipped_total", 0.0) for life in evidence.lives.values()), default=0.0)
    used = len(evidence.steps) * evidence.spec.algorithm.prompts_per_step
    if not used or (share := skipped / (skipped + used)) < SKIPPED:
        return None
    most = evidence.spec.sampling.max_prompt_tokens
    return Words(
        f"{percent(share)} of the prompts are skipped: they are too long",
        f"{skipped:.0f} prompts had more than sampling.maxPromptTokens ({most}) tokens, {used} were trained: the model "
        "learns only from the short prompts",
        f"sampling.maxPromptTokens: {2 * most}; asyncflow validate FILE names the longest of the first prompts",
    )


def _twice(size: int) -> str:
    return f"{max(1, 2 * size >> 20)}Mi"
