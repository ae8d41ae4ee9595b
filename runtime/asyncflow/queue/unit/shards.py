"""Verdicts of shards: a put under a lease that a shard gave is that shard's to decide.

Each shard is asked on its own, for everything that came since it last answered, and again until it answers; so one that
is stopped holds up only those who write under its leases.

Invariant: a shard hears of a put until it has decided, or the unit has given the put up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost
from asyncflow.net.keys import Keys
from asyncflow.net.retry import delays
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.protocol.shard_calls import AdmitCells, controller_of
from asyncflow.queue.protocol.unit_calls import Admitted, NewCells, Verdict
from asyncflow.queue.unit.pieces import Put

Decided = Callable[[Put, Verdict], None]

_CALL_S = 10.0
_PUTS = 500


class Shards:
    """All shards for which puts have come. address: of the controller with a number; decided: told verdicts."""

    def __init__(self, *, name: str, address: Callable[[int], str | None], keys: Keys | None, decided: Decided) -> None:
        self._name = name
        self._address = address
        self._keys = keys
        self._decided = decided
        self._shards: dict[int, _Shard] = {}

    def ask(self, put: Put) -> None:
        """Have the shard whose lease it names decide about a put."""
        index = controller_of(put.entry.lease) if isinstance(put.entry, NewCells) else 0
        shard = self._shards.get(index)
        if shard is None:
            client = RpcClient(name=f"{self._name} to {index}", resolve=lambda: self._address(index), keys=self._keys)
            shard = self._shards[index] = _Shard(client, self._decided)
        shard.waiting[put] = None
        shard.ask_on()

    async def close(self) -> None:
        """Ask no more."""
        for shard in self._shards.values():
            await shard.close()


class _Shard:
    """One of them. waiting: puts about which it has not decided."""

    def __init__(self, client: RpcClient, decided: Decided) -> None:
        self.waiting: dict[Put, None] = {}
        self._client = client
        self._decided = decided
        self._asking = False
        self._again: asyncio.TimerHandle | None = None
        self._waits = delays()

    async def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._asking = True
        await self._client.close()

    def ask_on(self) -> None:
        """Ask for what is not decided yet, unless the answer to an earlier call will do so."""
        for put in [put for put in islice(self.waiting, _PUTS) if put.verdict.done()]:
            del self.waiting[put]
        puts = list(islice(self.waiting, _PUTS))
        if self._asking or not puts:
            return
        self._asking = True
        entries = [put.entry for put in puts if isinstance(put.entry, NewCells)]

        def answered(answer: Admitted | AsyncFlowError) -> None:
            self._asking = False
            if isinstance(answer, PeerLost | DeadlineExceeded):
                self._asking = True
                self._again = asyncio.get_running_loop().call_later(next(self._waits), self._begin_anew)
                return
            self._waits = delays()
            if isinstance(answer, AsyncFlowError):
                verdicts = [Verdict([], answer.to_wire())] * len(puts)
            else:
                verdicts = answer.verdicts
            for put, verdict in zip(puts, verdicts, strict=True):
                self.waiting.pop(put, None)
                self._decided(put, verdict)
            self.ask_on()

        self._client.ask("shards.admit", AdmitCells(entries), Admitted, timeout=_CALL_S, done=answered)

    def _begin_anew(self) -> None:
        self._asking = False
        self.ask_on()
