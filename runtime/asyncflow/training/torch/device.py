"""The device of a rank: copies of arrays to and from it, and torch's process group of the ranks' devices.

Rank 0 listens on a free port and sends it to the other ranks by ``ProcessGroup.gather``. The store takes over the same
socket, so no port is chosen in advance that another process could take. Only tensors are transferred, never objects (no
pickle).

Invariants: operations on a tensor run after its copy, on the same stream. A numpy array of uint16 contains the bits of
bfloat16. The code is the same for gloo, nccl and hccl; the device determines the library.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from asyncflow.errors import PeerLost
from asyncflow.training.ranks import ProcessGroup
from asyncflow.weights.torch_pair import listen

_HOST_BYTES = 256
_INTERFACE = "GLOO_SOCKET_IFNAME"
_HCCL_WAITS = "HCCL_EXEC_TIMEOUT"
"""In whole seconds. HCCL accepts at most 1091 in the expansion mode AIV, which the profiles use."""
_RANK_LOST = re.compile(
    r"gloo|HCCL_E_REMOTE|HCCL function error: .*error code is (?:9|1[1-4]|19|21)\b|\bEI00(?:02|06|15)\b"
)
"""Texts that mean a lost rank in a RuntimeError that is not a DistError, but an error of gloo or of torch_npu.

torch_npu (HCCLUtils.hpp) reports HCCL's codes: 9 (timeout), 11 to 14 (connection, transfer), 19 (network), 21 (remote
side). It also quotes CANN's codes: EI0002 (a rank timed out), EI0006 (no connection to a rank), EI0015 (to any rank).
"""
_SUMMED = 1 << 18
"""Most squares that are added in one float32 sum: on a CPU the norm of 1e8 numbers would be 1 % too small."""


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a small ``array`` as a tensor on ``device``, without waiting; on the CPU it shares the array's memory.

    For other devices the copy uses page-locked memory, which torch keeps and reuses after the copy.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def weights_on_device(array: NDArray[Any], device: torch.device, *, dtype: torch.dtype) -> Tensor:
    """Return published weights on ``device`` in the model's ``dtype``.

    Does not use page-locked memory, of which torch would keep as much as the size of the whole model.
    """
    tensor = torch.from_numpy(array).to(device)
    return (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor).to(dtype)


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` on the CPU; a floating-point tensor is rounded to ``dtype`` before the copy."""
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu()


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a CPU tensor as an array, which shares its memory if the tensor is contiguous."""
    whole = tensor.contiguous()
    array: NDArray[Any] = (whole.view(torch.uint16) if whole.dtype == torch.bfloat16 else whole).numpy()
    return array


@contextlib.contextmanager
def collective(*, where: str = "trainer", who: str = "the trainer's ranks") -> Iterator[None]:
    """Raise PeerLost if a rank is lost in a collective of this block, or of a function that this decorates."""
    try:
        yield
    except RuntimeError as error:
        lines = str(error).splitlines() or [""]
        found = [lines[0]] if isinstance(error, dist.DistError) else list(filter(_RANK_LOST.search, lines))
        if not found:
            raise
        what = f"another rank has ended, or has not answered in time: {found[0].strip()}"
        raise PeerLost(what, where=where, hint=f"The logs of {who} say which one") from error


class TensorGroup:
    """torch's collectives over the ranks of ``group``; does nothing for one rank.

    host: the address at which other ranks reach this process; timeout_s: timeout of each collective.
    """

    def __init__(self, group: ProcessGroup, *, device: torch.device, host: str, timeout_s: float) -> None:
        self._gang = group
        self._device = device
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None

    def meet(self) -> None:
        """Join the process group if this has not been done; blocks until all ranks have come."""
        if self._gang.world == 1 or self._group is not None:
            return
        choose_interface(self._host)
        limit_waits(self._device.type, timeout_s=self._timeout.total_seconds())
        dist.init_process_group(
            backends(self._device),
            store=_store(self._gang, host=self._host, timeout=self._timeout),
            rank=self._gang.rank,
            world_size=self._gang.world,
            timeout=self._timeout,
        )
        self._group = dist.group.WORLD
        self._mesh = init_device_mesh(self._device.type, (self._gang.world,))

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks' devices over which models are sharded, after ``meet``; None for one rank."""
        return self._mesh

    def norm(self, shard: Tensor) -> float:
        """Return the norm of a vector of which every rank holds a shard."""
        norm = get_total_norm(shard.split(_SUMMED))
        if self._group is None:
            return float(norm)
        squared = norm.cpu().double().square()
        dist.all_reduce(squared, op=dist.ReduceOp.SUM, group=self._group)
        return float(squared.sqrt())

    def broadcast(self, tensor: Tensor) -> None:
        """Replace ``tensor``, which is on the CPU, by rank 0's."""
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)

    def full_tensor(self, shard: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return on every rank the full tensor of ``shape`` from the ranks' shards."""
        if self._mesh is None:
            return shard
        stride = torch.empty(shape, device="meta").stride()
        sharded = DTensor.from_local(
            shard, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        full: Tensor = sharded.full_tensor()
        return full

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = self._mesh = None


def backends(device: torch.device) -> str:
    """Return the libraries for collectives of tensors on the CPU and on ``device``."""
    own: str = dist.get_default_backend_for_device(device)
    return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


def choose_interface(host: str) -> None:
    """Make gloo listen at ``host``; by default it uses the address to which this machine's name resolves, if any."""
    names = [name for name, addresses in psutil.net_if_addrs().items() if host in (each.address for each in addresses)]
    if names:
        os.environ.setdefault(_INTERFACE, names[0])


def limit_waits(device: str, *, timeout_s: float) -> None:
    """Limit HCCL's waits for other ranks, which depend on an environment variable, not on the group's timeout."""
    if device == "npu":
        os.environ.setdefault(_HCCL_WAITS, str(math.ceil(timeout_s)))


def _store(group: ProcessGroup, *, host: str, timeout: timedelta) -> dist.TCPStore:
    address = np.zeros(_HOST_BYTES, dtype=np.uint8)
    listener: socket.socket | None = None
    if group.rank == 0:
        listener, port = listen(host)
        text = f"{host}:{port}".encode()
        address[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    received = bytes(group.gather(address, what="the address of the process group")[0]).rstrip(b"\0").decode()
    name, _, number = received.rpartition(":")
    return open_store(name, int(number), world=group.world, listener=listener, timeout=timeout)


def open_store(
    host: str, port: int, *, world: int, listener: socket.socket | None, timeout: timedelta
) -> dist.TCPStore:
    """Return the store for a process group of ``world`` ranks; listener: rank 0's socket, None on the others."""
    return dist.TCPStore(
        host,
        port,
        world,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
