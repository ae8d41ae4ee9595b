"""Informer: keeps the store up to date with the API server for one kind, by a list followed by a watch.

Invariants: once ``synced`` is set, the store has every change up to the last received line. A watch that ends is
continued at its last version. A watch without any message, bookmarks included, for ``IDLE_S`` seconds counts as dead. A
watch whose version is too old starts again with a list. After a watch that broke off or was empty, there is a pause
before the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, Never

from asyncflow_operator.cluster.client import Api, ApiError, Expired, Refusal
from asyncflow_operator.cluster.kinds import Kind
from asyncflow_operator.cluster.store import ObjectStore
from asyncflow_operator.worklist import backoff

IDLE_S: Final = 70.0
"""Longest silence of a watch; the server sends a bookmark every 60 s."""
_FIRST_BACKOFF_S: Final = 0.5
_LONGEST_BACKOFF_S: Final = 30.0
_ABSENT_PAUSE_S: Final = 300.0
"""Seconds between two checks for a kind that the cluster does not have."""

_log = logging.getLogger(__name__)


class Informer:
    """Informer of one kind in one namespace, or in all (""). last_message: time of the last message from the server."""

    def __init__(
        self,
        api: Api,
        store: ObjectStore,
        kind: Kind,
        *,
        namespace: str = "",
        labels: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.synced = asyncio.Event()
        self.last_message = clock()
        self._api = api
        self._store = store
        self._namespace = namespace
        self._labels = labels
        self._clock = clock
        self._failures = 0
        self._retried = math.inf
        self._kind_exists = asyncio.Event()

    @property
    def last_activity(self) -> float:
        """Return the time of the last message or retry, infinite before the start."""
        return max(self.last_message, self._retried)

    def exists(self) -> None:
        """Record that the cluster has the kind, because an object of it was written."""
        self._kind_exists.set()

    async def run(self) -> Never:
        """Follow the kind until cancelled; retry after failures of the server."""
        self._retried, version = self._clock(), ""
        while True:
            try:
                if not version:
                    version = await self._list()
                    self.synced.set()
                version = await self._follow(version)
            except Expired:
                version = ""
                await self._pause()
            except Refusal as refused:
                version = ""
                await self._wait(refused)
            except ApiError as error:
                _log.warning("watch interrupted", extra={"resource": self.kind.plural, "why": str(error)})
                await self._pause()

    async def _list(self) -> str:
        await self._api.settle(self.kind)
        listed: set[str] = set()
        version = ""
        arguments: Any = {"namespace": self._namespace, "labels": self._labels, "metadata_only": self._metadata_only}
        async for page in self._api.pages(self.kind, **arguments):
            version = page["metadata"]["resourceVersion"]
            for raw in page.get("items") or ():
                listed.add(raw["metadata"]["uid"])
                self._store.put(self.kind.name, raw)
            self.last_message = self._clock()
            await asyncio.sleep(0)
        self._store.retain(self.kind.name, self._namespace, listed, int(version))
        return version

    async def _follow(self, version: str) -> str:
        """Store changes until the server ends the stream, and return the last version. Raises as ``Api.watch``."""
        stream = self._api.watch(
            self.kind,
            since=version,
            namespace=self._namespace,
            labels=self._labels,
            metadata_only=self._metadata_only,
            idle_s=IDLE_S,
        )
        pauses = True
        try:
            async for changes in stream:
                pauses, self.last_message = False, self._clock()
                self._failures = 0
                for change in changes:
                    version = self._take(change)
        except ApiError as error:
            if isinstance(error, (Expired, Refusal)):
                raise
            pauses = True
            _log.info("watch broke off, continuing", extra={"resource": self.kind.plural, "why": str(error)})
        if pauses:
            await self._pause()
        return version

    def _take(self, change: dict[str, Any]) -> str:
        raw = change["object"]
        meta = raw["metadata"]
        if change["type"] == "DELETED":
            at = int(meta["resourceVersion"])
            self._store.remove(self.kind.name, meta.get("namespace", ""), meta["name"], meta["uid"], version=at)
        elif change["type"] != "BOOKMARK":
            self._store.put(self.kind.name, raw)
        version: str = meta["resourceVersion"]
        return version

    @property
    def _metadata_only(self) -> bool:
        return self.kind.watched == "metadata"

    async def _wait(self, refused: Refusal) -> None:
        if refused.absent and self.kind.optional:
            self.synced.set()
            self.last_message = self._clock() + _ABSENT_PAUSE_S
            self._kind_exists.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABSENT_PAUSE_S):
                    await self._kind_exists.wait()
        else:
            _log.error("the API server refused a watch", extra={"resource": self.kind.plural, "why": str(refused)})
            await self._pause()

    async def _pause(self) -> None:
        self._failures += 1
        self._retried = self._clock()
        await asyncio.sleep(backoff(self._failures, first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S))
