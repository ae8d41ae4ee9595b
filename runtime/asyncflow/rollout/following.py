"""An engine that follows a job or a publisher: it loads each new version as soon as it has arrived, and serves it.

Invariants: only these versions change the engine's weights. In a staggered fleet, a serving engine changes its weights
only in its turn. When the job ends, the last version stays loaded; when the job resumes, the engine follows it again.
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
    """Loads into ``engine`` the versions of the followers that ``join`` creates, one follower after another.

    join: returns a follower, not started, and the loader of its versions into the engine; join_s: seconds to wait for a
    driver before a warning that it does not answer.
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
        """Follow forever. Raises an error that ends the engine: its own, or weights that do not fit it."""
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
        """Follow one life of the driver, from its first answer to the end of the job."""
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
        """Load a version that has arrived, or a newer one if one has arrived when the engine may change its weights."""
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
        started = time.monotonic()
        with self._engine.spans.background("swap", version=version.step):
            await loader.load(prepared)
        seconds = time.monotonic() - started
        loader.swapped(version.step, seconds)
        log.info("swapped to %s in %.3f s", prepared.version, seconds)
