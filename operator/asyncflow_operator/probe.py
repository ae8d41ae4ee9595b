"""What the jobs' drivers say, asked in the background; and what they are asked to do.

Invariant: a reconcile never waits for a driver's status: it reads the last answer. At most ``AT_ONCE`` drivers are
asked at a time, each for at most ``ANSWER_S``; a driver that does not answer is asked less often, and never given up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Never

import aiohttp
from pydantic import ValidationError

from asyncflow.api.names import service
from asyncflow.api.status import DriverStatus
from asyncflow.errors import DeadlineExceeded, ProtocolError, Refused
from asyncflow_operator.observed import Owner, Probe

AT_ONCE: Final = 64
ANSWER_S: Final = 3.0
MATTERS_S: Final = 15.0
"""A driver's progress is news after this time; its phase and its rollouts are at once."""
_SLOWEST_S: Final = 30.0
_MAX_BYTES: Final = 4 << 20
_NONE: Final = Probe()


@dataclass(slots=True)
class _Asked:
    pod: str
    probe: Probe
    due: float
    told: Probe = _NONE
    told_at: float = 0.0


class Drivers:
    """All drivers.

    url: where a job's driver listens, with ``{service}``, ``{namespace}`` and ``{name}``; token: gives the bearer token
    of an owner; running: gives the owners whose driver runs now, with the UID of its pod: another pod is another
    driver, of which nothing is known yet; news: told the owners about which something is new.
    """

    def __init__(
        self,
        *,
        url: str,
        every_s: float,
        token: Callable[[Owner], str],
        running: Callable[[], Iterable[tuple[Owner, str]]],
        news: Callable[[Owner], None],
        asked: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        self._url = url
        self._every_s = every_s
        self._token = token
        self._running = running
        self._news = news
        self._asked_metric = asked
        self._known: dict[str, _Asked] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    def probe(self, uid: str) -> Probe:
        """Give what the driver of the job with this UID last said."""
        known = self._known.get(uid)
        return known.probe if known else _NONE

    async def ask(self, owner: Owner, path: str) -> None:
        """POST ``path`` to the driver. Raises DeadlineExceeded or Refused where it did not take it."""
        where = f"POST {self._base(owner)}{path}"
        headers = {"Authorization": f"Bearer {self._token(owner)}"}
        try:
            async with self._http().post(self._base(owner) + path, headers=headers) as response:
                if response.status >= 300:
                    raise Refused(f"HTTP {response.status}: {(await response.text())[:200]}", where=where)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise DeadlineExceeded(f"no answer: {_words(error)}", where=where) from error

    async def run(self) -> Never:
        """Ask every running driver again and again, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                begun = time.monotonic()
                running = {owner.uid: (owner, pod) for owner, pod in self._running()}
                for uid in self._known.keys() - running.keys():
                    del self._known[uid]
                for uid, (owner, pod) in running.items():
                    known = self._known.get(uid)
                    if known is None or known.pod != pod:
                        known = self._known[uid] = _Asked(pod, Probe(pod=pod), begun)
                    if known.due <= begun:
                        known.due = begun + self._every_s
                        await self._slots.acquire()
                        group.create_task(self._ask_status(owner, known))
                await asyncio.sleep(min(1.0, self._every_s))

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask_status(self, owner: Owner, known: _Asked) -> None:
        begun = time.monotonic()
        before = known.probe
        outcome = "failed"
        try:
            known.probe = Probe(status=await self._status(owner), at=time.time(), pod=known.pod)
            outcome = "ok"
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError, ProtocolError) as error:
            since = before.failing_since or time.time()
            known.probe = replace(before, error=f"the driver does not answer: {_words(error)}", failing_since=since)
            known.due = begun + min(_SLOWEST_S, self._every_s + (time.time() - since) / 2)
        finally:
            self._slots.release()
        self._asked_metric(outcome, time.monotonic() - begun)
        now = time.monotonic()
        late = known.probe.status != known.told.status and now - known.told_at >= MATTERS_S
        if late or _urgent(known.told, known.probe):
            known.told, known.told_at = known.probe, now
            self._news(owner)

    async def _status(self, owner: Owner) -> DriverStatus:
        async with self._http().get(f"{self._base(owner)}/v1/status") as response:
            if response.status != 200:
                raise ProtocolError(f"HTTP {response.status}")
            text = bytearray()
            async for chunk in response.content.iter_any():
                text += chunk
                if len(text) > _MAX_BYTES:
                    raise ProtocolError(f"more than {_MAX_BYTES} bytes")
        return DriverStatus.model_validate_json(bytes(text))

    def _base(self, owner: Owner) -> str:
        return self._url.format(service=service(owner.name, "driver"), namespace=owner.namespace, name=owner.name)

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=2 * AT_ONCE, ttl_dns_cache=30)
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session


def _urgent(told: Probe, probe: Probe) -> bool:
    """Say whether something changed for which nobody should wait: phase, rollouts, an end, or whether it answers."""
    old, new = told.status, probe.status
    if old is None or new is None:
        return old is not new or told.error != probe.error
    answers = bool(told.error) != bool(probe.error)
    states = [[(each.id, each.state) for each in status.rollouts] for status in (old, new)]
    return answers or (old.phase, old.attempt) != (new.phase, new.attempt) or states[0] != states[1]


def _words(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
