"""Polling of the jobs' drivers in the background, and orders to them.

Invariants: a reconcile never waits for a driver, neither for its status nor for an order. A driver runs code of a
tenant, so it gets one request at a time, its answer is limited to the size that a job with its rollouts needs, and slow
drivers share separate slots so that they do not delay fast ones. A driver that does not answer is polled less often,
but never dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Never

from pydantic import ValidationError

from asyncflow.api.base import MOST_REPLICAS
from asyncflow.api.names import PUBLISHER
from asyncflow.api.status import DriverStatus
from asyncflow.errors import AsyncFlowError, ProtocolError, Refused
from asyncflow.identity import ProcessIdentity
from asyncflow_operator.exchange import HEAD_BYTES, TlsIdentities, exchange
from asyncflow_operator.observed import DriverProbe, Owner
from asyncflow_operator.worklist import backoff

LEADERS: Final = ("driver", PUBLISHER)
"""Roles that answer ``GET /v1/status``. A publisher answers like a driver, with the state of its versions."""
AT_ONCE: Final = 32
"""Concurrent exchanges with fast drivers, and the same number with slow ones."""
FAST_S: Final = 0.5
"""A driver is fast if it has been known for ``PROVEN_S`` seconds and no exchange since then took longer than this."""
PROVEN_S: Final = 60.0
FAST_ANSWER_S: Final = 1.0
ANSWER_S: Final = 3.0
"""Seconds for a whole exchange: with a fast driver, and with any other."""
MATTERS_S: Final = 15.0
"""Seconds between two reports of a driver's progress; changes of phase and rollouts are reported immediately."""
ROLLOUT_BYTES: Final = 256
STATUS_BYTES: Final = 12 * HEAD_BYTES
"""Bytes of an answer: for each rollout in it, and for everything else; 2.6 MiB at ``MOST_REPLICAS``."""
SPARE_ROLLOUTS: Final = 64
_ORDER_BYTES: Final = 2 * HEAD_BYTES
_RETRY_S: Final = 2.0
_LONGEST_RETRY_S: Final = 60.0
"""Seconds until a job whose driver did not accept an order is reconciled again, doubled with each failure in a row."""
_LOOK_S: Final = 1.0
"""Seconds between two readings of the list of running drivers."""
_SLOWEST_S: Final = 30.0
_PAUSE_FACTOR: Final = 9.0
"""Shortest pause before the next poll of a driver, in multiples of the time of its last answer."""
_TEXT_BYTES: Final = 200
_NONE: Final = DriverProbe()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDriver:
    """A running driver. pod: UID of its pod; host: address of the pod; rollouts: number of its job's rollout pods."""

    owner: Owner
    pod: str
    host: str
    rollouts: int


@dataclass(slots=True)
class _Known:
    """Record of one driver.

    due: time of the next poll; slow_at: time of its last slow exchange, or of its first observation.
    rollouts: largest number of rollouts that its job has had at a time.
    orders: paths to POST, in order; ``ordered`` is set while there are any; declined: refused orders in a row.
    """

    driver: RunningDriver
    probe: DriverProbe
    due: float
    slow_at: float
    rollouts: int = 0
    orders: dict[str, None] = field(default_factory=dict)
    ordered: asyncio.Event = field(default_factory=asyncio.Event)
    declined: int = 0
    reported: DriverProbe = _NONE
    reported_at: float = 0.0
    following: asyncio.Task[Never] = field(init=False)


class Drivers:
    """Pollers of all drivers.

    url, control_url: URLs of a driver's status and control service, with ``{host}``, ``{namespace}`` and ``{name}``.
    certificate: returns the files of the operator's certificate for a job.
    running: returns the running drivers; a new pod counts as a new driver without a status.
    changed: called with the owner of each driver that has a change to report or did not accept an order.
    probed: called with outcome and seconds of each status request; ordered: called with the outcome of each order.
    """

    def __init__(
        self,
        *,
        url: str,
        control_url: str,
        every_s: float,
        certificate: Callable[[Owner], Mapping[str, bytes]],
        running: Callable[[], Iterable[RunningDriver]],
        changed: Callable[[Owner], None],
        probed: Callable[[str, float], None] = lambda *_: None,
        ordered: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._url = url
        self._control_url = control_url
        self._every_s = every_s
        self._certificate = certificate
        self._running = running
        self._changed = changed
        self._probed = probed
        self._ordered = ordered
        self._known: dict[str, _Known] = {}
        self._fast = asyncio.Semaphore(AT_ONCE)
        self._slow = asyncio.Semaphore(AT_ONCE)

    def probe(self, uid: str) -> DriverProbe:
        """Return the last answer of the driver of the job with the UID ``uid``."""
        known = self._known.get(uid)
        return known.probe if known else _NONE

    def order(self, owner: Owner, path: str) -> None:
        """Queue a POST of ``path`` to the driver. If the driver refuses it, ``changed`` is called after a pause."""
        known = self._known.get(owner.uid)
        if known is None:
            self._order_failed(owner, path, why="no running driver is known", declined=0)
            return
        known.orders[path] = None
        known.ordered.set()

    async def run(self) -> Never:
        """Poll every running driver, and send orders, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                running = {driver.owner.uid: driver for driver in self._running()}
                for uid, known in list(self._known.items()):
                    if uid not in running or running[uid].pod != known.driver.pod:
                        known.following.cancel()
                        del self._known[uid]
                for uid, driver in running.items():
                    known = self._known.get(uid) or self._start(driver, group)
                    known.driver = driver
                    known.rollouts = max(known.rollouts, driver.rollouts)
                await asyncio.sleep(min(_LOOK_S, self._every_s))

    def _start(self, driver: RunningDriver, group: asyncio.TaskGroup) -> _Known:
        known = _Known(driver, DriverProbe(pod=driver.pod), due=0.0, slow_at=time.monotonic())
        known.following = group.create_task(self._follow(known))
        self._known[driver.owner.uid] = known
        return known

    async def _follow(self, known: _Known) -> Never:
        """Poll one driver when it is due, and send its orders immediately; both wait for a free slot."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, known.due - time.monotonic())):
                    await known.ordered.wait()
            fast = time.monotonic() - known.slow_at >= PROVEN_S
            async with self._fast if fast else self._slow:
                started = time.monotonic()
                within_s = FAST_ANSWER_S if fast else ANSWER_S
                if known.orders:
                    await self._send_order(known, within_s)
                else:
                    await self._poll(known, within_s)
                if time.monotonic() - started > FAST_S:
                    known.slow_at = time.monotonic()

    async def _send_order(self, known: _Known, within_s: float) -> None:
        """POST the first order. If it is not accepted, drop all orders: the next reconciliation queues them again."""
        owner, path = known.driver.owner, next(iter(known.orders))
        try:
            await self._post(known.driver, path, within_s)
        except AsyncFlowError as error:
            known.orders.clear()
            self._order_failed(owner, path, why=str(error), declined=known.declined)
            known.declined += 1
        else:
            del known.orders[path]
            known.declined = 0
            self._ordered("ok")
            _log.info("the driver accepted an order", extra={"object": _name(owner), "target": path})
        if not known.orders:
            known.ordered.clear()

    async def _post(self, driver: RunningDriver, path: str, within_s: float) -> None:
        owner = driver.owner
        tls = TlsIdentities(files=self._certificate(owner), peer=ProcessIdentity(owner.uid, "driver", 0).uri)
        url = _at(self._control_url, driver) + path
        answer = await exchange("POST", url, limit=_ORDER_BYTES, within_s=within_s, tls=tls)
        if answer.status >= 300:
            text = answer.body[:_TEXT_BYTES].decode(errors="replace")
            raise Refused(f"HTTP {answer.status}: {text}", where=f"POST {url}")

    def _order_failed(self, owner: Owner, path: str, *, why: str, declined: int) -> None:
        self._ordered("failed")
        _log.warning("the driver did not accept an order", extra={"object": _name(owner), "target": path, "why": why})
        pause_s = backoff(declined + 1, first_s=_RETRY_S, longest_s=_LONGEST_RETRY_S)
        asyncio.get_running_loop().call_later(pause_s, self._changed, owner)

    async def _poll(self, known: _Known, within_s: float) -> None:
        started = time.monotonic()
        try:
            status = await self._status(known, within_s)
        except AsyncFlowError as error:
            now = time.time()
            since = min(known.probe.failing_since or now, now)
            message = f"the driver does not answer: {error.what}"
            known.probe = replace(known.probe, error=message, failing_since=since)
            wait_s = min(_SLOWEST_S, self._every_s + (now - since) / 2)
        else:
            known.probe = DriverProbe(status=status, at=time.time(), pod=known.driver.pod)
            wait_s = self._every_s
        ended = time.monotonic()
        known.due = max(started + wait_s, ended + min(_SLOWEST_S, _PAUSE_FACTOR * (ended - started)))
        self._probed("failed" if known.probe.error else "ok", ended - started)
        late = known.probe.status != known.reported.status and ended - known.reported_at >= MATTERS_S
        if late or _urgent(known.reported, known.probe):
            known.reported, known.reported_at = known.probe, ended
            self._changed(known.driver.owner)

    async def _status(self, known: _Known, within_s: float) -> DriverStatus:
        """Return the driver's status, which may list rollouts whose pods have already been deleted."""
        rollouts = min(2 * known.rollouts + SPARE_ROLLOUTS, MOST_REPLICAS)
        limit = STATUS_BYTES + rollouts * ROLLOUT_BYTES
        answer = await exchange("GET", f"{_at(self._url, known.driver)}/v1/status", limit=limit, within_s=within_s)
        if answer.status != 200:
            raise ProtocolError(f"HTTP {answer.status}")
        try:
            status = DriverStatus.model_validate_json(answer.body)
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)[0]
            path = ".".join(map(str, wrong["loc"]))
            raise ProtocolError(f"{path}: {wrong['msg']}"[:_TEXT_BYTES]) from error
        if len(status.rollouts) > rollouts:
            raise ProtocolError(f"{len(status.rollouts)} rollouts listed, of a job that has had {known.rollouts}")
        return status


def _at(url: str, driver: RunningDriver) -> str:
    host = f"[{driver.host}]" if ":" in driver.host else driver.host
    return url.format(host=host, namespace=driver.owner.namespace, name=driver.owner.name)


def _name(owner: Owner) -> str:
    return f"{owner.kind}/{owner.namespace}/{owner.name}"


def _urgent(reported: DriverProbe, probe: DriverProbe) -> bool:
    """Return whether a change must be reported immediately: of phase, attempt, rollouts, or whether it answers."""
    old, new = reported.status, probe.status
    if old is None or new is None:
        return old is not new or reported.error != probe.error
    answers = bool(reported.error) != bool(probe.error)
    states = [[(each.id, each.state) for each in status.rollouts] for status in (old, new)]
    return answers or (old.phase, old.attempt) != (new.phase, new.attempt) or states[0] != states[1]
