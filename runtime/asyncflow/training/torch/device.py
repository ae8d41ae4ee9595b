"""The device of a rank: given arrays, and joined with those of the other ranks in torch's process group.

Rank 0 listens on a port that is free, tells the others by ``ProcessGroup.gather``, and the store takes over that very
socket: no port is chosen in advance and none can be lost in between. Only tensors travel, never objects (no pickle).

Invariants: what computes with a tensor comes after its copy, on the same stream; a numpy array of uint16 is the bits of
bfloat16; gloo, nccl and hccl run the same three lines: which one is the device's business.
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
"""Whole seconds, of which HCCL takes at most 1091 under the expansion mode AIV, which the profiles ask for."""
_GONE = re.compile(r"gloo|HCCL_E_REMOTE|HCCL function error: .*error code is (?:9|1[1-4]|19|21)\b|\bEI00(?:02|06|15)\b")
"""What says that a rank is gone, in a RuntimeError that is no DistError: one of gloo, or of torch_npu.

torch_npu (HCCLUtils.hpp) says HCCL's codes: 9 (no answer in time), 11 to 14 (connection, transfer), 19 (network), 21
(the other side); and quotes CANN's: EI0002 (no word from a rank), EI0006 (no connection to one), EI0015 (to none).
"""
_SUMMED = 1 << 18
"""Most squares that are added up in one float32 sum: on a CPU the norm of 1e8 numbers would be 1 % too small."""


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a small ``array`` as a tensor on ``device``, without waiting; on the CPU it shares the array's memory.

    Elsewhere it goes by way of page-locked memory, which torch keeps and uses again once the copy is over.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def weights_on_device(array: NDArray[Any], device: torch.device, *, dtype: torch.dtype) -> Tensor:
    """Return published weights on ``device`` in the ``dtype`` that the model holds them in.

    Not by way of page-locked memory, of which torch would keep as much as the whole model.
    """
    tensor = torch.from_numpy(array).to(device)
    return (tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor).to(dtype)


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``tensor`` on the CPU, rounded to ``dtype`` before it is copied if it is of floating-point numbers."""
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).cpu()


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor of the CPU as an array that shares its memory where it is contiguous."""
    whole = tensor.contiguous()
    array: NDArray[Any] = (whole.view(torch.uint16) if whole.dtype == torch.bfloat16 else whole).numpy()
    return array


@contextlib.contextmanager
def collective(*, where: str = "trainer", who: str = "the trainer's ranks") -> Iterator[None]:
    """Raise PeerLost where a rank is gone in a collective of this block, or of the function that this decorates."""
    try:
        yield
    except RuntimeError as error:
        lines = str(error).splitlines() or [""]
        said = [lines[0]] if isinstance(error, dist.DistError) else list(filter(_GONE.search, lines))
        if not said:
            raise
        what = f"another rank has ended, or has not answered in time: {said[0].strip()}"
        raise PeerLost(what, where=where, hint=f"The logs of {who} say which") from error


class TensorGroup:
    """Collectives of torch over the ranks of ``group``; nothing where there is one rank.

    host: the address of this process that other ranks can dial; timeout_s: of each collective.
    """

    def __init__(self, group: ProcessGroup, *, device: torch.device, host: str, timeout_s: float) -> None:
        self._gang = group
        self._device = device
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None

    def meet(self) -> None:
        """Join the process group, once; blocks until all ranks have come."""
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
        """The ranks' devices as models are cut over them, once they have met; None for one rank."""
        return self._mesh

    def norm(self, shard: Tensor) -> float:
        """Return the norm of a vector of which every rank holds a shard."""
        norm = get_total_norm(shard.split(_SUMMED))
        if self._group is None:
            return float(norm)
        squared = norm.cpu().double().square()
        dist.all_reduce(squared, op=dist.ReduceOp.SUM, group=self._group)
        return float(squared.sqrt())

    def from_first(self, tensor: Tensor) -> None:
        """Replace ``tensor``, which lies on the CPU, by rank 0's."""
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)

    def whole(self, shard: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return on every rank the tensor of ``shape`` of which each holds a shard."""
        if self._mesh is None:
            return shard
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(shard, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
        whole: Tensor = cut.full_tensor()
        return whole

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = self._mesh = None


def backends(device: torch.device) -> str:
    """Return who carries tensors of the CPU, and of ``device``."""
    own: str = dist.get_default_backend_for_device(device)
    return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


def choose_interface(host: str) -> None:
    """Make gloo listen at ``host``: by itself it takes whatever this machine's name resolves to, if to anything."""
    named = [name for name, addresses in psutil.net_if_addrs().items() if host in (each.address for each in addresses)]
    if named:
        os.environ.setdefault(_INTERFACE, named[0])


def limit_waits(device: str, *, timeout_s: float) -> None:
    """Make HCCL wait for other ranks no longer than this: it goes by a variable, not by the group's timeout."""
    if device == "npu":
        os.environ.setdefault(_HCCL_WAITS, str(math.ceil(timeout_s)))


def _store(group: ProcessGroup, *, host: str, timeout: timedelta) -> dist.TCPStore:
    address = np.zeros(_HOST_BYTES, dtype=np.uint8)
    listener: socket.socket | None = None
    if group.rank == 0:
        listener, port = listen(host)
        text = f"{host}:{port}".encode()
        address[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    told = bytes(group.gather(address, what="the address of the process group")[0]).rstrip(b"\0").decode()
    name, _, number = told.rpartition(":")
    return open_store(name, int(number), world=group.world, listener=listener, timeout=timeout)


def open_store(
    host: str, port: int, *, world: int, listener: socket.socket | None, timeout: timedelta
) -> dist.TCPStore:
    """Return the store in which a process group of so many ranks meets; ``listener`` is the first rank's socket."""
    return dist.TCPStore(
        host,
        port,
        world,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
