"""Process group of torch.distributed between two processes, created for one pull and ended with it.

No default group is created or used, so a trainer's own collectives are not affected. All functions block and may run in
any thread. Import this module only when needed, because importing torch takes seconds.

``gloo`` sends host memory. ``nccl`` and ``hccl`` send device memory: bytes are copied to a device of this process and
sent from there. NCCL refuses a pair on one device.

Invariants: an operation that does not complete within ``deadline_s`` raises, however the peer ended, and the group is
unusable from then on. Nothing is pickled. The bytes are neither encrypted nor authenticated.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from asyncflow.weights.slices import AnyArray

_MEMBERS = 2
_POLL_S = 0.001
_WATCHDOG = 10
"""Multiple of the deadline for NCCL's own watchdog, so that this module detects a failure long before it."""
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_making = threading.Lock()

GLOO: Final = "gloo"


def listen(host: str) -> tuple[socket.socket, int]:
    """Return a socket that listens at any port of ``host`` for the store of a pair, and that port."""
    server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return server, int(server.getsockname()[1])


class TorchPair:
    """One side of a pair: rank 0, which provides the ``listener`` of the store, or rank 1.

    host, port: address of the store; local_host: address of this process; prefix: of the store's keys, equal on both
    sides; collective: the backend; device: torch's name of the device, for backends that do not send host memory.
    Raises RuntimeError if the other side does not connect in time.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        local_host: str,
        prefix: str,
        collective: str,
        device: str,
        deadline_s: float,
        listener: socket.socket | None = None,
    ) -> None:
        self.rank = 0 if listener is not None else 1
        timeout = timedelta(seconds=deadline_s)
        listening: dict[str, Any] = {"master_listen_fd": listener.detach()} if listener is not None else {}
        self._store = dist.TCPStore(
            host, port, _MEMBERS, listener is not None, timeout=timeout, wait_for_workers=False, **listening
        )
        self._device = torch.device("cpu" if collective == GLOO else device)
        self._deadline_s = deadline_s
        store = dist.PrefixStore(prefix, self._store)
        self._group = _group(collective, store, self.rank, local_host=local_host, timeout=timeout)
        self._tag = 0

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send the concatenated parts. Raises RuntimeError."""
        sizes = [part.nbytes for part in parts]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._device.type != "cpu")
        np.concatenate([np.frombuffer(part, np.uint8) for part in parts], out=packed.numpy())
        self._finish(self._group.send([packed.to(self._device)], 1 - self.rank, self._next()))

    def receive(self, nbytes: int) -> AnyArray:
        """Return the bytes that the other side sends. Raises RuntimeError."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._finish(self._group.recv([buffer], 1 - self.rank, self._next()))
        received: AnyArray = buffer.cpu().numpy()
        return received

    def close(self) -> None:
        """End the group. A send or receive in another thread then fails."""
        self._group.abort()

    def _next(self) -> int:
        self._tag += 1
        return self._tag

    def _finish(self, work: Any) -> None:
        """Wait for ``work``. On a device, ``wait`` only joins the work's stream, so completion is polled instead."""
        if self._device.type == "cpu":
            work.wait(timedelta(seconds=self._deadline_s))
            return
        until = time.monotonic() + self._deadline_s
        while not work.is_completed():
            if time.monotonic() > until:
                self._group.abort()
                what = f"no progress within {self._deadline_s:g} s"
                raise RuntimeError(what)
            time.sleep(_POLL_S)
        work.wait()


def _group(collective: str, store: Any, rank: int, *, local_host: str, timeout: timedelta) -> Any:
    """Create a group that is not registered with torch.distributed."""
    if collective == GLOO:
        options: Any = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - the other constructor takes no address
        device = dist.ProcessGroupGloo.create_device(hostname=local_host)
        for name, value in {"_devices": [device], "_timeout": timeout, "_threads": 1}.items():
            setattr(options, name, value)
        return dist.ProcessGroupGloo(store, rank, _MEMBERS, options)
    if collective == "nccl":
        return _nccl(store, rank, timeout=timeout * _WATCHDOG)
    if collective == "hccl":
        library = importlib.import_module("torch_npu._C._distributed_c10d")
        return library.ProcessGroupHCCL(store, rank, _MEMBERS, timeout)
    what = f"a pair cannot be made with {collective!r}"
    raise RuntimeError(what)


def _nccl(store: Any, rank: int, *, timeout: timedelta) -> Any:
    """Create a group whose errors end a wait and not the process; a trainer's own groups keep their setting."""
    with _making:
        before = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = "0"
        try:
            return dist.ProcessGroupNCCL(store, rank, _MEMBERS, timeout)
        finally:
            del os.environ[_HANDLING]
            if before is not None:
                os.environ[_HANDLING] = before
