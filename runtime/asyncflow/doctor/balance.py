"""Findings about bottlenecks: whether trainer or rollouts wait, and for which reason.

The balanced number of rollouts is computed by ``flow.scaling``, as in the elastic policy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from asyncflow.api.schedule import ScheduleSpec
from asyncflow.doctor.evidence import Evidence
from asyncflow.doctor.finding import Words, percent, seconds
from asyncflow.flow import scaling

STARVED = 0.6
"""Share of its time that one side waits above which the other side is the bottleneck: more than one and a half times as
many rollouts, or fewer than half of them, would balance. The quickstart's trainer waits for 0.3 to 0.5 of its time."""
BOTH = 0.4
"""Idle share of both sides above which they work in turns, and neither is the bottleneck."""
AT_LIMIT = 0.8
"""Share of the steps that have samples of the maximum staleness."""
EVALUATES, EVALUATES_WELL = 0.5, 0.1
"""Share of the generated tokens that belong to evaluations; the second is the recommended share. The quickstart has
0.35."""
CHECKPOINTS, CHECKPOINTS_WELL = 0.1, 0.05
PUBLISHES = 0.1
"""Shares of its time for which the trainer waits for checkpoints, and for publications."""
SWAPS = 0.1
"""Share of their time for which rollouts pause to change weights."""
SLOW_LINK = 0.8
"""Seconds of the transfer of a version as a share of the time between two publications: above it the next version
exists before the transfer ends."""
REWARDS, REWARDS_WELL, REWARD_OF_STEP = 0.2, 0.05, 0.05
"""Share of their time for which rollouts wait for rewards, the recommended share, and the minimum mean duration of a
reward, in steps, that can be the cause."""
TAIL = 0.25
"""Share of their time for which rollouts wait for the last sequences of a step."""
DATA_PLANE = 0.2
FEWEST_STEPS = 4
CAUSE_COUNTS = 0.05


def trainer_starved(evidence: Evidence) -> Words | None:
    """Find a trainer that waits for samples while the rollouts have work."""
    waits, idle = evidence.trainer_share("wait_s"), evidence.idle_shares.get("rollout")
    if len(evidence.timed) < FEWEST_STEPS or waits is None or idle is None or waits < STARVED or idle >= BOTH:
        return None
    rollouts, target = evidence.rollouts, evidence.spec.elasticity.target_trainer_wait_share
    balanced = _balanced(evidence, waits=waits, idle=idle)
    if balanced > evidence.spec.rollout.max_replicas:
        how = f", with rollout.maxReplicas: {balanced}"
    else:
        how = f" (asyncflow scale DIR rollout={balanced})" if evidence.status is not None else ""
    return Words(
        "the rollouts are the bottleneck: the trainer is starved",
        f"the trainer waits for samples {percent(waits)} of its time, the rollouts ({rollouts}) are busy "
        f"{percent(1 - idle)} of their time{_by_cause(evidence, 'trainer')}: training could process "
        f"1 / (1 - {waits:.2f}) = {1 / (1 - min(waits, 0.999)):.1f} times as many tokens",
        f"rollout.replicas: {balanced} instead of {rollouts} leaves it waiting {percent(target)}{how}; or move devices "
        "from the trainer to rollouts",
    )


def rollouts_starved(evidence: Evidence) -> Words | None:
    """Find rollouts that are idle because the trainer is slower."""
    waits, idle = evidence.trainer_share("wait_s"), evidence.idle_shares.get("rollout")
    if len(evidence.timed) < FEWEST_STEPS or waits is None or idle is None or idle < STARVED or waits >= BOTH:
        return None
    rollouts = evidence.rollouts
    balanced = _balanced(evidence, waits=waits, idle=idle)
    faster = 1 / max(1 - idle, 0.01)
    fewer = f"rollout.replicas: {balanced} instead of {rollouts}" if balanced < rollouts else "a smaller device share"
    return Words(
        "the trainer is the bottleneck: the rollouts are starved",
        f"the rollouts ({rollouts}) are idle {percent(idle)} of their time, the trainer is busy {percent(1 - waits)} "
        f"of its time{_by_cause(evidence, 'rollout')}: (1 - {idle:.2f}) x {rollouts} = {(1 - idle) * rollouts:.2f} "
        "rollouts would be busy all the time",
        f"{fewer}, or {faster:.1f} times as fast a trainer (trainer.replicas: "
        f"{math.ceil(evidence.spec.trainer.replicas * faster)})",
    )


def taking_turns(evidence: Evidence) -> Words | None:
    """Find a trainer and rollouts that wait for each other."""
    waits, idle = evidence.trainer_share("wait_s"), evidence.idle_shares.get("rollout")
    if len(evidence.timed) < FEWEST_STEPS or waits is None or idle is None or min(waits, idle) < BOTH:
        return None
    schedule, training, generating = evidence.spec.schedule, 1 - waits, 1 - idle
    gain = (
        f"overlapped, a step could take {percent(max(training, generating))} of its time "
        f"({percent(training)} training, {percent(generating)} generating)"
    )
    why = (
        f"the trainer waits {percent(waits)} of its time and the rollouts {percent(idle)} of their time"
        f"{_by_cause(evidence, 'rollout')}"
    )
    if schedule.mode == "sync":
        what = "trainer and rollouts take turns: the schedule is synchronous"
        return Words(what, f"{why}: {gain}", _staler(schedule))
    limit = schedule.lag
    stale = evidence.values("staleness_start_max")
    at = sum(value >= limit for value in stale) / len(stale)
    if at < AT_LIMIT:
        return None
    return Words(
        "rollouts wait at the limit of staleness, and the trainer is starved",
        f"{why}; {percent(at)} of the steps have samples of the maximum staleness ({limit}): {gain}",
        _staler(schedule),
    )


def evaluation_share(evidence: Evidence) -> Words | None:
    """Find evaluations that generate a large part of the tokens."""
    whole = sum(life.tokens for life in evidence.lives.values() if life.role == "rollout")
    spent, evaluation = evidence.figure("rollout", "tokens_generated_eval"), evidence.spec.evaluation
    if evaluation is None or evaluation.every == 0 or not whole or len(evidence.steps) <= evaluation.every:
        return None
    if (share := spent / whole) < EVALUATES:
        return None
    ratio = share / (1 - min(share, 0.99))
    every = math.ceil(evaluation.every * ratio * (1 - EVALUATES_WELL) / EVALUATES_WELL)
    return Words(
        f"evaluations take {percent(share)} of the generated tokens",
        f"{spent:.0f} of {whole:.0f} tokens are for held-out prompts, every {evaluation.every} steps: {ratio:.2g} "
        "tokens of evaluation for each token of training",
        f"evaluation.every: {every} instead of {evaluation.every} makes that {percent(EVALUATES_WELL)}; or use fewer "
        f"held-out prompts, or fewer samples than {evaluation.samples}",
    )


def checkpoint_stall(evidence: Evidence) -> Words | None:
    """Find a trainer that waits for its checkpoints."""
    share, every = evidence.trainer_share("checkpoint_s"), evidence.spec.storage.checkpoints.every
    if share is None or len(evidence.timed) < FEWEST_STEPS or share < CHECKPOINTS:
        return None
    wait = sum(float(step.get("checkpoint_s") or 0.0) for step in evidence.timed)
    return Words(
        f"the trainer waits {percent(share)} of its time for checkpoints",
        f"{seconds(wait)} of {seconds(evidence.timed_s)}, with a checkpoint every {every} steps: a checkpoint is not "
        "written yet when the next one is due, or copying it takes long",
        f"storage.checkpoints.every: {math.ceil(every * share / CHECKPOINTS_WELL)} instead of {every} makes that "
        f"{percent(CHECKPOINTS_WELL)}; or use a faster disk",
    )


def publication_stall(evidence: Evidence) -> Words | None:
    """Find a trainer that waits for its publications."""
    share = evidence.trainer_share("publish_s")
    if share is None or len(evidence.timed) < FEWEST_STEPS or share < PUBLISHES:
        return None
    durations = evidence.values("publication_s", 100)
    mean = f"; one takes {seconds(statistics.fmean(durations))}" if durations else ""
    every = evidence.spec.schedule.sync_every
    return Words(
        f"the trainer waits {percent(share)} of its time for publications",
        f"a step takes {seconds(evidence.step_s or 0.0)}{mean}: a version is not yet copied when the next one is ready",
        f"{_narrower(evidence, ' (half the bytes), or ')}{_publishing_every(2 * every, evidence.spec.schedule)}",
    )


def slow_link(evidence: Evidence) -> Words | None:
    """Find versions whose transfer takes longer than the next one takes to follow."""
    pulls, step = evidence.mean("rollout", "pull_seconds"), evidence.step_s
    every = evidence.spec.schedule.sync_every
    if pulls is None or step is None or pulls[1] < FEWEST_STEPS or pulls[0] < SLOW_LINK * every * step:
        return None
    mean, count = pulls
    delta = "" if evidence.spec.weight_sync.delta else "delta: true sends only changes, "
    fewer = _publishing_every(math.ceil(mean / (SLOW_LINK / 2 * step)), evidence.spec.schedule)
    size = evidence.figure("rollout", "pulled_bytes_total") / count
    return Words(
        "weights are transferred too slowly for the pace of the steps",
        f"a rollout takes {seconds(mean)} to receive a version ({size / 1e6:.3g} MB, so {size / mean / 1e6:.3g} MB/s), "
        f"and a version follows after {seconds(every * step)}: a version is outdated when it arrives",
        f"{_link(evidence)}at least {size / (SLOW_LINK / 2 * every * step) / 1e6:.3g} MB/s are needed for half of the "
        f"allowed time; {_narrower(evidence, ' halves the bytes, ')}{delta}{fewer} publishes no more often than "
        "versions arrive",
    )


def swap_stall(evidence: Evidence) -> Words | None:
    """Find rollouts that pause to change weights."""
    lived, swaps = evidence.lived_s("rollout"), evidence.mean("rollout", "swap_seconds")
    if lived <= 0 or swaps is None or len(evidence.timed) < FEWEST_STEPS:
        return None
    mean, count = swaps
    if (share := mean * count / lived) < SWAPS:
        return None
    schedule = evidence.spec.schedule
    staggered = f"{_staggered(schedule)}, so that some rollouts continue meanwhile, or "
    return Words(
        f"rollouts pause {percent(share)} of their time to change weights",
        f"{count} changes took {seconds(mean)} each, {seconds(mean * count)} of {seconds(lived)} of all rollouts",
        ("" if schedule.update == "staggered" else staggered) + _publishing_every(2 * schedule.sync_every, schedule),
    )


def slow_rewards(evidence: Evidence) -> Words | None:
    """Find rollouts that wait for the rewards of finished responses."""
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
        f"they held work but neither generated nor changed weights for {seconds(waited)} of {seconds(lived)}; "
        f"{count} rewards took {seconds(mean)} on average, and a step takes {seconds(step)}"
        f"{_by_cause(evidence, 'rollout')}",
        f"reward.workers.max: {more} instead of {workers}, on as many cores (or concurrency, for an async function); "
        "a faster function; a larger staleness, so that other samples are generated meanwhile",
    )


def tail(evidence: Evidence) -> Words | None:
    """Find rollouts that wait for the last sequences of a step, which other rollouts generate."""
    lived, idle = evidence.lived.get("rollout", 0.0), evidence.causes.get("rollout", {}).get("tail", 0.0)
    if lived <= 0 or len(evidence.timed) < FEWEST_STEPS or (share := idle / lived) < TAIL:
        return None
    return Words(
        f"rollouts wait {percent(share)} of their time for the longest responses of a step",
        f"{seconds(idle)} of {seconds(lived)} passed while other rollouts generated the last sequences of a step, and "
        "no prompt was left to start",
        f"{_staler(evidence.spec.schedule)}, so that prompts of the next step start meanwhile",
    )


def data_plane(evidence: Evidence) -> Words | None:
    """Find processes that wait for the queue itself."""
    shares = {
        role: by_cause.get("data plane", 0.0) / evidence.lived[role]
        for role, by_cause in evidence.causes.items()
        if evidence.lived.get(role, 0.0) > 0 and role in ("trainer", "rollout")
    }
    if not shares or len(evidence.timed) < FEWEST_STEPS:
        return None
    role, share = max(shares.items(), key=lambda item: item[1])
    if share < DATA_PLANE:
        return None
    queue = evidence.spec.transfer_queue
    return Words(
        f"the queue delays the {role}: {percent(share)} of its time",
        f"the required data existed, but had to be transferred from {queue.storage_units} storage units and "
        f"{queue.controllers} controllers{_by_cause(evidence, role)}",
        f"transferQueue.storageUnits: {2 * queue.storage_units} instead of {queue.storage_units}, more cores for units "
        "and controller, a faster disk for the ledger",
    )


def _balanced(evidence: Evidence, *, waits: float, idle: float) -> int:
    """Return the number of rollouts with which the trainer would wait for the target share of the elastic policy."""
    target = evidence.spec.elasticity.target_trainer_wait_share
    return scaling.balanced(evidence.rollouts, wait_share=waits, busy_share=1 - idle, target=target)


def _by_cause(evidence: Evidence, role: str) -> str:
    """Return the causes of a role's idle time as text, as far as spans are recorded."""
    lived, causes = evidence.lived.get(role, 0.0), evidence.causes.get(role, {})
    shares = sorted(((spent / lived, cause) for cause, spent in causes.items()), reverse=True) if lived > 0 else []
    named = [f"{cause} {percent(share)}" for share, cause in shares if share >= CAUSE_COUNTS]
    return f" (idle by cause: {', '.join(named)})" if named else ""


def _staler(schedule: ScheduleSpec) -> str:
    """Return the change that lets samples be one step staler than now."""
    if schedule.mode != "async":
        return "schedule.mode: async (with update: delayed, maxStaleness: 1)"
    more = schedule.lag + 1
    changes = [f"maxStaleness: {max(more, schedule.max_staleness)}"]
    changes += _between_sequences(schedule, staleness=0)
    if (needed := math.ceil(100 * ((more + 1) / schedule.sync_every - 1)) / 100) > schedule.staleness_threshold:
        changes.append(f"stalenessThreshold: {needed:g}")
    return f"schedule.{changes[0]}{_with(changes[1:])}"


def _publishing_every(steps: int, schedule: ScheduleSpec) -> str:
    """Return the change with which a version is published every ``steps`` steps."""
    update = [] if schedule.mode == "async" else ["update: delayed"]
    return f"schedule.syncEvery: {steps}{_with([*update, *_between_sequences(schedule, staleness=steps)])}"


def _staggered(schedule: ScheduleSpec) -> str:
    """Return the change with which rollouts swap in turn."""
    return f"schedule.update: staggered{_with(_between_sequences(schedule, staleness=schedule.sync_every))}"


def _between_sequences(schedule: ScheduleSpec, *, staleness: int) -> list[str]:
    """Return the changes with which instances may swap between sequences, and samples may be so stale."""
    found = [] if schedule.mode == "async" else ["mode: async"]
    if schedule.swap_at == "quota":
        found += ["swapAt: sequence", *(["deterministic: false"] if schedule.deterministic else [])]
    return [*found, f"maxStaleness: {staleness}"] if staleness > schedule.max_staleness else found


def _with(changes: Sequence[str]) -> str:
    return f" (with {', '.join(changes)})" if changes else ""


def _narrower(evidence: Evidence, word: str) -> str:
    """Return the advice to publish narrower weights, before ``word``; "" if they cannot be narrower."""
    if evidence.spec.published_dtype == "bfloat16" or evidence.spec.trainer.lora is not None:
        return ""
    return f"weightSync.dtype: bfloat16{word}"


def _link(evidence: Evidence) -> str:
    bound = evidence.spec.weight_sync.bandwidth
    return f"weightSync.bandwidth is {bound}: raise it; " if bound is not None else ""
