"""Informer: keeps the store in step with the API server for one kind, by a list and then by every change.

Invariant: after ``synced`` the store misses nothing older than the last line received. A stream that ends is continued
where it ended; one that is silent, bookmarks included, for ``IDLE_S`` is dead; one that is too old begins with a list.
One that broke off, or said nothing, is not begun again at once.
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
"""Bookmarks come every 60 s."""
_FIRST_BACKOFF_S: Final = 0.5
_LONGEST_BACKOFF_S: Final = 30.0
_ABSENT_PAUSE_S: Final = 300.0
"""Seconds between two checks for a kind that the cluster does not have."""

_log = logging.getLogger(__name__)


class Informer:
    """Informer of one kind in one namespace, or in all ("")."""

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
        self.heard = clock()
        self._api = api
        self._store = store
        self._namespace = namespace
        self._labels = labels
        self._clock = clock
        self._failures = 0
        self._tried = math.inf
        self._there = asyncio.Event()

    @property
    def moved(self) -> float:
        """Return when it last heard the server, or tried again: a server that is away does not stop it.

        Infinite where it has not begun.
        """
        return max(self.heard, self._tried)

    def exists(self) -> None:
        """Take note that the cluster has the kind after all: an object of it was written."""
        self._there.set()

    async def run(self) -> Never:
        """Follow the kind until cancelled; failures of the server are waited out."""
        self._tried, version = self._clock(), ""
        while True:
            try:
                if not version:
                    version = await self._list()
                    self.synced.set()
                version = await self._follow(version)
            except Expired:
                version = ""
                await self._rest()
            except Refusal as refused:
                version = ""
                await self._wait(refused)
            except ApiError as error:
                _log.warning("watch interrupted", extra={"resource": self.kind.plural, "why": str(error)})
                await self._rest()

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
            self.heard = self._clock()
            await asyncio.sleep(0)
        self._store.retain(self.kind.name, self._namespace, listed, int(version))
        return version

    async def _follow(self, version: str) -> str:
        """Take changes until the server ends the stream, and return the last version seen. Raises as ``Api.watch``."""
        stream = self._api.watch(
            self.kind,
            since=version,
            namespace=self._namespace,
            labels=self._labels,
            metadata_only=self._metadata_only,
            idle_s=IDLE_S,
        )
        rests = True
        try:
            async for changes in stream:
                rests, self.heard = False, self._clock()
                self._failures = 0
                for change in changes:
                    version = self._take(change)
        except ApiError as error:
            if isinstance(error, (Expired, Refusal)):
                raise
            rests = True
            _log.info(
                "watch ended early, continuing where it ended", extra={"resource": self.kind.plural, "why": str(error)}
            )
        if rests:
            await self._rest()
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
            self.heard = self._clock() + _ABSENT_PAUSE_S
            self._there.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABSENT_PAUSE_S):
                    await self._there.wait()
        else:
            _log.error("the API server refused a watch", extra={"resource": self.kind.plural, "why": str(refused)})
            await self._rest()

    async def _rest(self) -> None:
        self._failures += 1
        self._tried = self._clock()
        await asyncio.sleep(backoff(self._failures, first_s=_FIRST_BACKOFF_S, longest_s=_LONGEST_BACKOFF_S))
