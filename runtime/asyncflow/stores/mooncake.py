"""Mooncake Store, so wrapped that none of its traps can be stepped into. Every call blocks: use it from threads.

The traps (``docs/queue-backends.md``): ``get`` hides every error, a put over an existing key keeps the old value and
says that it went well, empty values are not stored, a client that is not set up or was closed ends the process with
SIGSEGV, one whose queue to a peer ran over fails for ever, and a read that names a key twice fills one place and says
that it filled both. Those of setting a client up are ``mooncake_clients``' to know.

Invariants: values are written under keys that are new, hard pinned, from and into buffers that stay registered as long
as a transfer may use them; no call has more than ``MOST_KEYS`` keys; each key has a return code, and nothing is taken
for done without it; a removal is never forced.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from asyncflow.errors import AsyncFlowError
from asyncflow.stores.mooncake_clients import Buffer, Client, Clients

log = logging.getLogger(__name__)

MOST_KEYS: Final = 512
BUFFER_BYTES: Final = 16 << 20

NO_ROOM: Final = -200
NOT_THERE: Final = -704
_LEASED: Final = frozenset((-703, -706))
"""It is being written, or read."""
_GONE: Final = -900
NO_ANSWER: Final = frozenset((_GONE, -901))
"""Of the master: it is gone, or has said nothing for 30 s."""


class Mooncake:
    """Access to a store.

    host: the address of this process; master: gives that of the master as HOST:PORT, None while there is none;
    segment_bytes: what this process offers to the store, which is nothing for who only uses it.
    """

    def __init__(self, *, host: str, master: Callable[[], str | None], segment_bytes: int = 0) -> None:
        self._clients = Clients(host=host, master=master, segment_bytes=segment_bytes)
        self._mine = threading.local()
        pinned = self._clients.library.ReplicateConfig()
        pinned.replica_num = 1
        pinned.with_hard_pin = True
        self._pinned = pinned

    @property
    def master(self) -> str | None:
        """The master with which a client is set up now, None while there is none."""
        return self._clients.master

    def connect(self) -> None:
        """Set up a client with the master as it is now, where there is none. Raises PeerLost."""
        with self._clients.using():
            pass

    def put(self, keys: Sequence[str], sizes: Sequence[int], fill: Callable[[Buffer], None]) -> list[int]:
        """Store values of these sizes under new keys; ``fill`` writes them back to back. 0: it is stored."""
        _check(keys, sizes)
        with self._clients.using() as client, self._buffer(client, sum(sizes)) as buffer:
            fill(buffer[: sum(sizes)])
            codes = client.store.batch_put_from(list(keys), _pointers(buffer, sizes), list(sizes), self._pinned)
            return self._judge(client, codes, len(keys))

    def get(self, keys: Sequence[str], sizes: Sequence[int], take: Callable[[int, memoryview], bool]) -> list[int]:
        """Read values of these sizes, each given to ``take`` with its number. Its size: it was read and taken."""
        _check(keys, sizes)
        with self._clients.using() as client, self._buffer(client, sum(sizes)) as buffer:
            pointers = _pointers(buffer, sizes)

            def read() -> list[int]:
                codes = client.store.batch_get_into(list(keys), pointers, list(sizes))
                return self._judge(client, codes, len(keys))

            codes = _again(read)
            begins = np.cumsum([0, *sizes]).tolist()
            view = buffer.data
            for number, (code, size, begin) in enumerate(zip(codes, sizes, begins, strict=False)):
                if code >= 0 and not (code == size and take(number, view[begin : begin + size])):
                    codes[number] = NOT_THERE
            return codes

    def holders(self, keys: Sequence[str]) -> list[str]:
        """Return the segment in which each value lies, "" for one that the master does not know."""
        _check(keys, keys)
        with self._clients.using() as client:
            known = client.store.batch_get_replica_desc(list(keys))
            return [_segment(known.get(key)) for key in keys]

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove values. 0: it is gone."""
        _check(keys, keys)
        with self._clients.using() as client:
            return _again(lambda: [int(code) for code in client.store.batch_remove(list(keys))])

    def remove_matching(self, pattern: str) -> int:
        """Remove the values whose keys match a regular expression and that nobody reads; give their number."""
        with self._clients.using() as client:
            return int(client.store.remove_by_regex(pattern))

    def close(self) -> None:
        """Use the store no longer; a client that is in use is closed by its last user."""
        self._clients.close()

    @contextmanager
    def _buffer(self, client: Client, size: int) -> Iterator[Buffer]:
        """Yield at least ``size`` bytes that are registered with ``client``: this thread's own, if they are enough.

        What something was stuck in is not used again, because it may still come.
        """
        own: Buffer | None = getattr(self._mine, "buffer", None) if size <= BUFFER_BYTES else None
        buffer = np.empty(max(size, BUFFER_BYTES), np.uint8) if own is None else own
        address, troubled = buffer.ctypes.data, client.troubled
        if client.registered.get(address) is not buffer:
            if (code := client.store.register_buffer(address, buffer.size)) != 0:
                raise AsyncFlowError(f"a buffer of {buffer.size} bytes cannot be registered: {code}", where="Mooncake")
            client.registered[address] = buffer
        try:
            yield buffer
        finally:
            clean = client.troubled <= troubled
            if size <= BUFFER_BYTES:
                self._mine.buffer = buffer if clean else None
            elif clean:
                client.store.unregister_buffer(address)
                del client.registered[address]

    def _judge(self, client: Client, codes: Sequence[int], count: int) -> list[int]:
        """Return the codes of a transfer, one for each key, and note whether the client can still move bytes."""
        judged = [int(code) for code in codes]
        if len(judged) != count:
            raise AsyncFlowError(f"{len(judged)} answers came for {count} keys", where="Mooncake")
        stuck = [code for code in judged if code < 0 and code not in (NO_ROOM, NOT_THERE, *NO_ANSWER, *_LEASED)]
        if stuck:
            client.troubled += 1
            log.info("%d of %d values could not be moved: %s", len(stuck), count, sorted(set(stuck)))
        elif any(code >= 0 for code in judged):
            client.troubled = 0
        return judged


def _check(keys: Sequence[str], sizes: Sequence[object]) -> None:
    if not 0 < len(keys) == len(set(keys)) <= MOST_KEYS or len(sizes) != len(keys) or 0 in sizes or "" in keys:
        raise ValueError(f"a call takes 1 to {MOST_KEYS} different keys, each with a value of at least a byte")


def _again(call: Callable[[], list[int]]) -> list[int]:
    """Call once more where the master did not answer: the first call after its restart always fails."""
    codes = call()
    return call() if _GONE in codes else codes


def _pointers(buffer: Buffer, sizes: Sequence[int]) -> list[int]:
    begins: list[int] = (buffer.ctypes.data + np.cumsum([0, *sizes[:-1]])).tolist()
    return begins


def _segment(replicas: Sequence[Any] | None) -> str:
    memory = [replica for replica in replicas or () if replica.is_memory_replica()]
    return str(memory[0].get_memory_descriptor().buffer_descriptor.transport_endpoint) if memory else ""
