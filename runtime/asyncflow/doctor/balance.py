"""Findings about who waits for whom: trainer and rollouts, and what takes their time.

The number of rollouts that would balance is that of ``flow.scaling``, by which the elastic policy decides.
"""

from __future__ import annotations

import math
import statistics

from asyncflow.doctor.evidence import Evidence
from asyncflow.doctor.finding import Words, percent, seconds
from asyncflow.flow import scaling

STARVED = 0.6
"""Share of its time that one side waits before the other is called the bottleneck: more than half as many rollouts
again, or fewer than half of them, would balance. The quickstart's trainer waits for 0.3 to 0.5 of it."""
BOTH = 0.4
"""Idle share of both sides at once, from which on they take turns and neither is the bottleneck."""
AT_LIMIT = 0.8
"""Share of the steps whose samples are as stale as they may be."""
EVALUATES, EVALUATES_WELL = 0.5, 0.1
"""Share of the generated tokens that are of evaluations, from which on they are the most. The quickstart has 0.35."""
CHECKPOINTS, CHECKPOINTS_WELL = 0.1, 0.05
PUBLISHES = 0.1
"""Share of its time that the trainer waits for checkpoints, for publications."""
SWAPS = 0.1
"""Share of their time that rollouts stand still to change weights."""
SLOW_LINK = 0.8
"""Seconds in which a version arrives, in steps: with more it is there when the next one is made already."""
REWARDS, REWARDS_WELL, REWARD_OF_STEP = 0.2, 0.05, 0.05
"""Share of their time that rollouts wait for rewards; the least mean of a reward, in steps, that can be the reason."""
TAIL = 0.25
"""Share of their time that rollouts wait for the last sequences of a step."""
DATA_PLANE = 0.2
FEWEST_STEPS = 4
CAUSE_COUNTS = 0.05


def trainer_starved(evidence: Evidence) -> Words | None:
    """Find a trainer that waits for samples while the rollouts have work."""
    waits, idle = evidence.trainer_share("wait_s"), evidence.idle_shares.get("rollout")
    if len(evidence.timed) < FEWEST_STEPS or waits is None or idle is None or waits < STARVED or idle >= BOTH:
        return None
    there, target = evidence.rollouts, evidence.spec.elasticity.target_trainer_wait_share
    balanced = _balanced(evidence, waits=waits, idle=idle)
    allowed = balanced <= evidence.spec.rollout.max_replicas
    how = f" (asyncflow scale DIR rollout={balanced})" if allowed else f", with rollout.maxReplicas: {balanced}"
    return Words(
        "the rollouts are the bottleneck: the trainer is starved",
        f"the trainer waits {percent(waits)} of its time for samples, {there} rollouts are busy {percent(1 - idle)} of "
        f"theirs{_by_cause(evidence, 'trainer')}: training could take 1 / (1 - {waits:.2f}) = "
        f"{1 / (1 - min(waits, 0.999)):.1f} times as many tokens",
        f"rollout.replicas: {balanced} instead of {there} leaves it waiting {percent(target)}{how}; or give devices of "
        "the trainer to rollouts",
    )


def rollouts_starved(evidence: Evidence) -> Words | None:
    """Find rollouts that have nothing to do because the trainer takes the time."""
    waits, idle = evidence.trainer_share("wait_s"), evidence.idle_shares.get("rollout")
    if len(evidence.timed) < FEWEST_STEPS or waits is None or idle is None or idle < STARVED or waits >= BOTH:
        return None
    there = evidence.rollouts
    balanced = _balanced(evidence, waits=waits, idle=idle)
    faster = 1 / max(1 - idle, 0.01)
    fewer = f"rollout.replicas: {balanced} instead of {there}" if balanced < there else "a smaller device share"
    return Words(
        "the trainer is the bottleneck: the rollouts are starved",
        f"{there} rollouts have nothing to do {percent(idle)} of their time, the trainer works {percent(1 - waits)} of "
        f"its own{_by_cause(evidence, 'rollout')}: (1 - {idle:.2f}) x {there} = {(1 - idle) * there:.2f} rollouts "
        "would be busy all the time",
        f"{fewer}, or {faster:.1f} times as fast a trainer (trainer.replicas: "
        f"{math.ceil(evidence.spec.trainer.replicas * faster)})",
    )


def taking_turns(evidence: Evidence) -> Words | None:
    """Find trainer and rollouts that wait for each other."""
    waits, idle = evidence.trainer_share("wait_s"), evidence.idle_shares.get("rollout")
    if len(evidence.timed) < FEWEST_STEPS or waits is None or idle is None or min(waits, idle) < BOTH:
        return None
    schedule, works, makes = evidence.spec.schedule, 1 - waits, 1 - idle
    gain = (
        f"overlapped, a step could take {percent(max(works, makes))} of its time ({percent(works)} training, "
        f"{percent(makes)} generating)"
    )
    why = (
        f"the trainer waits {percent(waits)} of its time and the rollouts {percent(idle)} of theirs"
        f"{_by_cause(evidence, 'rollout')}"
    )
    if schedule.mode == "sync":
        change = "schedule.mode: async with update: delayed and maxStaleness: 1"
        return Words("trainer and rollouts take turns: the schedule is synchronous", f"{why}: {gain}", change)
    limit = schedule.max_staleness
    stale = evidence.values("staleness_start_max")
    at = sum(value >= limit for value in stale) / len(stale)
    if at < AT_LIMIT:
        return None
    return Words(
        "rollouts stand still at the limit of staleness, and the trainer starves",
        f"{why}; {percent(at)} of the steps have samples as stale as they may be ({limit}): {gain}",
        f"schedule.maxStaleness: {limit + 1} instead of {limit}; where responses differ much in length, "
        "swapAt: sequence or token instead of quota",
    )


def evaluation_share(evidence: Evidence) -> Words | None:
    """Find evaluations that take a large part of the generated tokens."""
    whole = sum(life.tokens for life in evidence.lives.values() if life.role == "rollout")
    spent, evaluation = evidence.figure("rollout", "tokens_generated_eval"), evidence.spec.evaluation
    if evaluation is None or evaluation.every == 0 or not whole or len(evidence.steps) <= evaluation.every:
        return None
    if (share := spent / whole) < EVALUATES:
        return None
    ratio = share / (1 - min(share, 0.99))
    every = math.ceil(evaluation.every * ratio * (1 - EVALUATES_WELL) / EVALUATES_WELL)
    return Words(
        f"evaluations take {percent(share)} of what is generated",
        f"{spent:.0f} of {whole:.0f} tokens are of held-out prompts, every {evaluation.every} steps: for each token "
        f"of training {ratio:.2g} of evaluation",
        f"evaluation.every: {every} instead of {evaluation.every} makes that {percent(EVALUATES_WELL)}; or fewer "
        f"held-out prompts, or samples below {evaluation.samples}",
    )


def checkpoint_stall(evidence: Evidence) -> Words | None:
    """Find a trainer that waits for its checkpoints."""
    share, every = evidence.trainer_share("checkpoint_s"), evidence.spec.storage.checkpoints.every
    if share is None or len(evidence.timed) < FEWEST_STEPS or share < CHECKPOINTS:
        return None
    wait = sum(float(step.get("checkpoint_s") or 0.0) for step in evidence.timed)
    return Words(
        f"the trainer waits {percent(share)} of its time for checkpoints",
        f"{seconds(wait)} of {seconds(evidence.timed_s)}, a checkpoint every {every} steps: one is not written "
        "when the next one is due, or copying it takes long",
        f"storage.checkpoints.every: {math.ceil(every * share / CHECKPOINTS_WELL)} instead of {every} makes that "
        f"{percent(CHECKPOINTS_WELL)}; or a faster disk",
    )


def publication_stall(evidence: Evidence) -> Words | None:
    """Find a trainer that waits for its publications."""
    share = evidence.trainer_share("publish_s")
    if share is None or len(evidence.timed) < FEWEST_STEPS or share < PUBLISHES:
        return None
    took = evidence.values("publication_s", 100)
    mean = f"; one takes {seconds(statistics.fmean(took))}" if took else ""
    return Words(
        f"the trainer waits {percent(share)} of its time for publications",
        f"a step takes {seconds(evidence.step_s or 0.0)}{mean}: the version before is not copied when the next one is "
        "made",
        "weightSync.dtype: bfloat16 (half the bytes), or schedule.syncEvery: 2 where swapAt is not quota",
    )


def slow_link(evidence: Evidence) -> Words | None:
    """Find versions that take longer to arrive than a step takes."""
    pulls, step = evidence.mean("rollout", "pull_seconds"), evidence.step_s
    if pulls is None or step is None or pulls[1] < FEWEST_STEPS or pulls[0] < SLOW_LINK * step:
        return None
    mean, count = pulls
    size = evidence.figure("rollout", "pulled_bytes_total") / count
    return Words(
        "weights travel too slowly for the pace of the steps",
        f"a rollout takes {seconds(mean)} to receive a version ({size / 1e6:.3g} MB, so {size / mean / 1e6:.3g} MB/s), "
        f"and a step takes {seconds(step)}: a version is old when it arrives",
        f"{_link(evidence)}at least {size / (SLOW_LINK / 2 * step) / 1e6:.3g} MB/s are needed for half of the allowed "
        "time; weightSync.dtype: bfloat16 halves the bytes, delta: true sends what changed, schedule.syncEvery: "
        f"{math.ceil(mean / (SLOW_LINK / 2 * step))} publishes as seldom as they arrive",
    )


def swap_stall(evidence: Evidence) -> Words | None:
    """Find rollouts that stand still to change weights."""
    lived, swaps = evidence.lived_s("rollout"), evidence.mean("rollout", "swap_seconds")
    if lived <= 0 or swaps is None or len(evidence.timed) < FEWEST_STEPS:
        return None
    mean, count = swaps
    if (share := mean * count / lived) < SWAPS:
        return None
    return Words(
        f"rollouts stand still {percent(share)} of their time to change weights",
        f"{count} changes took {seconds(mean)} each, {seconds(mean * count)} of {seconds(lived)} of all rollouts",
        "schedule.update: staggered, which lets some go on meanwhile, or schedule.syncEvery: 2 with swapAt: sequence",
    )


def slow_rewards(evidence: Evidence) -> Words | None:
    """Find rollouts whose finished responses wait for their rewards."""
    judged, lived, step = evidence.mean("rollout", "reward_seconds"), evidence.lived_s("rollout"), evidence.step_s
    if judged is None or lived <= 0 or step is None or len(evidence.timed) < FEWEST_STEPS:
        return None
    lives = [life for life in evidence.lives.values() if life.role == "rollout" and life.busy_s is not None]
    waited = sum(life.held_s - (life.busy_s or 0.0) for life in lives) - evidence.figure("rollout", "swap_stall_s")
    share, (mean, count) = waited / lived, judged
    if share < REWARDS or mean < REWARD_OF_STEP * step:
        return None
    workers = evidence.spec.reward.workers.max
    more = math.ceil(workers * share / REWARDS_WELL)
    return Words(
        f"rollouts wait {percent(share)} of their time for rewards",
        f"they had work for {seconds(waited)} of {seconds(lived)} in which nothing was generated and no weights were "
        f"changed; one of {count} rewards took {seconds(mean)}, and a step takes {seconds(step)}"
        f"{_by_cause(evidence, 'rollout')}",
        f"reward.workers.max: {more} instead of {workers}, on as many cores (or concurrency, for an async function); "
        "a faster function; a larger staleness, so that others are generated meanwhile",
    )


def tail(evidence: Evidence) -> Words | None:
    """Find rollouts that wait for the last sequences of a step, which others generate."""
    lived, idle = evidence.lived.get("rollout", 0.0), evidence.causes.get("rollout", {}).get("tail", 0.0)
    if lived <= 0 or len(evidence.timed) < FEWEST_STEPS or (share := idle / lived) < TAIL:
        return None
    schedule = evidence.spec.schedule
    change = f"schedule.maxStaleness: {schedule.max_staleness + 1} instead of {schedule.max_staleness}"
    if schedule.swap_at == "quota":
        change += ", or swapAt: sequence, so that the next step's prompts are begun meanwhile"
    return Words(
        f"rollouts wait {percent(share)} of their time for the longest responses of a step",
        f"{seconds(idle)} of {seconds(lived)} passed while others generated the last sequences of a step, and there "
        "was no prompt to begin",
        change,
    )


def data_plane(evidence: Evidence) -> Words | None:
    """Find processes that wait for the queue itself."""
    shares = {
        role: known.get("data plane", 0.0) / evidence.lived[role]
        for role, known in evidence.causes.items()
        if evidence.lived.get(role, 0.0) > 0 and role in ("trainer", "rollout")
    }
    if not shares or len(evidence.timed) < FEWEST_STEPS:
        return None
    role, share = max(shares.items(), key=lambda item: item[1])
    if share < DATA_PLANE:
        return None
    queue = evidence.spec.transfer_queue
    return Words(
        f"the queue holds up the {role}: {percent(share)} of its time",
        f"what it needed was there, and on its way from {queue.storage_units} storage units and {queue.controllers} "
        f"controllers{_by_cause(evidence, role)}",
        f"transferQueue.storageUnits: {2 * queue.storage_units} instead of {queue.storage_units}, more cores for units "
        "and controller, a faster disk for the ledger",
    )


def _balanced(evidence: Evidence, *, waits: float, idle: float) -> int:
    """Return the rollouts with which the trainer would wait as little as the elastic policy aims at."""
    target = evidence.spec.elasticity.target_trainer_wait_share
    return scaling.balanced(evidence.rollouts, wait_share=waits, busy_share=1 - idle, target=target)


def _by_cause(evidence: Evidence, role: str) -> str:
    """Return the causes of a role's idle time, as far as spans tell."""
    lived, causes = evidence.lived.get(role, 0.0), evidence.causes.get(role, {})
    shares = sorted(((spent / lived, cause) for cause, spent in causes.items()), reverse=True) if lived > 0 else []
    named = [f"{cause} {percent(share)}" for share, cause in shares if share >= CAUSE_COUNTS]
    return f" (idle by cause: {', '.join(named)})" if named else ""


def _link(evidence: Evidence) -> str:
    bound = evidence.spec.weight_sync.bandwidth
    return f"weightSync.bandwidth is {bound}: raise it; " if bound is not None else ""
