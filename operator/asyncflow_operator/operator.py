"""The operator process: connects all parts and runs them, from the first list to the last write.

Invariants: the operator writes nothing before it has listed all objects and leads, and nothing after it has lost the
lead. When it is asked to stop, it starts no new reconciliation and waits up to ``FINISH_S`` seconds for the running
ones. It releases the lead however it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from asyncflow.plan.certificates import period_of
from asyncflow_operator.cluster.apply import PlanExecutor
from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.events import Recorder
from asyncflow_operator.cluster.kinds import CUSTOM_KINDS, POD
from asyncflow_operator.cluster.store import Entry, ObjectGroup
from asyncflow_operator.decide.job import decide_job
from asyncflow_operator.decide.queue import decide_queue
from asyncflow_operator.decide.weights import decide_sync
from asyncflow_operator.decisions import DecisionLog
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.drivers import LEADERS, Drivers, RunningDriver
from asyncflow_operator.leader import Leader
from asyncflow_operator.lookups import Capacity, Lookups
from asyncflow_operator.observe import Observer, RefusalRecord
from asyncflow_operator.observed import Owner, PodView
from asyncflow_operator.reconcile import CachedDesired, ReconcileOutcome, Reconciler
from asyncflow_operator.references import Key
from asyncflow_operator.review import settings_of
from asyncflow_operator.rights import until_namespaces_change
from asyncflow_operator.settings import Settings
from asyncflow_operator.telemetry import HealthChecks, Http, Metrics, update_gauges
from asyncflow_operator.watch import ClusterWatch, run_kopf, until_a_watch_ends
from asyncflow_operator.worklist import Worklist

FINISH_S: Final = 20.0
_END_S: Final = 5.0
_CUSTOM: Final = frozenset(kind.name for kind in CUSTOM_KINDS)

_log = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """Leadership was lost: another operator may lead now, and this process must end immediately."""


class NamespacesChanged(Exception):
    """The set of namespaces in which the operator has rights has changed: a new process must watch the new set."""


class Operator:
    """Operator process.

    namespaces: the namespaces of the settings that it serves, see ``rights``.
    leases: a client with connections for the Lease only, so that no other write delays its renewal.
    """

    def __init__(
        self,
        settings: Settings,
        api: Api,
        *,
        namespaces: tuple[str, ...],
        leases: Api,
        master: bytes,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._namespaces = namespaces
        self._api = api
        self._metrics = metrics
        self._stop = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(settings.workers)
        self._worklist: Worklist[Key] = Worklist(waited=metrics.wait_seconds.observe)
        self._failing_since: dict[Key, float] = {}
        self._leader = Leader(leases, namespace=settings.namespace, name=settings.lease, identity=settings.identity)
        self._prepared = False
        api.may_write = self._leads
        self._watch = ClusterWatch(
            api,
            namespaces=namespaces,
            mark=self._worklist.mark,
            renew=self._worklist.renew,
            resync_s=settings.resync_seconds,
        )
        shaping = DesiredSettings(
            registry=Registry(prefix=settings.images, tag=settings.tag),
            master=master,
            namespace=settings.namespace,
            watchers=(settings.namespace, *settings.watchers),
        )
        desired = Desired(shaping)
        cached = CachedDesired(desired)
        log = None
        if settings.decisions is not None:
            limit = settings.decision_bytes
            log = DecisionLog(settings.decisions, limit=limit, key=master, settings=settings_of(shaping))
        self._drivers = Drivers(
            url=settings.probe_url,
            every_s=settings.probe_seconds,
            control_url=settings.control_url,
            certificate=lambda owner: desired.secrets(owner).operator(period_of(time.time())),
            running=self._running_drivers,
            changed=self._mark_job,
            probed=metrics.probed,
            ordered=lambda outcome: metrics.acted("ask", outcome),
        )
        self._capacity = Capacity(api, wanted=lambda: any(self._waiting()), changed=self._mark_waiting)
        self._lookups = Lookups(api, changed=self._mark_job, keep_s=2 * settings.resync_seconds)
        self._refused = RefusalRecord()
        self._reconciler = Reconciler(
            observer=Observer(
                self._watch.store,
                probe=self._drivers.probe,
                nodes=lambda: self._capacity.nodes,
                refused=self._refused,
                find=lambda ref, key: self._lookups.find(ref, by=key),
                references=self._watch.references,
            ),
            decide={
                "RLJob": lambda state, now: decide_job(state, now=now, desired=cached),
                "TransferQueue": lambda state, now: decide_queue(state, now=now, desired=cached),
                "WeightSync": lambda state, now: decide_sync(state, now=now, desired=desired),
            },
            executor=PlanExecutor(api, self._watch.store, self._drivers, acted=metrics.acted),
            recorder=Recorder(api, reporter=settings.identity),
            refused=self._refused,
            metrics=metrics,
            log=log,
        )
        self._health = HealthChecks(
            work_s=lambda: self._if_leading(self._worklist.stuck_s), watch_s=self._watch.stuck_s, metrics=metrics
        )
        metrics.oldest_seconds.set_function(lambda: self._if_leading(self._worklist.oldest_s))
        metrics.watch_age.set_function(self._watch.silent_s)
        metrics.worklist.set_function(lambda: len(self._worklist))
        metrics.leads.set_function(lambda: float(self._leads()))

    def stop(self) -> None:
        """Start an orderly shutdown."""
        self._stop.set()

    async def run(self, *, take_signals: Callable[[], None]) -> None:
        """Run until stopped. Raises LeadershipLost, NamespacesChanged, WatchEnded, and the failure of any part.

        take_signals: makes SIGTERM call ``stop``; called after kopf has installed its own signal handlers.
        """
        http = Http(
            metrics=self._metrics,
            health=self._health,
            ready=self._watch.missing,
            refresh=lambda: update_gauges(self._watch.store, self._metrics, self._failing_seconds()),
        )
        port = await http.start(self._settings.http_host, self._settings.http_port)
        _log.info("operator started", extra={"identity": self._settings.identity, "http_port": port})
        kopf_stop, kopf_ready = asyncio.Event(), asyncio.Event()
        kopf_run = run_kopf(
            self._api,
            self._watch.store,
            namespaces=self._namespaces,
            stop=kopf_stop,
            ready=kopf_ready,
        )
        kopf = asyncio.create_task(kopf_run, name="kopf")
        tasks = {kopf, asyncio.create_task(self._stop.wait())}
        namespaces_change: asyncio.Task[None] | None = None
        if self._namespaces:
            waiting = until_namespaces_change(
                api=self._api,
                namespaces=self._settings.namespaces,
                current=self._namespaces,
                every_s=self._settings.rights_seconds,
            )
            namespaces_change = asyncio.create_task(waiting)
            tasks.add(namespaces_change)
        try:
            await _first(tasks, until=kopf_ready.wait())
            take_signals()
            watching = (self._watch.run(), self._watch.resync(), until_a_watch_ends(self._namespaces))
            tasks |= {asyncio.create_task(each) for each in (self._health.run(), *watching)}
            if await _first(tasks, until=self._prepare()):
                background = (self._drivers.run(), self._capacity.run(), self._lookups.run())
                work = (*background, self._dispatch(), self._keep())
                tasks |= {asyncio.create_task(each) for each in work}
                await _first(tasks)
            await self._finish()
        finally:
            for task in (*(tasks - {kopf}), *self._running):
                task.cancel()
            kopf_stop.set()
            await asyncio.wait(tasks | self._running, timeout=_END_S)
            await self._leader.release()
            await http.close()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
        if namespaces_change is not None and namespaces_change.done() and not namespaces_change.cancelled():
            raise NamespacesChanged

    async def _prepare(self) -> None:
        """Wait until all kinds are listed and this process leads."""
        await self._watch.synced()
        counts = {kind.name: self._watch.store.count(kind.name) for kind in (*CUSTOM_KINDS, POD)}
        _log.info("all kinds listed", extra=counts)
        if self._settings.leader_election:
            await self._leader.acquire()
        self._prepared = True

    async def _keep(self) -> None:
        """Renew the lead until stopped. Raises LeadershipLost."""
        if self._settings.leader_election:
            await self._leader.keep()
            raise LeadershipLost
        await self._stop.wait()

    async def _dispatch(self) -> None:
        while True:
            await self._slots.acquire()
            key = await self._worklist.take()
            if self._stop.is_set():
                return
            task = asyncio.create_task(self._reconcile(key))
            self._running.add(task)
            task.add_done_callback(self._reconciled)

    def _reconciled(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._slots.release()

    async def _reconcile(self, key: Key) -> None:
        started = time.perf_counter()
        try:
            outcome = await self._reconciler.reconcile(key)
        except Exception:  # noqa: BLE001 - a bug in the reconciliation of one object must not stop the others
            _log.exception("reconciliation raised an unexpected error", extra={"object": str(key)})
            outcome = ReconcileOutcome(failed=True)
        backoff = self._worklist.finish(key, again_in_s=outcome.again_in_s, failed=outcome.failed)
        if outcome.gone:
            self._worklist.forget(key)
        if outcome.failed or self._refused.denied(key):
            self._failing_since.setdefault(key, started)
        else:
            self._failing_since.pop(key, None)
        word = "failed" if outcome.failed or outcome.denied else "gone" if outcome.gone else "ok"
        self._metrics.reconciled(key.kind, word, time.perf_counter() - started)
        if outcome.failed:
            _log.warning(
                "reconciliation failed, retrying later", extra={"object": str(key), "backoff_s": round(backoff, 1)}
            )

    async def _finish(self) -> None:
        """Wait for the running reconciliations, then release the lead."""
        _log.info("operator stopping", extra={"under_way": len(self._running)})
        if self._running:
            await asyncio.wait(self._running, timeout=FINISH_S)
        await self._leader.release()

    def _failing_seconds(self) -> dict[Key, float]:
        now = time.perf_counter()
        return {key: now - since for key, since in self._failing_since.items()}

    def _running_drivers(self) -> Iterator[RunningDriver]:
        """Yield the running drivers and publishers, each with the number of rollout pods of its job."""
        rollouts: Counter[ObjectGroup] = Counter()
        drivers: list[Entry[PodView]] = []
        for _, _, entry in self._watch.store.all(POD.name):
            pod: PodView = entry.view
            if pod.role == "rollout":
                rollouts[entry.group] += 1
            elif pod.role in LEADERS and pod.phase == "Running" and pod.ip and not pod.deleting:
                drivers.append(entry)
        for entry in drivers:
            owner = self._watch.store.get(entry.group.kind, entry.group.namespace, entry.group.name)
            if owner is not None and owner.uid == entry.owner:
                yield RunningDriver(
                    owner=owner.view.owner, pod=entry.uid, host=entry.view.ip, rollouts=rollouts[entry.group]
                )

    def _mark_job(self, job: Owner | Key) -> None:
        group = ObjectGroup(job.namespace, job.kind, job.name)
        for entry in self._watch.store.of(group):
            if entry.kind in _CUSTOM:
                self._worklist.mark(Key(entry.kind, job.namespace, entry.view.owner.name))
        for key in self._watch.references.around(Key(job.kind, job.namespace, job.name)):
            self._worklist.mark(key)

    def _waiting(self) -> Iterator[Key]:
        """Yield the owners of pods that cannot be scheduled."""
        for _, _, entry in self._watch.store.all(POD.name):
            if entry.view.unschedulable:
                yield Key(entry.group.kind, entry.group.namespace, entry.group.name)

    def _mark_waiting(self) -> None:
        for key in set(self._waiting()):
            self._worklist.mark(key)

    def _if_leading(self, seconds: Callable[[], float]) -> float:
        return seconds() if self._leads() else 0.0

    def _leads(self) -> bool:
        return self._leader.leads if self._settings.leader_election else self._prepared


async def _first(tasks: set[asyncio.Task[Any]], *, until: Coroutine[Any, Any, Any] | None = None) -> bool:
    """Wait until one of ``tasks`` or ``until`` ends, and return whether ``until`` did. Raises the failure of a task.

    When kopf fails, it first cancels every task in the loop, so a cancelled task counts as ended without an error.
    """
    waited = None if until is None else asyncio.create_task(until)
    try:
        done, _ = await asyncio.wait(tasks | ({waited} if waited else set()), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()
        return waited in done
    finally:
        if waited is not None:
            waited.cancel()
