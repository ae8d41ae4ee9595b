"""Objects of the cluster that jobs refer to, read in the background: flavors that Kueue has given, classes of priority.

Invariant: what nobody asks for is neither read nor remembered; what is asked for is read again now and then, and a look
at a job never waits for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Never

from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.kinds import REFERRED
from asyncflow_operator.cluster.refusals import ApiError
from asyncflow_operator.observe import Key
from asyncflow_operator.observed import Found, Ref

FRESH_S: Final = 60.0
"""Seconds after which an object is read again."""
RETRY_S: Final = 5.0
"""The same of one that could not be read."""
_LOOK_S: Final = 0.5
_KINDS: Final = {kind.name: kind for kind in REFERRED}
_READ: Final = ("spec", "value")


@dataclass(slots=True)
class _Known:
    """asked: when each job asked last, by the monotonic clock; due: when to read again."""

    asked: dict[Key, float] = field(default_factory=dict)
    found: Found | None = None
    due: float = 0.0


class Lookups:
    """All of them. news: told each job for which something is new; keep_s: how long a job is told after it last asked,
    longer than between two looks at it.
    """

    def __init__(self, api: Api, *, news: Callable[[Key], None], keep_s: float) -> None:
        self._api = api
        self._keep_s = keep_s
        self._news = news
        self._known: dict[Ref, _Known] = {}
        self._wanted = asyncio.Event()

    def find(self, ref: Ref, *, by: Key) -> Found | None:
        """Return an object as it was last read, None where it has yet to be. by: the job that asks."""
        known = self._known.get(ref)
        if known is None:
            known = self._known[ref] = _Known()
            self._wanted.set()
        known.asked[by] = time.monotonic()
        return known.found

    async def run(self) -> Never:
        """Read what is asked for, until cancelled."""
        while True:
            self._wanted.clear()
            now = time.monotonic()
            for ref, known in list(self._known.items()):
                known.asked = {key: asked for key, asked in known.asked.items() if now - asked <= self._keep_s}
                if not known.asked:
                    del self._known[ref]
                elif known.due <= now:
                    await self._read(ref, known)
            waits = asyncio.create_task(self._wanted.wait())
            await asyncio.wait([waits], timeout=_LOOK_S)
            waits.cancel()

    async def _read(self, ref: Ref, known: _Known) -> None:
        kind = _KINDS[ref.kind]
        try:
            await self._api.settle(kind)
            raw = await self._api.get(kind, "", ref.name)
            found = Found(content={name: raw[name] for name in _READ if name in raw})
        except ApiError as error:
            found = Found(problem=error.what)
        known.due = time.monotonic() + (RETRY_S if found.problem else FRESH_S)
        if found != known.found:
            known.found = found
            for key in known.asked:
                self._news(key)
