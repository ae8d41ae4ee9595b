"""Runs verbs in an event loop: one connection to each controller and unit, opened when first needed.

Invariant: what was begun together ends together; a verb whose caller was cancelled makes no further call but its
farewell, which nobody awaits and which ends before ``close`` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from asyncflow.errors import AsyncFlowError
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcClient
from asyncflow.queue.client.verbs import Ask, Farewell, Pause, Together, Verb, name_of

log = logging.getLogger(__name__)

T = TypeVar("T")


class Connections:
    """The controllers and the units, by resolvers; see ``QueueClient``."""

    def __init__(
        self,
        *,
        controller: str | Callable[[], str | None],
        unit: Callable[[int], str | None],
        keys: Keys | None,
        shard: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self._controller = RpcClient(name="queue client", resolve=controller, keys=keys)
        self._unit_address, self._shard_address = unit, shard
        self._units: dict[int, RpcClient] = {}
        self._keys = keys
        self._goodbyes: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close all."""
        if self._goodbyes:
            await asyncio.wait(self._goodbyes)
        for client in (self._controller, *self._units.values()):
            await client.close()

    async def run(self, verb: Verb[T]) -> T:
        """Do what ``verb`` yields; give its result."""
        farewell: Ask | None = None
        try:
            effect = next(verb)
            while True:
                if isinstance(effect, Farewell):
                    farewell, answer = effect.ask, None
                else:
                    try:
                        answer = await self._carry_out(effect)
                    except AsyncFlowError as error:
                        effect = verb.throw(error)
                        continue
                effect = verb.send(answer)
        except StopIteration as ended:
            result: T = ended.value
            return result
        except asyncio.CancelledError:
            if farewell is not None:
                self._say(farewell)
            raise
        finally:
            verb.close()

    async def _carry_out(self, effect: Ask | Pause | Together) -> Any:
        match effect:
            case Ask():
                client = self._controller if effect.unit is None else self._unit(effect.unit)
                return await client.call_frames(
                    effect.method, effect.request, effect.reply, timeout=effect.timeout, frames=effect.frames
                )
            case Pause():
                await asyncio.sleep(effect.seconds)
                return None
            case Together():
                return await self._together(effect)

    async def _together(self, effect: Together) -> list[Any]:
        tasks = [asyncio.create_task(self.run(verb)) for verb in effect.verbs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _say(self, farewell: Ask) -> None:
        async def say() -> None:
            try:
                await self._carry_out(farewell)
            except AsyncFlowError as error:
                log.info("%s was not heard: %s", farewell.method, error)

        task = asyncio.create_task(say(), name=farewell.method)
        self._goodbyes.add(task)
        task.add_done_callback(self._goodbyes.discard)

    def _address(self, peer: int) -> str | None:
        return self._unit_address(peer) if peer >= 0 else self._shard_address(-peer)

    def _unit(self, index: int) -> RpcClient:
        if index not in self._units:
            name = f"queue client of {name_of(index)}"
            self._units[index] = RpcClient(name=name, resolve=lambda: self._address(index), keys=self._keys)
        return self._units[index]
