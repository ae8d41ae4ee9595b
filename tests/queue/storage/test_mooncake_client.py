"""The client of Mooncake beside a library that fails as the real one does: what gets stuck once is replaced."""

import asyncio
import contextlib
import socket
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from asyncflow.errors import ManifestError, PeerLost
from asyncflow.queue.storage import mooncake
from asyncflow.queue.storage.backend import Outcome
from asyncflow.queue.storage.mooncake import MOST_KEYS, NO_ROOM, MooncakeBackend, MooncakeConnection, MooncakeStore

STUCK = -800


class Library:
    """Stands for ``mooncake.store``. code: what transfers give from now on; made, closed: all clients."""

    def __init__(self):
        self.code, self.made, self.closed = 0, [], []
        self.get = lambda keys, *_: [self.code] * len(keys)
        self.ReplicateConfig = SimpleNamespace

    def MooncakeDistributedStore(self):  # noqa: N802 — the library's name
        self.made.append(self)
        number = len(self.made)

        def put(keys, _pointers, _sizes, config):
            assert config.with_hard_pin
            return [self.code] * len(keys)

        return SimpleNamespace(
            setup=lambda *_: 0,
            register_buffer=lambda *_: 0,
            unregister_buffer=lambda *_: 0,
            batch_put_from=put,
            batch_get_into=lambda *asked: self.get(*asked),
            close=lambda: self.closed.append(number),
        )


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(mooncake, "load", lambda: made)
    monkeypatch.setattr(mooncake, "_REPLACE_EVERY_S", 0.0)
    return made


def test_a_library_of_the_system_that_is_missing_is_told_before_anything_starts(monkeypatch):
    lacks = "libibverbs.so.1: cannot open shared object file"
    monkeypatch.setattr(mooncake, "find_program", lambda name: name)
    monkeypatch.setattr("importlib.import_module", Mock(side_effect=ImportError(lacks)))
    with pytest.raises(ManifestError, match=rf"{lacks}.*the system's libibverbs1"):
        MooncakeBackend.check(servers=True)


@contextlib.contextmanager
def master_that_hangs_up(*, times=None):
    """A master that knows no request; it is gone after so many. Gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up():
            with contextlib.suppress(OSError):
                while times is None or next(left, None) is not None:
                    listening.accept()[0].close()
            listening.close()

        left = iter(range(times or 0))
        threading.Thread(target=hang_up, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
async def store(library):
    with master_that_hangs_up() as address:
        made = MooncakeStore(MooncakeConnection(host="127.0.0.1", master=lambda: address), stale="")
        yield made
        await made.close()


async def put(store, *keys):
    return await store.write(keys, [8] * len(keys), np.zeros(8 * len(keys), np.uint8))


async def test_a_client_that_is_stuck_twice_in_a_row_is_replaced_and_closed(library, store):
    library.code = STUCK
    assert await put(store, "a") == [Outcome.FAILED]
    assert await put(store, "b") == [Outcome.FAILED]
    assert (len(library.made), library.closed) == (1, [])
    library.code = 0
    assert await put(store, "c") == [Outcome.DONE]
    assert (len(library.made), library.closed) == (2, [1])


async def test_one_that_moves_something_in_between_stays(library, store):
    for code in (STUCK, 0, STUCK, 0):
        library.code = code
        await put(store, "a")
    assert len(library.made) == 1


async def test_a_full_store_is_no_reason(library, store):
    library.code = NO_ROOM
    for _ in range(5):
        assert await put(store, "a") == [Outcome.FULL]
    assert len(library.made) == 1


async def test_reads_that_hang_longer_than_their_callers_wait_hold_up_no_other(library, store):
    over = threading.Event()
    library.get = lambda *_: over.wait(60)
    try:
        for _ in range(mooncake._MAX_CALLS):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await store.read(["a"], [8], np.zeros(8, np.uint8))
        async with asyncio.timeout(10):
            assert await put(store, "b") == [Outcome.DONE]
    finally:
        over.set()


@pytest.mark.parametrize("keys", [[], ["a", "a"], [""], [str(number) for number in range(MOST_KEYS + 1)]])
async def test_calls_that_would_step_into_a_trap_are_not_made(library, store, keys):
    with pytest.raises(ValueError, match="1 to 512 different keys"):
        await put(store, *keys)
    assert library.made == []


def test_a_master_that_takes_calls_and_says_nothing_is_not_set_up_with(library):
    with socket.create_server(("127.0.0.1", 0)) as master:
        address = f"127.0.0.1:{master.getsockname()[1]}"
        connection = MooncakeConnection(host="127.0.0.1", master=lambda: address)
        with pytest.raises(PeerLost, match="does not answer"):
            connection.client()
    assert library.made == []


@pytest.mark.process
def test_a_master_that_dies_while_a_client_is_set_up_holds_the_process_up_for_seconds_only(stores):
    with master_that_hangs_up(times=1) as address:
        connection = MooncakeConnection(host="127.0.0.1", master=lambda: address)
        began = time.monotonic()
        with pytest.raises(PeerLost, match="cannot be set up"):
            connection.client()
        assert time.monotonic() - began < 60
