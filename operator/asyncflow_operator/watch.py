"""Keeps the store in step with the cluster, and marks what to look at.

``ours`` has kopf watch our own three kinds; informers watch everything that we make for them. Invariant: whatever
changes, the object that it was made for is marked; and a census of our own objects, at the start and now and then,
finds what no watch has told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Never

from asyncflow.api.names import MANAGED
from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.informer import Informer
from asyncflow_operator.cluster.kinds import CONFIG, MEMBERS, OURS, QUEUE, RLJOB, SYNC, Kind
from asyncflow_operator.cluster.owners import begun, mine, recalled
from asyncflow_operator.cluster.refusals import ApiError
from asyncflow_operator.cluster.store import Group, Store
from asyncflow_operator.cluster.views import controller_of, object_view, pod_view
from asyncflow_operator.observe import Key

Json = Mapping[str, Any]

_LABELS: Final = ",".join(f"{key}={value}" for key, value in MANAGED.items())
_RETRY_S: Final = 5.0

_log = logging.getLogger(__name__)


def project(kind: str, raw: Json, before: Any) -> Any:
    """Return the view of an object of any kind; see ``Store``."""
    if kind == "Pod":
        return pod_view(raw)
    return mine(kind, raw, before) if kind in _OURS else object_view(raw, kind=kind)


class Watch:
    """All watches. mark: told a key to look at; renew: told a key that is new, gone, or has another spec."""

    def __init__(
        self,
        api: Api,
        *,
        namespaces: tuple[str, ...],
        mark: Callable[[Key], None],
        renew: Callable[[Key], None],
        resync_s: float,
    ) -> None:
        self._api = api
        self._namespaces = namespaces
        self._mark = mark
        self._renew = renew
        self._resync_s = resync_s
        self.store = Store(project, self._changed)
        self._counted = asyncio.Event()
        self._informers = [
            Informer(api, self.store, kind, namespace=namespace, labels=_LABELS)
            for kind in MEMBERS
            for namespace in namespaces or ("",)
        ]
        self._doubtful = {
            kind.name: [each for each in self._informers if each.kind is kind] for kind in MEMBERS if kind.optional
        }

    def missing(self) -> list[str]:
        """Return what is not known yet, nothing once everything has been listed."""
        kinds = sorted({each.kind.plural for each in self._informers if not each.synced.is_set()})
        return [f"the list of {plural}" for plural in kinds] + ([] if self._counted.is_set() else ["the census"])

    async def synced(self) -> None:
        """Wait until everything has been listed once; ``missing`` says what is waited for."""
        for informer in self._informers:
            await informer.synced.wait()
        await self._counted.wait()

    def silent_s(self) -> float:
        """Return for how long the quietest informer has heard nothing."""
        now = time.monotonic()
        return max(now - each.heard for each in self._informers)

    async def run(self) -> Never:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers:
                group.create_task(informer.run(), name=f"informer {informer.kind.plural}")
            while True:
                try:
                    for kind in OURS:
                        for namespace in self._namespaces or ("",):
                            await self._census(kind, namespace)
                except ApiError as error:
                    _log.warning("census failed", extra={"why": str(error)})
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._counted.set()
                await asyncio.sleep(self._resync_s)

    async def _census(self, kind: Kind, namespace: str) -> None:
        """Compare the store with a list, and have everything looked at once."""
        listed: set[str] = set()
        version = "0"
        async for page in self._api.pages(kind, namespace=namespace):
            version = page["metadata"]["resourceVersion"]
            for raw in page.get("items") or ():
                listed.add(raw["metadata"]["uid"])
                self.store.put(kind.name, {"apiVersion": kind.api_version, "kind": kind.name} | raw)
                await self._recall(kind, raw)
            await asyncio.sleep(0)
        self.store.retain(kind.name, namespace, listed, int(version))
        for where, name, _ in self.store.all(kind.name):
            self._mark(Key(kind.name, where, name))

    async def _recall(self, kind: Kind, raw: Json) -> None:
        """Find the spec that was accepted last of an object that has begun and whose newest spec is refused."""
        meta = raw["metadata"]
        entry = self.store.get(kind.name, meta["namespace"], meta["name"])
        if entry is None or entry.view.model is not None or not begun(entry.view.status):
            return
        config = await self._api.find(CONFIG, meta["namespace"], meta["name"], metadata_only=False)
        if config is None or controller_of(config)[2] != entry.uid:
            return
        known = self.store.get(kind.name, meta["namespace"], meta["name"])
        if known is not None and known.version == entry.version:
            self.store.revise(kind.name, meta["namespace"], meta["name"], recalled(entry.view, raw, config))

    def _changed(self, group: Group, kind: str, before: Any, after: Any) -> None:
        """Mark whatever may be decided otherwise after an object of ``kind`` in ``group`` has changed."""
        if before is None:
            for informer in self._doubtful.get(kind, ()):
                informer.exists()
        affected = _AFFECTED.get(kind, (RLJOB.name, QUEUE.name))
        for entry in self.store.of(group):
            if entry.kind in affected:
                self._mark(Key(entry.kind, group.namespace, entry.view.owner.name))
        if kind in _OURS:
            owner = (after or before).owner
            news = before is None or after is None or before.owner.generation != owner.generation
            (self._renew if news else self._mark)(Key(kind, group.namespace, owner.name))


_OURS: Final = frozenset(kind.name for kind in OURS)
_AFFECTED: Final = {RLJOB.name: (RLJOB.name, QUEUE.name, SYNC.name), SYNC.name: (RLJOB.name, SYNC.name)}
"""By the kind that changed: the kinds of its group to look at; RLJob and TransferQueue where it says nothing."""
