"""Reconciliation of one object: observe, decide, carry out.

Invariants: between two reconciliations only the server's refusals are remembered, as long as the refused object is
wanted; each reconciliation observes the complete state, so a missed change is found by the next one. A refused object
is not retried before its pause is over; all other actions are carried out. An unchanged state is not decided again
before it is due. The cached desired objects equal the objects that would be built now: they depend on the parsed job
(the same object as long as spec and labels stay unchanged), the pinned images and the objects found that the job refers
to, and are built again when one of these changes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncflow.api.job import RLJob
from asyncflow.errors import AsyncFlowError
from asyncflow_operator.actions import Action, Delete, DriverOrder, Note, Plan
from asyncflow_operator.cluster.apply import Failures, PlanExecutor
from asyncflow_operator.cluster.client import Refusal
from asyncflow_operator.cluster.events import Recorder
from asyncflow_operator.cluster.owners import CustomResource
from asyncflow_operator.decide.pending import why_denied
from asyncflow_operator.decisions import DecisionLog
from asyncflow_operator.desired import Desired
from asyncflow_operator.encoding import State
from asyncflow_operator.observe import Observer, RefusalRecord
from asyncflow_operator.observed import Denial, JobState, Manifest, Owner, Ref, ReferredObject
from asyncflow_operator.references import Key
from asyncflow_operator.telemetry import Metrics

MOST: Final = 1024
"""Number of jobs whose objects are cached, least recently reconciled evicted first; about 12 KiB each."""

Manifests = tuple[Manifest, ...]
Decide = Callable[[Any, float], Plan]
"""Returns the plan for a state at a time (unix seconds)."""


@dataclass(frozen=True, slots=True)
class _Built:
    job: RLJob | None
    images: dict[str, str]
    found: Mapping[Ref, ReferredObject]
    manifests: Manifests


class CachedDesired:
    """Cache of the objects that ``desired`` builds."""

    def __init__(self, desired: Desired) -> None:
        self._desired = desired
        self._known: OrderedDict[tuple[str, str], _Built] = OrderedDict()
        self.pod = desired.pod
        self.images = desired.images
        self.queue_supporting = desired.queue_supporting
        self.queue_pod = desired.queue_pod
        self.secret = desired.secret
        self.secrets = desired.secrets

    def supporting(self, state: JobState) -> Manifests:
        """Return all objects of the job except its pods, custom resources and Secrets."""
        return self._built("supporting", state, self._desired.supporting)

    def children(self, state: JobState) -> Manifests:
        """Return the job's own TransferQueue and WeightSync."""
        return self._built("children", state, self._desired.children)

    def _built(self, part: str, state: JobState, build: Callable[[JobState], Manifests]) -> Manifests:
        key, images, found = (state.owner.uid, part), state.status.images, state.found
        known = self._known.get(key)
        if known is None or known.job is not state.job or (known.images, known.found) != (images, found):
            known = self._known[key] = _Built(state.job, images, found, build(state))
            if len(self._known) > 2 * MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known.manifests


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileOutcome:
    """Outcome of a reconciliation.

    again_in_s: when to reconcile again even without a change.
    failed: whether an action failed, so that the whole object is retried after a backoff.
    denied: whether an action was refused, so that only the refused object is retried after a backoff.
    gone: whether no object of that name exists, not even one created again in the meantime.
    """

    again_in_s: float | None = None
    failed: bool = False
    denied: bool = False
    gone: bool = False


@dataclass(slots=True)
class _Settled:
    """State that needed no action. due: until when that holds without a change, None for no limit."""

    state: State
    due: float | None


class Reconciler:
    """Reconciler of custom resources. decide: the decision functions, by kind; log: the decision log, None for none."""

    def __init__(
        self,
        *,
        observer: Observer,
        decide: dict[str, Decide],
        executor: PlanExecutor,
        recorder: Recorder,
        refused: RefusalRecord,
        metrics: Metrics,
        log: DecisionLog | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._observer = observer
        self._decide = decide
        self._executor = executor
        self._recorder = recorder
        self._refused = refused
        self._metrics = metrics
        self._log = log
        self._now = now
        self._settled: dict[Key, _Settled] = {}

    async def reconcile(self, key: Key) -> ReconcileOutcome:
        """Reconcile one object once."""
        resource = self._observer.resource(key)
        if resource is None:
            self._settled.pop(key, None)
            self._refused.forget(key)
            return ReconcileOutcome(gone=True)
        state, now = self._observe(resource), self._now()
        settled = self._settled.get(key)
        if settled is not None and settled.state == state and (settled.due is None or now < settled.due):
            return ReconcileOutcome(again_in_s=None if settled.due is None else settled.due - now)
        plan = self._decided(key, state, now)
        if self._refused.keep(key, _targets(plan.stages)):
            state = self._observe(resource)
            plan = self._decided(key, state, now)
        paused, retry_in_s = self._refused.paused(key, resource.owner.generation)
        stages = [[each for each in stage if _is_due(each, paused)] for stage in plan.stages]
        again_in_s = min(filter(None, (plan.again_in_s, retry_in_s)), default=None)
        if plan.status is None and not any(stages) and not plan.notes:
            due = None if again_in_s is None else now + again_in_s
            self._settled[key] = _Settled(state, due)
            return ReconcileOutcome(again_in_s=again_in_s)
        self._settled.pop(key, None)
        outcome, failures = await self._carry_out(key, resource.owner, plan, stages, paused)
        if self._log is not None:
            errors = [str(error) for error in failures.errors]
            self._log.record(key, state, plan, now=now, left=paused, denied=failures.denied, errors=errors)
        return outcome

    def _decided(self, key: Key, state: State, now: float) -> Plan:
        started = time.thread_time()
        plan = self._decide[key.kind](state, now)
        self._metrics.decide_seconds.labels(key.kind).observe(time.thread_time() - started)
        return plan

    def _observe(self, resource: CustomResource) -> State:
        match resource.owner.kind:
            case "RLJob":
                return self._observer.job(resource)
            case "TransferQueue":
                return self._observer.queue(resource)
            case "WeightSync":
                return self._observer.sync(resource)

    async def _record(self, owner: Owner, plan: Plan, stages: Sequence[Sequence[Action]], failures: Failures) -> None:
        """Record the written objects in the status, unless an action failed other than by a refusal."""
        written = () if failures.errors else _targets(stages) - {denial.ref for denial in failures.denied}
        status = plan.recorded(written)
        if status is not None:
            failures.errors += (await self._executor.write_status(owner, status)).errors

    async def _carry_out(
        self, key: Key, owner: Owner, plan: Plan, stages: Sequence[Sequence[Action]], paused: frozenset[Ref]
    ) -> tuple[ReconcileOutcome, Failures]:
        if plan.status is not None:
            failures = await self._executor.write_status(owner, plan.status)
            if failures:
                current = self._observer.resource(key)
                failed = current is not None and current.owner.uid == owner.uid
                for refused in failures.errors if failed else ():
                    await self._tell_refused_status(owner, refused)
                return ReconcileOutcome(failed=failed, gone=current is None), failures
        failures = await self._executor.carry_out(owner, stages, lacking=paused)
        await self._record(owner, plan, stages, failures)
        for note in plan.notes:
            await self._recorder.record(owner, note)
        self._refused.note(key, owner.generation, failures.denied, tried=_targets(stages), ends=failures.ends)
        retry_in_s = self._refused.paused(key, owner.generation)[1]
        again_in_s = min(filter(None, (plan.again_in_s, retry_in_s)), default=None)
        outcome = ReconcileOutcome(again_in_s=again_in_s, failed=bool(failures.errors), denied=bool(failures.denied))
        return outcome, failures

    async def _tell_refused_status(self, owner: Owner, error: AsyncFlowError) -> None:
        """Record an event about a refused status, which cannot tell it itself, unless another client was faster."""
        if isinstance(error, Refusal) and not (error.conflict or error.absent):
            what = f"its status is not written: {error.what}"
            denial = Denial(Ref(owner.kind, owner.name), what, missing=False, failed=error.failed)
            obstacle = why_denied([denial])
            await self._recorder.record(owner, Note(type="Warning", reason=obstacle.reason, message=obstacle.message))


def _is_due(action: Action, paused: frozenset[Ref]) -> bool:
    """Return whether an action is due: a deletion always is, even if a change of the object was refused."""
    return isinstance(action, DriverOrder | Delete) or action.ref not in paused


def _targets(stages: Sequence[Sequence[Action]]) -> set[Ref]:
    return {action.ref for stage in stages for action in stage if not isinstance(action, DriverOrder)}
