"""A stream to one peer, with the face of ``wire.Wire``.

Invariant: what is sent before the stream is there waits; a stream that was there and broke is not made again.
"""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Callable, Hashable, Sequence

from asyncflow.errors import AsyncFlowError
from asyncflow.net import arena_socket
from asyncflow.net.flow import SILENT, UNSHAKEN, Deliver, Flow, host_and_port, tune
from asyncflow.net.frames import Buffer
from asyncflow.net.sealed import WELCOME_SIZE, Handshake
from asyncflow.net.stream import Inbox, Outbox, staging

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_CONNECT_S = 3.0


class Calling:
    """A stream to ``address``, tried again until it is there. What is sent before waits.

    state: told how the connection is, in words; lost: told why, once, when it was there and is gone.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes | None,
        most: int,
        deliver: Deliver,
        state: Callable[[str], None],
        lost: Callable[[AsyncFlowError], None],
    ) -> None:
        self.closed = False
        self._address = address
        self._to = host_and_port(address)
        self._secret = secret
        self._most = most
        self._deliver = deliver
        self._state = state
        self._lost = lost
        self._flow: Flow | None = None
        self._waiting: dict[Hashable, Sequence[Buffer]] = {}
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect(), name=f"connect to {address}")

    def send(self, key: Hashable, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` now, or as soon as the stream takes them; ``key`` names the message for ``withdraw``."""
        outbox = self._flow.outbox if self._flow is not None else None
        if self._flow is None or outbox is None:
            self._waiting[key] = parts
        else:
            outbox.push(key, parts)
            self._flow.flush()

    def withdraw(self, key: Hashable) -> bool:
        """Take back the message ``key`` if nothing of it has left yet, and say whether that was so."""
        outbox = self._flow.outbox if self._flow is not None else None
        return self._waiting.pop(key, None) is not None or (outbox is not None and outbox.withdraw(key))

    def close(self) -> None:
        """Close the stream at once; what was not sent is dropped."""
        self.closed = True
        self._connecting.cancel()
        self._waiting.clear()
        if self._flow is not None:
            self._flow.close()

    async def _connect(self) -> None:
        """Try until the stream is there."""
        pause = _FIRST_PAUSE_S
        near = True
        while True:
            nearby = arena_socket.dialled(self._address) if near else None
            socket = nearby or sockets.socket()
            socket.setblocking(False)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    if nearby is None:
                        await self._loop.sock_connect(socket, self._to)
                    if await self._opened(socket):
                        self._state(SILENT)
                        return
                self._state(UNSHAKEN)
            except ConnectionRefusedError:
                self._state("nobody listens there")
            except TimeoutError:
                self._state("nobody answers there")
            except OSError as error:
                self._state(str(error))
            finally:
                if self._flow is None or self._flow.closed:
                    socket.close()
            near = nearby is None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _opened(self, socket: sockets.socket) -> bool:
        """Shake hands, and say whether it worked."""
        tune(socket)
        handshake, shaken = Handshake(self._secret), self._loop.create_future()
        socket.send(handshake.hello)

        def shake(welcome: bytes) -> tuple[Inbox, Outbox]:
            socket.send(handshake.welcomed(welcome))
            inbox, outbox = arena_socket.boxes(
                socket, incoming=handshake.incoming, outgoing=handshake.outgoing, most=self._most, staging=staging()
            )
            for key, parts in self._waiting.items():
                outbox.push(key, parts)
            self._waiting.clear()
            shaken.set_result(True)
            return inbox, outbox

        def lost(why: AsyncFlowError) -> None:
            if shaken.done():
                self._lost(why)
            else:
                shaken.set_result(False)

        flow = self._flow = Flow(socket, size=WELCOME_SIZE, shake=shake, deliver=self._deliver, lost=lost)
        try:
            opened: bool = await shaken
        finally:
            if flow.outbox is None:
                flow.close()
        flow.flush()
        return opened
