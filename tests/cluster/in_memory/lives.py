"""An operator's reconciler on the API server in memory, with clock, kubelets and drivers of the test.

What runs is the operator's own: client, store, observer, decisions, hands, recorder. Invariant: time passes only when
there is nothing left to do, so a life takes as long as its requests.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import kmock
from kubernetes.aio.client.configuration import Configuration
from memory import Json, MemoryServer, copied
from memory import Key as ObjectKey

from asyncflow.api.status import DriverStatus
from asyncflow_operator.cluster.apply import PlanExecutor
from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.events import Recorder
from asyncflow_operator.cluster.kinds import BY_NAME, CUSTOM_KINDS
from asyncflow_operator.decide.job import decide_job
from asyncflow_operator.decide.queue import decide_queue
from asyncflow_operator.decide.weights import decide_sync
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.observe import Observer, RefusalRecord
from asyncflow_operator.observed import DriverProbe, Owner
from asyncflow_operator.reconcile import CachedDesired, Reconciler
from asyncflow_operator.references import Key
from asyncflow_operator.telemetry import Metrics
from asyncflow_operator.watch import ClusterWatch

START = 1_800_000_000.0
PATIENCE = 2000
_DESIRED = Desired(DesiredSettings(registry=Registry(prefix="registry.example", tag="1"), master=b"m" * 32))
_AUTHORITY = (
    _DESIRED.secrets(Owner(kind="RLJob", namespace="any", name="any", uid="any")).operator(0)["ca.crt"].decode()
)
_METRICS = Metrics()


class Drivers:
    """The jobs' drivers: amid the run until they are told to suspend, or have told the others that it is over."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.suspended: set[str] = set()

    def probe(self, uid: str) -> DriverProbe:
        phase: Any = "Suspended" if uid in self.suspended else "Running"
        return DriverProbe(status=DriverStatus(phase=phase, step=3, steps=60), at=self._now())

    def order(self, owner: Owner, path: str) -> None:
        assert path == "/v1/suspend"
        self.suspended.add(owner.uid)


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """All that there is of a cluster beside its operator. writes: until then."""

    objects: dict[ObjectKey, Json]
    made: Counter[tuple[str, ...]]
    version: int
    now: float
    suspended: frozenset[str]
    writes: int


class Cluster:
    """The server, and one operator after another."""

    def __init__(self, server: MemoryServer, host: str) -> None:
        self.server = server
        self.now = START
        server.now = lambda: self.now
        self.drivers = Drivers(lambda: self.now)
        self.deaths = 0
        configuration = Configuration(host=host.rstrip("/"))
        configuration.ca_cert_data = _AUTHORITY  # else all of the machine's are read, each time
        self._api = Api(configuration)
        self._due: dict[Key, float] = {}

    async def close(self) -> None:
        await self._api.close()

    def state(self) -> ClusterState:
        """Return how things are, to go on from in another cluster."""
        server = self.server
        return ClusterState(
            objects={key: copied(raw) for key, raw in server.objects.items()},
            made=Counter(server.made),
            version=next(server.versions),
            now=self.now,
            suspended=frozenset(self.drivers.suspended),
            writes=server.writes,
        )

    def go_on_from(self, state: ClusterState) -> None:
        """Have everything be as it was then, before an operator begins."""
        server = self.server
        server.objects = {key: copied(raw) for key, raw in state.objects.items()}
        server.made = Counter(state.made)
        server.versions = itertools.count(state.version)
        self.now = state.now
        self.drivers.suspended = set(state.suspended)

    async def begin(self) -> None:
        """Start an operator: nothing is remembered, everything is listed."""
        self._due = {}
        self.server.changes.clear()
        self._watch = ClusterWatch(
            self._api, namespaces=(), mark=self._mark, renew=self._mark, resync_s=600.0, now=lambda: self.now
        )
        refused = RefusalRecord()
        desired = CachedDesired(_DESIRED)
        observer = Observer(
            self._watch.store,
            probe=self.drivers.probe,
            nodes=lambda: None,
            refused=refused,
            references=self._watch.references,
        )
        self._reconciler = Reconciler(
            observer=observer,
            decide={
                "RLJob": lambda state, now: decide_job(state, now=now, desired=desired),
                "TransferQueue": lambda state, now: decide_queue(state, now=now, desired=desired),
                "WeightSync": lambda state, now: decide_sync(state, now=now, desired=_DESIRED),
            },
            executor=PlanExecutor(self._api, self._watch.store, self.drivers),
            recorder=Recorder(self._api, reporter="test"),
            refused=refused,
            metrics=_METRICS,
            now=lambda: self.now,
        )
        for kind in BY_NAME.values():
            if kind.watched != "never":
                async for page in self._api.pages(kind):
                    for raw in page["items"]:
                        self._watch.store.put(kind.name, raw)
        for kind in CUSTOM_KINDS:
            for namespace, name, _ in self._watch.store.all(kind.name):
                self._mark(Key(kind.name, namespace, name))

    async def until(self, goal: Callable[[], object], what: str) -> None:
        """Let everything happen until nothing is left to do and ``goal`` is reached."""
        for _ in range(PATIENCE):
            await self._work()
            if self._kubelets():
                continue
            if goal():
                return
            self.now = min((due for due in self._due.values() if due > self.now), default=self.now + 1.0)
        raise AssertionError(f"waited for {what}: {[*self.server.of('pods')]}, {self.server.of('rljobs')}")

    async def rest(self, until: float) -> int:
        """Let time pass, with a look at everything now and then; give the writes."""
        before = self.server.writes
        while self.now < until:
            await self._work()
            self.now = min(until, *(due for due in self._due.values() if due > self.now), self.now + 600.0)
            for kind in CUSTOM_KINDS:
                for namespace, name, _ in self._watch.store.all(kind.name):
                    self._mark(Key(kind.name, namespace, name))
        return self.server.writes - before

    async def _work(self) -> None:
        """Do what is due now; where the operator dies of it, start the next one."""
        self._hear()
        while due := [key for key, at in self._due.items() if at <= self.now]:
            for key in due:
                del self._due[key]
                await self._look(key)
                if self.server.dead.is_set():
                    self.deaths += 1
                    self.server.revive()
                    await self.begin()
                    break
            self._hear()

    async def _look(self, key: Key) -> None:
        reconcile = asyncio.ensure_future(self._reconciler.reconcile(key))
        death = asyncio.ensure_future(self.server.dead.wait())
        await asyncio.wait({reconcile, death}, return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if self.server.dead.is_set():
            reconcile.cancel()
            await asyncio.wait({reconcile})
            return
        outcome = await reconcile
        again = 1.0 if outcome.failed else outcome.again_in_s
        if again is not None:
            self._mark(key, at=self.now + again)

    def _mark(self, key: Key, *, at: float | None = None) -> None:
        self._due[key] = min(self.now if at is None else at, self._due.get(key, float("inf")))

    def _hear(self) -> None:
        """Take what the watches tell."""
        changes, self.server.changes = self.server.changes, []
        for kind, after, raw in changes:
            meta = raw["metadata"]
            if kind == "Event" or (kind in BY_NAME and BY_NAME[kind].watched == "never"):
                continue
            if after is None:
                self._watch.store.remove(kind, meta["namespace"], meta["name"], meta["uid"])
            else:
                self._watch.store.put(kind, after)

    def _kubelets(self) -> bool:
        """Let every pod take its next step; whether one did."""
        moved = False
        for raw in list(self.server.of("pods").values()):
            if "deletionTimestamp" in raw["metadata"]:
                self.server.remove("pods", raw)
            elif "phase" not in raw.setdefault("status", {}):
                self._set(raw, phase="Running", state={"running": {"startedAt": self.server.stamp()}}, ready="True")
            else:
                continue
            moved = True
        return moved

    def end(self, pod: str, code: int) -> None:
        """Have a pod's process end."""
        state = {"terminated": {"exitCode": code, "finishedAt": self.server.stamp()}}
        self._set(self.server.of("pods")[pod], phase="Failed" if code else "Succeeded", state=state, ready="False")

    def _set(self, raw: Json, *, phase: str, state: Json, ready: str) -> None:
        after = copied(raw)
        after["spec"]["nodeName"] = "node-1"
        after["status"] = {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": [{"name": "asyncflow", "state": state}],
        }
        self.server.put("pods", after)

    def edit(self, job: str, **spec: Any) -> None:
        """Have a person change parts of a job's spec."""
        after = copied(self.server.of("rljobs")[job])
        for part, value in spec.items():
            after["spec"][part] = after["spec"].get(part, {}) | value if isinstance(value, dict) else value
        self.server.put("rljobs", after)


@asynccontextmanager
async def cluster(create: Callable[[Cluster], object], *, deadly: int | None = None) -> AsyncIterator[Cluster]:
    """Yield a cluster in which ``create`` has made what there is at first; see ``MemoryServer`` for ``deadly``."""
    async with MemoryServer(deadly=deadly) as server, kmock.Server(server) as listening:
        running = Cluster(server, str(listening.url))
        create(running)
        try:
            await running.begin()
            yield running
        finally:
            await running.close()
