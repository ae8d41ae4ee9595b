"""The operator in a cluster in memory: ``decide`` and ``Desired`` are real, observing and carrying out are modelled.

Plans are carried out action by action, in any order within a stage, and the operator may be killed after any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from model_api import CustomResource, Refusal
from model_cluster import Cluster
from model_samples import DESIRED, JOB, QUEUE, SYNC

from asyncflow_operator.actions import Action, Apply, Delete, DriverOrder, Plan
from asyncflow_operator.decide import decide_job, decide_queue, decide_sync
from asyncflow_operator.observed import Denial, DriverProbe, JobState, Ref, SyncState, TransferQueueState
from asyncflow_operator.reconcile import CachedDesired


class Killed(Exception):
    """The operator is killed between two writes."""


@dataclass
class World(Cluster):
    """A cluster with an operator. deaths: after so many writes, counted over the whole life, the operator dies;
    denied: the refusals of the API server that it remembers, and ``desired`` what it has built; notes: the events that
    it wrote.
    """

    deaths: frozenset[int] = frozenset()
    denied: dict[Ref, tuple[Denial, ...]] = field(default_factory=dict)
    desired: CachedDesired = field(default_factory=lambda: CachedDesired(DESIRED))
    notes: list[str] = field(default_factory=list)

    # What the operator sees.

    def see_spec(self) -> None:
        """Bring the operator's view of the custom resources up to date."""
        self.seen_resources = dict(self.resources)

    def see_all(self) -> None:
        """List everything again."""
        self.see_spec()
        self.seen_pods = dict(self.pods)
        self.seen_objects = {ref: view for ref, view in self.objects.items() if ref.kind != "Secret"}

    def late(self) -> list[str]:
        """Return the pods of which the operator does not know the newest."""
        names = {*self.pods, *self.seen_pods}
        return sorted(name for name in names if self.pods.get(name) != self.seen_pods.get(name))

    def restart_operator(self) -> None:
        """A new process: nothing is remembered, everything is listed."""
        self.see_all()
        self.probe = DriverProbe()
        self.denied.clear()
        self.desired = CachedDesired(DESIRED)

    def observe(self, ref: Ref) -> JobState | TransferQueueState | SyncState:
        """Return the state that ``decide`` is given."""
        known = self.seen_resources[ref]
        if ref == JOB:
            return self._job_state(known)
        job = self._job_state(self.seen_resources[JOB])
        if ref == SYNC:
            return SyncState(owner=known.owner, sync=known.model, status=known.status, job=job)
        return TransferQueueState(
            owner=known.owner,
            queue=known.model,
            status=known.status,
            job=job,
            pods=tuple(pod for pod in job.pods if pod.role in ("controller", "storage")),
            denied=self.denied.get(QUEUE, ()),
        )

    def _job_state(self, known: CustomResource) -> JobState:
        queue = self.seen_resources.get(QUEUE)
        return JobState(
            owner=known.owner,
            job=known.model,
            problem=known.problem,
            problem_reason=known.problem_reason,
            status=known.status,
            queue=queue.status if queue is not None else None,
            pods=tuple(sorted(self.seen_pods.values(), key=lambda pod: pod.name)),
            objects=dict(self.seen_objects),
            probe=self.probe,
            denied=self.denied.get(JOB, ()) + self.denied.get(QUEUE, ()),
            nodes=self.nodes,
        )

    def decide(self, ref: Ref) -> Plan:
        """Decide about one object as the operator sees it now."""
        state = self.observe(ref)
        if isinstance(state, JobState):
            return decide_job(state, now=self.now, desired=self.desired)
        if isinstance(state, TransferQueueState):
            return decide_queue(state, now=self.now, desired=self.desired)
        return decide_sync(state, now=self.now, desired=DESIRED)

    def reconcile(self, ref: Ref, *, killed_after: int | None = None) -> Plan:
        """Decide and carry out. killed_after: writes after which the operator dies."""
        if ref not in self.seen_resources:
            return Plan()
        plan = self.decide(ref)
        try:
            self._carry_out(ref, plan, killed_after)
        except Killed:
            self.restart_operator()
        return plan

    def _carry_out(self, ref: Ref, plan: Plan, killed_after: int | None) -> None:
        left = iter(range(killed_after if killed_after is not None else 1_000_000))

        def done() -> None:
            if next(left, None) is None or self.writes in self.deaths:
                self.deaths -= {self.writes}
                raise Killed

        if plan.status is not None:
            done()
            self.write_status(ref, plan.status)
        denied: list[Denial] = []
        written: set[Ref] = set()
        for stage in plan.stages:
            absent = {denial.ref for denial in denied}
            for action in self.order.sample(stage, len(stage)):
                if isinstance(action, Apply) and action.needs & absent:
                    continue
                done()
                refused = self._do(action)
                denied.extend(refused)
                if isinstance(action, Apply) and not refused:
                    written.add(action.ref)
        if (status := plan.recorded(written)) is not None:
            done()
            self.write_status(ref, status)
        self.denied[ref] = tuple(denied)
        self.notes.extend(note.reason for note in plan.notes)

    def _do(self, action: Action) -> list[Denial]:
        match action:
            case Apply(manifest=manifest):
                there = action.ref in self.objects
                self.check_certificate(manifest)
                try:
                    self.apply(manifest)
                except Refusal as refused:
                    return [Denial(action.ref, str(refused), missing=not there)]
            case Delete(ref=ref, uid=uid, grace_s=grace_s):
                self.delete(ref, uid, grace_s)
            case DriverOrder(path=path):
                self.ask(path)
        return []

    # Time.

    def settle(self, *, rounds: int = 400, healthy: Callable[[], bool] = lambda: True) -> None:
        """Make rounds without trouble until nothing is left to do."""
        quiet = 0
        for _ in range(rounds):
            before = self.writes
            moved, waits = self.one_round()
            quiet = 0 if moved or self.writes != before else quiet + 1
            if JOB not in self.resources or (quiet > 3 and healthy()):
                return
            self.now += 1.0 if quiet <= 1 else min(30.0, *waits, 30.0)
        plans = {ref.kind: self.decide(ref) for ref in self.seen_resources}
        raise AssertionError(f"it never comes to rest: {self.status.phase}, {sorted(self.pods)}, {plans}")

    def run_rounds(self, rounds: int) -> None:
        """Make so many rounds without trouble, a second each."""
        for _ in range(rounds):
            self.one_round()
            self.now += 1.0

    def one_round(self) -> tuple[bool, list[float]]:
        """Make one step of everything, and return whether a pod moved, and when the operator reconciles again."""
        self.look_at_driver()
        self.see_all()
        plans = [self.reconcile(ref) for ref in (JOB, QUEUE, SYNC)]
        moved = self.kubelets_work()
        self.driver_works()
        return moved, [plan.again_in_s for plan in plans if plan.again_in_s is not None]
