"""Data flow between the roles of a job, and the version under which D_k is made, in words.

Invariant: only what the schedule fixes is said; the policies that do it are ``asyncflow.flow``.
"""

from __future__ import annotations

from asyncflow.api.job import RLJobSpec
from asyncflow.api.schedule import ScheduleSpec
from asyncflow.plan.roles import Edge

_SWAPS = {
    "quota": "when its share of the step is done",
    "sequence": "between sequences",
    "token": "between tokens",
}


def edges(spec: RLJobSpec) -> tuple[Edge, ...]:
    """Return the data flow in the order in which a sample meets it."""
    schedule = spec.schedule
    judged = f"responses, log-probs, versions, reward ({spec.reward.function})"
    return (
        Edge(source="driver", target="storage", what="prompts", when=f"{spec.algorithm.prompts_per_step} a step"),
        Edge(source="storage", target="rollout", what="prompts, leased", when=generated_by(schedule)),
        Edge(source="rollout", target="storage", what=judged, when="as each sample is finished"),
        Edge(source="driver", target="storage", what="advantages", when="as each group is finished"),
        Edge(source="storage", target="trainer", what="groups, in equal slots for all ranks", when=_trained(schedule)),
        Edge(source="trainer", target="rollout", what="weights, pulled", when=_swapped(schedule)),
    )


def generated_by(schedule: ScheduleSpec) -> str:
    """Return in words which version generates D_k."""
    if schedule.update == "sync" and schedule.swap_at == "quota":
        return "D_k by θ_{k-1}"
    if schedule.swap_at == "quota":
        return "D_1, D_2 by θ_0, D_k by θ_{k-2}"
    return f"D_k by θ_{{k-{1 + schedule.max_staleness}}} or newer"


def _trained(schedule: ScheduleSpec) -> str:
    return "when D_k is complete" if schedule.whole_steps else "as groups are finished"


def _swapped(schedule: ScheduleSpec) -> str:
    often = "every step" if schedule.sync_every == 1 else f"every {schedule.sync_every} steps"
    return f"{often}; a rollout swaps {_SWAPS[schedule.swap_at]}"
