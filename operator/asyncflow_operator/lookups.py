"""Background reads of cluster-scoped objects: the objects that jobs refer to, and the free capacity of nodes.

Invariants: an object that no job requests is neither read nor kept. A requested object is read again periodically, and
the reconciliation of a job never waits for it. Nodes are listed only while a pod is unschedulable, and at most once a
minute: this is the only list of all nodes and pods of the cluster, and only an operator of the whole cluster may read
it. Only the needed figures of each object are kept, and few objects are in memory at a time: a Node has about 20 KB,
and a cluster has thousands.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Never

from asyncflow.api.base import Quantity
from asyncflow_operator.cluster.client import Api, ApiError
from asyncflow_operator.cluster.kinds import NODE, POD, REFERRED
from asyncflow_operator.observed import NodeFree, Ref, ReferredObject
from asyncflow_operator.references import Key

Json = Mapping[str, Any]

EVERY_S: Final = 60.0
_NODES_CHECK_S: Final = 2.0
_PAGE: Final = 100
"""Number of objects in one page of a list."""
_ALIVE: Final = "status.phase!=Succeeded,status.phase!=Failed"

FRESH_S: Final = 60.0
"""Seconds after which an object is read again."""
RETRY_S: Final = 5.0
"""Seconds after which an object that could not be read is read again."""
_CHECK_S: Final = 0.5
_KINDS: Final = {kind.name: kind for kind in REFERRED}
_READ: Final = ("spec", "value")

_log = logging.getLogger(__name__)


class Capacity:
    """Free capacity of the nodes. wanted: returns whether a pod is unschedulable; changed: called after each read."""

    def __init__(self, api: Api, *, wanted: Callable[[], bool], changed: Callable[[], None]) -> None:
        self._api = api
        self._wanted = wanted
        self._changed = changed
        self.nodes: tuple[NodeFree, ...] | None = None

    async def run(self) -> Never:
        """Read the capacity while it is wanted, until cancelled."""
        listed_at = -EVERY_S
        while True:
            if not self._wanted():
                self.nodes = None
            elif time.monotonic() - listed_at >= EVERY_S:
                listed_at = time.monotonic()
                await self._list_nodes()
            await asyncio.sleep(_NODES_CHECK_S)

    async def _list_nodes(self) -> None:
        free: dict[str, dict[str, float]] = {}
        try:
            async for page in self._api.pages(NODE, size=_PAGE):
                free |= {
                    node["metadata"]["name"]: allocatable(node) for node in page.get("items") or () if is_open(node)
                }
            async for page in self._api.pages(POD, fields=_ALIVE, size=_PAGE):
                for pod in page.get("items") or ():
                    take(free, pod.get("spec") or {})
        except ApiError as error:
            _log.warning("could not read the capacity of the nodes", extra={"why": str(error)})
            return
        self.nodes = tuple(NodeFree(name=name, free=amounts) for name, amounts in sorted(free.items()))
        self._changed()


def is_open(node: Json) -> bool:
    """Return whether a node is ready and schedulable."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and not (node.get("spec") or {}).get("unschedulable")


def allocatable(node: Json) -> dict[str, float]:
    """Return the allocatable amounts of a node, by resource."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return {sys.intern(resource): amount(quantity) for resource, quantity in allocatable.items()}


def take(free: Mapping[str, dict[str, float]], spec: Json) -> None:
    """Subtract the requests of a pod from the free resources of its node."""
    node = free.get(spec.get("nodeName", ""))
    if node is not None:
        for resource, requested in needs(spec).items():
            if resource in node:
                node[resource] -= requested


def needs(spec: Json) -> dict[str, float]:
    """Return a pod's requests by resource: its containers' sum, or its largest init container's if that is more."""
    together: dict[str, float] = defaultdict(float)
    for container in spec.get("containers") or ():
        _add(together, container)
    largest: dict[str, float] = {}
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            _add(together, container)
        else:
            for resource, requested in _requests(container).items():
                largest[resource] = max(largest.get(resource, 0.0), requested)
    for resource, requested in largest.items():
        together[resource] = max(together[resource], requested)
    for resource, quantity in (spec.get("overhead") or {}).items():
        together[resource] += amount(quantity)
    together["pods"] = 1.0
    return dict(together)


def amount(quantity: str) -> float:
    """Return a Kubernetes quantity in cores, bytes or units; 0 for a quantity that cannot be parsed."""
    try:
        return float(Quantity(quantity).amount)
    except (ArithmeticError, KeyError):
        return 0.0


def _add(together: dict[str, float], container: Json) -> None:
    for resource, requested in _requests(container).items():
        together[resource] += requested


def _requests(container: Json) -> dict[str, float]:
    requests = (container.get("resources") or {}).get("requests") or {}
    return {resource: amount(quantity) for resource, quantity in requests.items()}


@dataclass(slots=True)
class _Known:
    """Record of one object. requested: monotonic time of each job's last request; due: time of the next read."""

    requested: dict[Key, float] = field(default_factory=dict)
    found: ReferredObject | None = None
    due: float = 0.0


class Lookups:
    """Reader of objects that jobs refer to.

    changed: called with each job that requested an object, when the object is new or has changed.
    keep_s: seconds for which a request of a job stays valid, more than between two reconciliations of the job.
    """

    def __init__(self, api: Api, *, changed: Callable[[Key], None], keep_s: float) -> None:
        self._api = api
        self._keep_s = keep_s
        self._changed = changed
        self._known: dict[Ref, _Known] = {}
        self._wanted = asyncio.Event()

    def find(self, ref: Ref, *, by: Key) -> ReferredObject | None:
        """Return an object as last read, None if it has not been read yet. by: the requesting job."""
        known = self._known.get(ref)
        if known is None:
            known = self._known[ref] = _Known()
            self._wanted.set()
        known.requested[by] = time.monotonic()
        return known.found

    async def run(self) -> Never:
        """Read the requested objects, until cancelled."""
        while True:
            self._wanted.clear()
            now = time.monotonic()
            for ref, known in list(self._known.items()):
                known.requested = {key: at for key, at in known.requested.items() if now - at <= self._keep_s}
                if not known.requested:
                    del self._known[ref]
                elif known.due <= now:
                    await self._read(ref, known)
            waits = asyncio.create_task(self._wanted.wait())
            await asyncio.wait([waits], timeout=_CHECK_S)
            waits.cancel()

    async def _read(self, ref: Ref, known: _Known) -> None:
        kind = _KINDS[ref.kind]
        try:
            await self._api.settle(kind)
            raw = await self._api.get(kind, "", ref.name)
            found = ReferredObject(content={name: raw[name] for name in _READ if name in raw})
        except ApiError as error:
            found = ReferredObject(problem=error.what)
        known.due = time.monotonic() + (RETRY_S if found.problem else FRESH_S)
        if found != known.found:
            known.found = found
            for key in known.requested:
                self._changed(key)
