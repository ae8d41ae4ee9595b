"""Kubernetes events about custom resources, for ``kubectl describe``.

Invariants: each owner and message has one event object, however often it is recorded; a repetition only increases its
count, and is written at most every ``REPEAT_S`` seconds. An event that cannot be written stops nothing. If the server
has not accepted an event before the deadline, all events are dropped for ``QUIET_S`` seconds, because a reconciliation
may have hundreds of them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from asyncflow.api.names import API_VERSION, FIELD_MANAGER
from asyncflow_operator.actions import Note
from asyncflow_operator.cluster.client import Api, ApiError, Json, Refusal, Unreachable
from asyncflow_operator.cluster.kinds import EVENT
from asyncflow_operator.observed import Owner

REPEAT_S: Final = 10.0
QUIET_S: Final = 60.0
_REMEMBERED: Final = 4096
_MESSAGE_CHARACTERS: Final = 1024

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recorded:
    count: int
    at: float


class Recorder:
    """Writer of events. reporter: name of this process in the events."""

    def __init__(self, api: Api, *, reporter: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._reporter = reporter
        self._clock = clock
        self._quiet_until = 0.0
        self._recorded: OrderedDict[str, _Recorded] = OrderedDict()

    async def record(self, owner: Owner, note: Note) -> None:
        """Write ``note`` as an event about ``owner``, or increase the count of its event."""
        name = name_of(owner, note)
        recorded = self._recorded.get(name)
        now = self._clock()
        if now < self._quiet_until:
            return
        if recorded is not None:
            recorded.count += 1
            if now - recorded.at < REPEAT_S:
                return
        try:
            count = await self._write(owner, note, name, recorded)
        except ApiError as error:
            if isinstance(error, Unreachable):
                self._quiet_until = self._clock() + QUIET_S
            _log.warning(
                "could not write an event", extra={"object": f"{owner.namespace}/{owner.name}", "why": str(error)}
            )
            return
        self._recorded[name] = _Recorded(count, now)
        self._recorded.move_to_end(name)
        if len(self._recorded) > _REMEMBERED:
            self._recorded.popitem(last=False)

    async def _write(self, owner: Owner, note: Note, name: str, recorded: _Recorded | None) -> int:
        """Write the event, and return its count."""
        stamp = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        if recorded is not None:
            repeated = {"count": recorded.count, "lastTimestamp": stamp}
            try:
                await self._api.merge(EVENT, owner.namespace, name, repeated)
            except Refusal as refused:
                if not refused.absent:
                    raise
            else:
                return recorded.count
        try:
            await self._api.create(EVENT, owner.namespace, self._event(owner, note, name, stamp))
        except Refusal as refused:
            if not refused.conflict:
                raise
            existing = await self._api.merge(EVENT, owner.namespace, name, {"lastTimestamp": stamp})
            return int(existing.get("count") or 1)
        return 1

    def _event(self, owner: Owner, note: Note, name: str, stamp: str) -> Json:
        about = {"apiVersion": API_VERSION, "kind": owner.kind, "namespace": owner.namespace, "name": owner.name}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": owner.namespace},
            "involvedObject": about | {"uid": owner.uid},
            "type": note.type,
            "reason": note.reason,
            "message": note.message[:_MESSAGE_CHARACTERS],
            "count": 1,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._reporter,
        }


def name_of(owner: Owner, note: Note) -> str:
    """Return the name of the event object for this owner and note."""
    text = "\n".join((owner.uid, note.type, note.reason, note.message))
    return f"{owner.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
