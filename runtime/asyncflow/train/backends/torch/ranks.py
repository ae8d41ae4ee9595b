"""torch's process group for the gradients, met through the trainer's own gang.

Rank 0 listens on a port that is free, tells the others by ``Group.gather``, and the store takes over that very
socket: no port is chosen in advance and none can be lost in between. Only tensors travel, never objects (no pickle).

Invariant: gloo, nccl and hccl run the same three lines; which one is the device's business.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from asyncflow.errors import ManifestError, PeerLost
from asyncflow.train.backends.torch.npu import load_npu
from asyncflow.train.ranks import Group

_HOST_BYTES = 256
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SUMMED = 1 << 18
"""Most squares that are added up in one float32 sum: on a CPU the norm of 1e8 numbers would be 1 % too small."""


def find_device(kind: str, *, share: float, local_rank: int = 0) -> torch.device:
    """Return this process's device of ``kind``, torch's name for it, with at most ``share`` of its memory allocated.

    local_rank: which of those that this process sees, as with torchrun. Raises ManifestError where there is none.
    """
    if kind == "cpu":
        return torch.device(kind)
    if kind == "npu":
        load_npu()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != kind:
        raise ManifestError(
            f"there is no {kind} device here: torch {torch.__version__} sees {found or 'only the CPU'}",
            where="spec.trainer.accelerator",
            hint="Run where the device and its build of torch are installed, or set profile: cpu and count: 0",
        )
    if local_rank >= (seen := torch.accelerator.device_count()):
        raise ManifestError(
            f"rank {local_rank} of this replica has no {kind} device: torch {torch.__version__} sees {seen}",
            where="spec.trainer.accelerator.count",
            hint="Give no more than there are; see which devices the process sees (docs/jobs.md, Devices)",
        )
    torch.accelerator.set_device_index(local_rank)
    if share < 1:
        torch.get_device_module(found).set_per_process_memory_fraction(share)
    return torch.device(kind, local_rank)


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """Raise PeerLost where a rank is gone in a collective of this block, or of the function that this decorates."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        what = f"another rank has ended, or has not answered in time: {str(error).splitlines()[0]}"
        raise PeerLost(what, where="trainer", hint="The logs of the trainer's ranks say which") from error


class TensorGroup:
    """Collectives of torch over the ranks of ``group``; nothing where there is one rank.

    host: the address of this process that other ranks can dial; timeout_s: of each collective.
    """

    def __init__(self, group: Group, *, device: torch.device, host: str, timeout_s: float) -> None:
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
        _choose_interface(self._host)
        dist.init_process_group(
            _backends(self._device),
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

    def norm(self, piece: Tensor) -> float:
        """Return the norm of a vector of which every rank holds a piece."""
        norm = get_total_norm(piece.split(_SUMMED))
        if self._group is None:
            return float(norm)
        squared = norm.cpu().double().square()
        dist.all_reduce(squared, op=dist.ReduceOp.SUM, group=self._group)
        return float(squared.sqrt())

    def from_first(self, tensor: Tensor) -> None:
        """Replace ``tensor``, which lies on the CPU, by rank 0's."""
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)

    def whole(self, piece: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return on every rank the tensor of ``shape`` of which each holds a piece."""
        if self._mesh is None:
            return piece
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(piece, self._mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
        whole: Tensor = cut.full_tensor()
        return whole

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = self._mesh = None


def _backends(device: torch.device) -> str:
    """Return who carries tensors of the CPU, and of ``device``."""
    own: str = dist.get_default_backend_for_device(device)
    return own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"


def _choose_interface(host: str) -> None:
    """Have gloo listen at ``host``: by itself it takes whatever this machine's name resolves to, if to anything."""
    named = [name for name, addresses in psutil.net_if_addrs().items() if host in (each.address for each in addresses)]
    if named:
        os.environ.setdefault(_INTERFACE, named[0])


def _store(group: Group, *, host: str, timeout: timedelta) -> dist.TCPStore:
    address = np.zeros(_HOST_BYTES, dtype=np.uint8)
    listener: socket.socket | None = None
    if group.rank == 0:
        listener = socket.create_server((host, 0))
        text = f"{host}:{listener.getsockname()[1]}".encode()
        address[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    told = bytes(group.gather(address, what="the address of the process group")[0]).rstrip(b"\0").decode()
    name, _, port = told.rpartition(":")
    return dist.TCPStore(
        name,
        int(port),
        group.world,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None else None,
    )
