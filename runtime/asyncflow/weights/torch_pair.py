"""Two processes and a process group of torch.distributed between them, made for one pull and ended with it.

No default group is made and none is touched, so a trainer's own collectives do not notice. Everything here blocks, in
whatever thread; nobody imports this module but by need, because torch takes seconds.

``gloo`` sends host memory. ``nccl`` and ``hccl`` send device memory: bytes are copied to a device of this process, and
sent from there. NCCL refuses a pair on one device.

Invariants: whatever does not come within ``deadline_s`` raises, however the peer died, and the group is of no use from
then on; nothing is pickled; the bytes are neither encrypted nor authenticated.
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

_BOTH = 2
_POLL_S = 0.001
_WATCHDOG = 10
"""So many deadlines after which NCCL's own watchdog would find what has ended here long before."""
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_making = threading.Lock()

GLOO: Final = "gloo"


def listen(host: str) -> tuple[socket.socket, int]:
    """Return a socket for the store of a pair, which listens at any port of ``host``, and that port."""
    made = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return made, int(made.getsockname()[1])


class TorchPair:
    """One side of a pair: rank 0, which brings the ``listener`` of the store, or rank 1.

    host, port: of the store; here: this process's own host; prefix: of the store's keys, the same on both sides;
    collective: the back end; device: torch's name of the device for those that do not send host memory.
    Raises RuntimeError when the other side does not come in time.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        here: str,
        prefix: str,
        collective: str,
        device: str,
        deadline_s: float,
        listener: socket.socket | None = None,
    ) -> None:
        self.rank = 0 if listener is not None else 1
        timeout = timedelta(seconds=deadline_s)
        place: dict[str, Any] = {"master_listen_fd": listener.detach()} if listener is not None else {}
        self._store = dist.TCPStore(
            host, port, _BOTH, listener is not None, timeout=timeout, wait_for_workers=False, **place
        )
        self._device = torch.device("cpu" if collective == GLOO else device)
        self._deadline_s = deadline_s
        store = dist.PrefixStore(prefix, self._store)
        self._group = _group(collective, store, self.rank, here=here, timeout=timeout)
        self._tag = 0

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send bytes, one part behind another. Raises RuntimeError."""
        sizes = [part.nbytes for part in parts]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._device.type != "cpu")
        np.concatenate([np.frombuffer(part, np.uint8) for part in parts], out=packed.numpy())
        self._finish(self._group.send([packed.to(self._device)], 1 - self.rank, self._next()))

    def receive(self, nbytes: int) -> AnyArray:
        """Return the bytes that the other side sends. Raises RuntimeError."""
        there = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._finish(self._group.recv([there], 1 - self.rank, self._next()))
        found: AnyArray = there.cpu().numpy()
        return found

    def close(self) -> None:
        """End the group; a send or receive in another thread ends with an error."""
        self._group.abort()

    def _next(self) -> int:
        self._tag += 1
        return self._tag

    def _finish(self, work: Any) -> None:
        """Wait for ``work``; that of a device only joins its stream by ``wait``, so it is looked at instead."""
        if self._device.type == "cpu":
            work.wait(timedelta(seconds=self._deadline_s))
            return
        until = time.monotonic() + self._deadline_s
        while not work.is_completed():
            if time.monotonic() > until:
                self._group.abort()
                what = f"nothing moved within {self._deadline_s:g} s"
                raise RuntimeError(what)
            time.sleep(_POLL_S)
        work.wait()


def _group(collective: str, store: Any, rank: int, *, here: str, timeout: timedelta) -> Any:
    """Make a group that is registered nowhere."""
    if collective == GLOO:
        options: Any = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - the other constructor takes no address
        given = {"_devices": [dist.ProcessGroupGloo.create_device(hostname=here)], "_timeout": timeout, "_threads": 1}
        for name, value in given.items():
            setattr(options, name, value)
        return dist.ProcessGroupGloo(store, rank, _BOTH, options)
    if collective == "nccl":
        return _nccl(store, rank, timeout=timeout * _WATCHDOG)
    if collective == "hccl":
        library = importlib.import_module("torch_npu._C._distributed_c10d")
        return library.ProcessGroupHCCL(store, rank, _BOTH, timeout)
    what = f"a pair cannot be made with {collective!r}"
    raise RuntimeError(what)


def _nccl(store: Any, rank: int, *, timeout: timedelta) -> Any:
    """Make a group whose errors end a wait, and not the process, as those of a trainer's own groups do."""
    with _making:
        before = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = "0"
        try:
            return dist.ProcessGroupNCCL(store, rank, _BOTH, timeout)
        finally:
            del os.environ[_HANDLING]
            if before is not None:
                os.environ[_HANDLING] = before
