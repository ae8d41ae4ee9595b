"""Keeps one claim parked at the queue that says what the instance wants now.

The claim stays for as long as what it says is right: when the instance has swapped, filled up or staged another
version, it is withdrawn and a new one takes its place, so that nothing waits for a claim to time out.

Invariants: at most one claim of a purpose is out; whatever it gives reaches ``got``, also when it was being withdrawn,
and no row is given back only because a claim was met in that moment.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from asyncflow.errors import AsyncFlowError
from asyncflow.flow.instance import Ask, Instance, Purpose
from asyncflow.net.retry import Outage
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rollout.job import RolloutSettings

_PARKED_S = 0.05
_BACKLOG = 4
_WITHDRAW_S = 5.0


class Claimer:
    """Claims for one purpose.

    got: takes the rows; parked: told when a claim finds nothing ready; backlog: samples generated but not delivered,
    of which an instance claims no more than some times its slots; slots: of the engine.
    """

    def __init__(
        self,
        purpose: Purpose,
        *,
        queue: QueueClient,
        instance: Instance,
        settings: RolloutSettings,
        slots: int,
        got: Callable[[list[LeasedRow]], None],
        parked: Callable[[Purpose], None],
        backlog: Callable[[], int],
    ) -> None:
        self.changed = asyncio.Event()
        self._purpose = purpose
        self._partition = settings.train if purpose == "train" else settings.eval
        self._queue = queue
        self._instance = instance
        self._settings = settings
        self._slots = slots
        self._got = got
        self._parked = parked
        self._backlog = backlog
        self._outage = Outage(f"claiming {purpose} rows")

    async def run(self) -> None:
        """Claim for ever."""
        while True:
            self.changed.clear()
            ask = self._ask()
            if ask is None:
                await self.changed.wait()
                continue
            try:
                await self._claim(ask)
            except AsyncFlowError as error:
                await self._outage.wait(error)
            else:
                self._outage.end()

    def _ask(self) -> Ask | None:
        return None if self._backlog() > _BACKLOG * self._slots else self._instance.ask(self._purpose)

    async def _claim(self, ask: Ask) -> None:
        """Claim until rows come, the time is over, or the instance would ask for something else."""
        ticket = uuid.uuid4().hex
        claim = asyncio.create_task(self._take(ask, ticket))
        claim.add_done_callback(lambda _: self.changed.set())
        try:
            await self._outlive(claim, ask)
            if not claim.done():
                await self._queue.withdraw(
                    ticket, partition=self._partition, task=self._settings.task, timeout=_WITHDRAW_S
                )
                await asyncio.wait((claim,), timeout=_WITHDRAW_S)
        finally:
            claim.cancel()
            await asyncio.wait((claim,))
        if not claim.cancelled():
            claim.result()

    async def _take(self, ask: Ask, ticket: str) -> None:
        """Claim a quarter of the slots at most, so that instances that ask together share what there is.

        Rows are handed on in the step in which they come: no cancellation finds them in between.
        """
        rows = await self._queue.claim(
            partition=self._partition,
            task=self._settings.task,
            max_rows=min(ask.rows, max(1, self._slots // 4)),
            version=ask.version,
            accept=ask.accept,
            timeout=self._settings.park_s,
            ticket=ticket,
        )
        if rows:
            self._got(rows)

    async def _outlive(self, claim: asyncio.Task[None], ask: Ask) -> None:
        """Wait until ``claim`` is done or says what is no longer right; tell once that it is parked."""
        patience: float | None = _PARKED_S
        while not claim.done():
            try:
                async with asyncio.timeout(patience):
                    await self.changed.wait()
            except TimeoutError:
                patience = None
                self._parked(self._purpose)
                continue
            self.changed.clear()
            now = self._ask()
            if now is None or (now.version, now.accept) != (ask.version, ask.accept):
                return
