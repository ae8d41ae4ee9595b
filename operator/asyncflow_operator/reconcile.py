"""One look at one object: observe, decide, carry out.

Invariant: nothing is remembered between two looks but what the server refused, and that while it is still wanted;
whatever was missed, the next look sees everything. What was refused is left alone for its time, everything else is
done. A state that has not changed, and whose time has not come, is not decided again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow_operator.actions import Action, Ask, Delete, Plan
from asyncflow_operator.cluster.apply import Hands
from asyncflow_operator.cluster.events import Recorder
from asyncflow_operator.cluster.owners import Mine
from asyncflow_operator.observe import Key, Observer, Refused
from asyncflow_operator.observed import JobState, Owner, QueueState, Ref, SyncState
from asyncflow_operator.telemetry import Metrics

State = JobState | QueueState | SyncState
Decide = Callable[[Any, float], Plan]
"""Returns the plan for a state at a time (unix seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a look at an object.

    again_in_s: when to look again anyway; failed: whether something could not be done, so that the object is left
    alone for a while; denied: whether something was refused, which alone is left alone; gone: whether there is no such
    object.
    """

    again_in_s: float | None = None
    failed: bool = False
    denied: bool = False
    gone: bool = False


@dataclass(slots=True)
class _Settled:
    """State for which nothing was left to do. due: until when that holds though nothing changes."""

    state: State
    due: float | None


class Reconciler:
    """Looks at objects. decide: by kind."""

    def __init__(
        self,
        *,
        observer: Observer,
        decide: dict[str, Decide],
        hands: Hands,
        recorder: Recorder,
        refused: Refused,
        metrics: Metrics,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._observer = observer
        self._decide = decide
        self._hands = hands
        self._recorder = recorder
        self._refused = refused
        self._metrics = metrics
        self._now = now
        self._settled: dict[Key, _Settled] = {}

    async def look(self, key: Key) -> Outcome:
        """Reconcile one object once."""
        mine = self._observer.mine(key)
        if mine is None:
            self._settled.pop(key, None)
            self._refused.forget(key)
            return Outcome(gone=True)
        state, now = self._observe(mine), self._now()
        settled = self._settled.get(key)
        if settled is not None and settled.state == state and (settled.due is None or now < settled.due):
            return Outcome(again_in_s=None if settled.due is None else settled.due - now)
        plan = self._decided(key, state, now)
        if self._refused.keep(key, _targets(plan.stages)):
            state = self._observe(mine)
            plan = self._decided(key, state, now)
        resting, retry_in_s = self._refused.resting(key, mine.owner.generation)
        stages = [[each for each in stage if _is_due(each, resting)] for stage in plan.stages]
        again_in_s = min(filter(None, (plan.again_in_s, retry_in_s)), default=None)
        if plan.status is None and not any(stages) and not plan.notes:
            due = None if again_in_s is None else now + again_in_s
            self._settled[key] = _Settled(state, due)
            return Outcome(again_in_s=again_in_s)
        self._settled.pop(key, None)
        return await self._carry_out(key, mine.owner, plan, stages, resting)

    def _decided(self, key: Key, state: State, now: float) -> Plan:
        begun = time.thread_time()
        plan = self._decide[key.kind](state, now)
        self._metrics.decide_seconds.labels(key.kind).observe(time.thread_time() - begun)
        return plan

    def _observe(self, mine: Mine) -> State:
        match mine.owner.kind:
            case "RLJob":
                return self._observer.job(mine)
            case "TransferQueue":
                return self._observer.queue(mine)
            case "WeightSync":
                return self._observer.sync(mine)

    async def _carry_out(
        self, key: Key, owner: Owner, plan: Plan, stages: Sequence[Sequence[Action]], resting: frozenset[Ref]
    ) -> Outcome:
        if plan.status is not None:
            failures = await self._hands.write_status(owner, plan.status)
            if failures:
                return Outcome(failed=not failures.gone, gone=failures.gone)
        failures = await self._hands.carry_out(owner, stages, lacking=resting)
        for note in plan.notes:
            await self._recorder.say(owner, note)
        self._refused.note(key, owner.generation, failures.denied, tried=_targets(stages), ends=failures.ends)
        retry_in_s = self._refused.resting(key, owner.generation)[1]
        again_in_s = min(filter(None, (plan.again_in_s, retry_in_s)), default=None)
        return Outcome(again_in_s=again_in_s, failed=bool(failures.errors), denied=bool(failures.denied))


def _is_due(action: Action, resting: frozenset[Ref]) -> bool:
    """Return whether an action is not left alone: what is to go goes, though a change to it was refused."""
    return isinstance(action, Ask | Delete) or action.ref not in resting


def _targets(stages: Sequence[Sequence[Action]]) -> set[Ref]:
    return {action.ref for stage in stages for action in stage if not isinstance(action, Ask)}
