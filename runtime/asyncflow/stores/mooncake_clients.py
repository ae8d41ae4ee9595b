"""Clients of Mooncake's master: one at a time is used, and a new one in its place where it must be.

The library keeps the interpreter's lock while a client is set up or closed, so nothing else of the process runs: for
90 s where the master dies meanwhile, and for ever where it hangs. So a master must show that it lives first, and a
setup is tried once.

Invariants: a client is closed when it was replaced and nobody uses it any more, never before; a new one is set up by
one thread, and all others wait for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from asyncflow.errors import ManifestError, PeerLost

log = logging.getLogger(__name__)

Buffer = npt.NDArray[np.uint8]

_REPLACE_AFTER: Final = 2
"""Calls in a row in which something could not be moved, after which the client is replaced."""
_REPLACE_EVERY_S: Final = 5.0
_REACH_S: Final = 1.0
_NO_REQUEST: Final = b"\0"
_ENVIRONMENT: Final = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
}


def load() -> ModuleType:
    """Import ``mooncake.store``. Raises ManifestError where it is not installed."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        hint = "pip install 'asyncflow[mooncake]', and the system's libibverbs1, libnuma1 and libcurl4"
        where = "spec.transferQueue.backend"
        raise ManifestError(f"Mooncake cannot be loaded: {error}", where=where, hint=hint) from error


class Client:
    """A client of one master. users: calls under way; troubled: calls in a row that could not move something."""

    def __init__(self, store: Any, master: str) -> None:
        self.store = store
        self.master = master
        self.users = 0
        self.troubled = 0
        self.retired = False
        self.made = time.monotonic()
        self.registered: dict[int, Buffer] = {}


class Clients:
    """The client of one process. host: its address; master: gives that of the master as HOST:PORT, None while there is
    none; segment_bytes: what the process offers to the store.
    """

    def __init__(self, *, host: str, master: Callable[[], str | None], segment_bytes: int) -> None:
        self.library = load()
        self._host = host
        self._master = master
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._client: Client | None = None
        self._closed = False

    @property
    def master(self) -> str | None:
        """The master with which a client is set up now, None while there is none."""
        client = self._client
        return client.master if client is not None else None

    def close(self) -> None:
        """Use the store no longer; a client that is in use is closed by its last user."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            self._retire(client)

    @contextmanager
    def using(self) -> Iterator[Client]:
        """Use the client as it is now. Raises PeerLost where none can be set up."""
        client = self._enter()
        try:
            yield client
        finally:
            with self._lock:
                client.users -= 1
                last = client.retired and not client.users
            if last:
                _close(client)

    def _enter(self) -> Client:
        """Return the client, a new one where it must be replaced, and count this user of it."""
        with self._opening:
            master = self._master()
            with self._lock:
                client = self._client
                if self._closed:
                    raise PeerLost("the store was closed", where="Mooncake")
            if client is None or self._outlived(client, master):
                client = self._replace(client, master)
            with self._lock:
                client.users += 1
            return client

    def _outlived(self, client: Client, master: str | None) -> bool:
        troubled = client.troubled >= _REPLACE_AFTER and time.monotonic() - client.made > _REPLACE_EVERY_S
        return troubled or (master is not None and master != client.master)

    def _replace(self, old: Client | None, master: str | None) -> Client:
        if master is None:
            raise PeerLost("there is no master yet", where="Mooncake")
        if old is not None:
            log.info("the client of Mooncake is replaced: %d calls in trouble, master %s", old.troubled, master)
            with self._lock:
                self._client = None
            self._retire(old)
        new = self._set_up(master)
        with self._lock:
            if self._closed:
                new.retired = True
            else:
                self._client = new
        if new.retired:
            _close(new)
            raise PeerLost("the store was closed", where="Mooncake")
        return new

    def _set_up(self, master: str) -> Client:
        """Set up a client with a master that lives now; where it dies meanwhile, the process stands still for 5 s."""
        _check_alive(master)
        store = self.library.MooncakeDistributedStore()
        code = store.setup(self._host, "P2PHANDSHAKE", self._segment_bytes, 0, "tcp", "", master)
        if code != 0:
            raise PeerLost(f"Mooncake's client cannot be set up: error {code}", where=master)
        return Client(store, master)

    def _retire(self, client: Client) -> None:
        with self._lock:
            client.retired = True
            idle = not client.users
        if idle:
            _close(client)


def _check_alive(master: str) -> None:
    """Say something that is no request, on which one that lives hangs up. Raises PeerLost."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_REACH_S) as line:
            line.sendall(_NO_REQUEST)
            line.recv(1)
    except ConnectionResetError:
        return
    except OSError as error:
        raise PeerLost(f"Mooncake's master does not answer: {error}", where=master) from error


def _close(client: Client) -> None:
    client.store.close()
    client.registered.clear()
