"""Free capacity of each node, for the sentence that says why a pod waits.

Invariant: nobody looks while every pod has its place, and nobody looks more than once a minute: this is the one list
of all nodes and pods of the cluster, and only an operator of the whole cluster may read it. Of each object only what is
counted is kept, and few are in memory at a time: a Node is some 20 KB, and a cluster has thousands.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final, Never

from asyncflow.api.quantity import Quantity
from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.kinds import NODE, POD
from asyncflow_operator.cluster.refusals import ApiError
from asyncflow_operator.observed import NodeFree

Json = Mapping[str, Any]

EVERY_S: Final = 60.0
_LOOK_S: Final = 2.0
_PAGE: Final = 100
"""Objects that are read at a time."""
_ALIVE: Final = "status.phase!=Succeeded,status.phase!=Failed"

_log = logging.getLogger(__name__)


class Capacity:
    """The nodes as they were when somebody last looked. wanted: whether any pod waits for a place; news: told after."""

    def __init__(self, api: Api, *, wanted: Callable[[], bool], news: Callable[[], None]) -> None:
        self._api = api
        self._wanted = wanted
        self._news = news
        self.nodes: tuple[NodeFree, ...] | None = None

    async def run(self) -> Never:
        """Look whenever it is wanted, until cancelled."""
        looked = -EVERY_S
        while True:
            if not self._wanted():
                self.nodes = None
            elif time.monotonic() - looked >= EVERY_S:
                looked = time.monotonic()
                await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        left: dict[str, dict[str, float]] = {}
        try:
            async for page in self._api.pages(NODE, size=_PAGE):
                left |= {node["metadata"]["name"]: room(node) for node in page.get("items") or () if is_open(node)}
            async for page in self._api.pages(POD, fields=_ALIVE, size=_PAGE):
                for pod in page.get("items") or ():
                    take(left, pod.get("spec") or {})
        except ApiError as error:
            _log.warning("capacity not read", extra={"why": str(error)})
            return
        self.nodes = tuple(NodeFree(name=name, free=free) for name, free in sorted(left.items()))
        self._news()


def is_open(node: Json) -> bool:
    """Return whether a node is ready and takes pods."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and not (node.get("spec") or {}).get("unschedulable")


def room(node: Json) -> dict[str, float]:
    """Return what a node has for pods, by resource."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return {sys.intern(resource): amount(quantity) for resource, quantity in allocatable.items()}


def take(left: Mapping[str, dict[str, float]], spec: Json) -> None:
    """Take what a pod needs from what is left of its node."""
    node = left.get(spec.get("nodeName", ""))
    if node is not None:
        for resource, asked in needs(spec).items():
            if resource in node:
                node[resource] -= asked


def needs(spec: Json) -> dict[str, float]:
    """Return what the scheduler counts for a pod: its containers together, or its largest init container if more."""
    together: dict[str, float] = defaultdict(float)
    for container in spec.get("containers") or ():
        _add(together, container)
    largest: dict[str, float] = {}
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            _add(together, container)
        else:
            for resource, asked in _requests(container).items():
                largest[resource] = max(largest.get(resource, 0.0), asked)
    for resource, asked in largest.items():
        together[resource] = max(together[resource], asked)
    for resource, quantity in (spec.get("overhead") or {}).items():
        together[resource] += amount(quantity)
    together["pods"] = 1.0
    return dict(together)


def amount(quantity: str) -> float:
    """Return a quantity of the API in cores, bytes or pieces; 0 for one that this version cannot read."""
    try:
        return float(Quantity(quantity).amount)
    except (ArithmeticError, KeyError):
        return 0.0


def _add(together: dict[str, float], container: Json) -> None:
    for resource, asked in _requests(container).items():
        together[resource] += asked


def _requests(container: Json) -> dict[str, float]:
    asked = (container.get("resources") or {}).get("requests") or {}
    return {resource: amount(quantity) for resource, quantity in asked.items()}
