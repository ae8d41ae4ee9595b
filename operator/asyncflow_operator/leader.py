"""Leader election: of several operators, only the holder of the Lease works.

Invariants: a process leads only while its last renewal is less than ``RENEW_WITHIN_S`` seconds old, which is shorter
than the time after which another process may take over. A process that was paused for longer therefore no longer leads
from the moment it resumes. A process that cannot renew the Lease ends. The clocks of two machines are never compared: a
Lease has expired when this process has seen no change of it for its duration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from asyncflow_operator.cluster.client import Api, ApiError, Json, Refusal
from asyncflow_operator.cluster.kinds import LEASE

DURATION_S: Final = 15
RENEW_S: Final = 2.0
RENEW_WITHIN_S: Final = 10.0
RETRY_S: Final = 2.0
_CALL_S: Final = 4.0

_log = logging.getLogger(__name__)


class Leader:
    """A candidate, by the name ``identity``, for the Lease ``name`` in ``namespace``."""

    def __init__(
        self, api: Api, *, namespace: str, name: str, identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._seen: tuple[object, ...] = ()
        self._seen_at = clock()
        self._renewed = 0.0
        self._holds = False
        self._turn = asyncio.Lock()

    @property
    def leads(self) -> bool:
        """Return whether this process leads and may write now."""
        return self._holds and self._clock() < self._renewed + RENEW_WITHIN_S

    async def acquire(self) -> None:
        """Wait until this process leads."""
        while not await self._try():
            await asyncio.sleep(min(RETRY_S, max(0.1, self._seen_at + DURATION_S - self._clock())))
        self._holds = True
        _log.info("leadership acquired", extra={"lease": f"{self._namespace}/{self._name}", "identity": self._identity})

    async def keep(self) -> None:
        """Renew the Lease until that fails for too long, then give up the lead and return."""
        while True:
            await asyncio.sleep(RENEW_S)
            while not await self._try():
                if self._clock() - self._renewed + RENEW_S >= RENEW_WITHIN_S:
                    self._holds = False
                    _log.error("leadership lost", extra={"lease": f"{self._namespace}/{self._name}"})
                    return
                await asyncio.sleep(RENEW_S / 2)

    async def release(self) -> None:
        """Release the Lease, so that another process can take over immediately; ``keep`` waits from then on."""
        if not self._holds:
            return
        self._holds = False
        await self._turn.acquire()  # for good: a renewal would take the Lease back
        try:
            async with asyncio.timeout(_CALL_S):
                lease = await self._api.get(LEASE, self._namespace, self._name)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._api.replace(LEASE, self._namespace, self._name, lease, deadline_s=_CALL_S)
        except (ApiError, TimeoutError) as error:
            _log.warning("could not release the lease", extra={"why": str(error) or "no answer"})

    async def _try(self) -> bool:
        """Take or renew the Lease, and return whether this process holds it now."""
        async with self._turn:
            remaining_s = self._renewed + RENEW_WITHIN_S - self._clock() if self._holds else _CALL_S
            try:
                async with asyncio.timeout(min(_CALL_S, remaining_s)):
                    return await self._take()
            except (ApiError, TimeoutError) as error:
                _log.warning("could not take or renew the lease", extra={"why": str(error) or "no answer"})
                return False

    async def _take(self) -> bool:
        started = self._clock()
        try:
            lease = await self._api.get(LEASE, self._namespace, self._name)
        except Refusal as refused:
            if not refused.absent:
                raise
            meta = {"name": self._name, "namespace": self._namespace}
            lease = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": {}}
            return await self._write(lease, started, new=True)
        spec = lease.setdefault("spec", {})
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._seen:
            self._seen, self._seen_at = record, self._clock()
        holder = spec.get("holderIdentity")
        expired = self._clock() - self._seen_at >= float(spec.get("leaseDurationSeconds") or DURATION_S)
        if holder in (None, "", self._identity) or expired:
            return await self._write(lease, started, new=False)
        return False

    async def _write(self, lease: Json, started: float, *, new: bool) -> bool:
        spec = lease["spec"]
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (0 if new else 1)
        spec |= {"holderIdentity": self._identity, "leaseDurationSeconds": DURATION_S, "renewTime": now}
        try:
            if new:
                await self._api.create(LEASE, self._namespace, lease, deadline_s=_CALL_S)
            else:
                await self._api.replace(LEASE, self._namespace, self._name, lease, deadline_s=_CALL_S)
        except Refusal as refused:
            if not refused.conflict:
                raise
            return False
        self._renewed = started
        return True
