"""Weights on one host: a peer maps the memory of a version, and no bytes are sent.

The memory of versions is an unnamed file (memfd). The worker's *door* is a Unix socket in the abstract namespace with
an unguessable name. A process of the same user that knows the name receives the descriptor of a block, for reading.
Published weights lie in host memory on every kind of device, so this works the same on CPUs, GPUs and NPUs.

Invariants: both sides check that the other one runs as the same user. No block ever becomes shorter, so no access to it
fails. A peer cannot write through the descriptor. The name of a door disappears with its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import socket
import struct
import uuid
from collections.abc import Sequence
from typing import Any

from asyncflow.errors import PeerLost, ProtocolError
from asyncflow.rpc.listener import Listener
from asyncflow.rpc.shm import is_same_user
from asyncflow.weights.placed_transport import Block, PlacedLine, PlacedTransport, Pointer, address_of

_log = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_REQUEST = struct.Struct("!Q")
_GRANTED, _UNKNOWN = b"+", b"-"
_ANSWER_S = 2.0
_MOST = 64
"""Maximum number of simultaneous peers."""


class IpcTransport(PlacedTransport):
    """Weights between processes of one host, by shared memory. Options as in ``FastTransport``."""

    sends = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listener: Listener | None = None

    async def prepare(self) -> None:
        """Listen at the door."""
        self.door = f"asyncflow-weights/{uuid.uuid4().hex}"
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(_name(self.door))
        bound.listen(_MOST)
        self._listener = Listener(
            [bound],
            most=_MOST,
            share=1.0,
            handshake=self._send_descriptor,
            connected=lambda: 0,
            make_room=lambda: False,
            refused=lambda refused: _log.warning("memory of weights is not passed to a peer: %s", refused),
        )

    async def close(self) -> None:
        """Close the door. Memory that peers have mapped stays as long as they map it."""
        await super().close()
        if self._listener is not None:
            self._listener.close()
        for block in self.pool.blocks.values():
            os.close(block.file)
        self.pool.blocks.clear()

    def make(self, nbytes: int) -> Block:
        """Create a file that peers can map. Raises OSError."""
        file = os.memfd_create("asyncflow-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, nbytes)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(file, nbytes)
        except BaseException:
            os.close(file)
            raise
        return Block(mapping, address_of(memoryview(mapping)), nbytes, file)

    async def reach(
        self, door: str, pointers: Sequence[Pointer], sizes: Sequence[int], line: PlacedLine
    ) -> list[memoryview]:
        """Return views of a peer's memory, each block mapped once per pull. Raises PeerLost or ProtocolError."""
        for block in {pointer.block for pointer in pointers} - line.seen.keys():
            line.seen[block] = await _map_block(door, block)
        frames = [
            line.seen[pointer.block][pointer.offset : pointer.offset + size]
            for pointer, size in zip(pointers, sizes, strict=True)
            if pointer.offset >= 0
        ]
        if [frame.nbytes for frame in frames] != list(sizes):
            raise ProtocolError("the regions do not lie inside the memory of the source", where=door)
        return frames

    async def _send_descriptor(self, peer: socket.socket) -> None:
        """Send the descriptor of the block that a peer requests."""
        with peer, contextlib.suppress(OSError, TimeoutError):
            if not is_same_user(peer):
                return
            async with asyncio.timeout(_ANSWER_S):
                request = await asyncio.get_running_loop().sock_recv(peer, _REQUEST.size)
            block = self.pool.blocks.get(_REQUEST.unpack(request)[0]) if len(request) == _REQUEST.size else None
            if block is None:
                peer.send(_UNKNOWN)
                return
            reading = os.open(f"/proc/self/fd/{block.file}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(peer, [_GRANTED], [reading])
            finally:
                os.close(reading)


async def _map_block(door: str, block: int) -> memoryview:
    """Map a peer's block for reading, and return its bytes."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await loop.sock_connect(peer, _name(door))
                if not is_same_user(peer):
                    raise PeerLost("the source runs as another user", where=door)
                await loop.sock_sendall(peer, _REQUEST.pack(block))
                answer, file = await _receive(loop, peer)
        except (OSError, TimeoutError) as error:
            raise PeerLost(f"the source is not on this host, or does not reply: {error!r}", where=door) from error
    if answer != _GRANTED or file is None:
        raise PeerLost("the source refuses access to its memory", where=door)
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ProtocolError("the memory of the source can become shorter", where=door)
        return memoryview(mmap.mmap(file, os.fstat(file).st_size, access=mmap.ACCESS_READ))
    except OSError as error:
        raise PeerLost(f"the memory of the source cannot be mapped: {error}", where=door) from error
    finally:
        os.close(file)


async def _receive(loop: asyncio.AbstractEventLoop, peer: socket.socket) -> tuple[bytes, int | None]:
    """Wait for one byte and the descriptor that may accompany it."""
    ready = asyncio.Event()
    loop.add_reader(peer, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(peer)
    answer, files, _, _ = socket.recv_fds(peer, len(_GRANTED), 1, socket.MSG_CMSG_CLOEXEC)
    return answer, files[0] if files else None


def _name(door: str) -> bytes:
    return b"\0" + door.encode()
