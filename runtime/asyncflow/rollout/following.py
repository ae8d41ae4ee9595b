"""An engine that follows a job or a publisher: it loads each new version as soon as that is here, and serves all.

Invariant: the engine is changed by nothing but these versions; one that serves, of a fleet that is staggered, changes
only in its turn; where the job ends, the last one stays loaded, and when the job goes on, so does the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from asyncflow.errors import AsyncFlowError
from asyncflow.identity import Version
from asyncflow.rollout.engines.base import RolloutEngine
from asyncflow.rollout.loading import WeightLoader
from asyncflow.rpc.membership import Status
from asyncflow.weights.follower import Follower
from asyncflow.weights.permits import SwapPermits
from asyncflow.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

_AGAIN_S = 5.0


class FollowingEngine:
    """Loads the versions of followers that ``join`` makes, one after another, into ``engine``.

    join: returns a follower that is not started, and the loader that brings its versions into the engine; join_s: for
    how long a driver is waited for before it is said that it does not answer.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        join: Callable[[Callable[[], Status]], tuple[Follower, WeightLoader]],
        join_s: float,
    ) -> None:
        self._engine = engine
        self._join = join
        self._join_s = join_s
        self._loader: WeightLoader | None = None
        self._permits: SwapPermits | None = None

    async def run(self) -> None:
        """Follow for ever. Raises what ends the engine: an error of its own, weights that do not fit it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._engine.ended())
            while True:
                await self._follow()
                await asyncio.sleep(_AGAIN_S)

    def _status(self) -> Status:
        if self._loader is None:
            return {}
        return {**self._loader.status(), "waits_permit": self._permits is not None and self._permits.waiting}

    async def _follow(self) -> None:
        """Follow one life of the driver, from when it answers to when it says that the job ends."""
        follower, self._loader = self._join(self._status)
        self._permits = follower.permits
        try:
            await follower.start(within_s=self._join_s)
        except AsyncFlowError as error:
            log.warning("nothing to follow yet: %s", error)
            return
        try:
            while (version := await follower.newer()) is not None:
                await self._load(self._loader, version, follower.receiver)
            log.info("the job ends; %s stays loaded", self._engine.version)
        finally:
            self._loader.close()
            await follower.close()

    async def _load(self, loader: WeightLoader, version: Version, receiver: WeightReceiver) -> None:
        """Load a version that is here, or one that is newer when the engine may change."""
        serving = self._engine.version
        with receiver.keeping(version.step):
            if serving is not None:
                await loader.stage(version)
            if serving is None or self._permits is None:
                await self._swap(loader, version)
                return
        async with self._permits.permit(serving):
            newest = receiver.staged or version
            with receiver.keeping(newest.step):
                if newest != version:
                    await loader.stage(newest)
                await self._swap(loader, newest)

    async def _swap(self, loader: WeightLoader, version: Version) -> None:
        prepared = await loader.prepare(version.step)
        began = time.monotonic()
        with self._engine.spans.beside("swap", version=version.step):
            await loader.load(prepared)
        seconds = time.monotonic() - began
        loader.swapped(version.step, seconds)
        log.info("swapped to %s in %.3f s", prepared.version, seconds)
