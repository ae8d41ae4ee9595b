"""Identical batches in a model-parallel group: the first process fetches, the others receive from it.

A message crosses torch.distributed as two broadcasts of plain tensors: its length, and its bytes (msgpack). Nothing is
pickled, and no other process of the group needs a connection to the queue.

Invariant: every process of the group sees the same batches, the same end, and the same error of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from asyncflow.errors import AsyncFlowError, RemoteError, from_wire
from asyncflow.queue.torch.batch import Batch
from asyncflow.queue.values import plain_array


def _plain(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return the dtype, the shape and the bytes of a tensor of a batch."""
    array, dtype = plain_array(tensor, where="batch")
    return dtype, array.shape, array.tobytes()


def _tensor(_: type, plain: tuple[str, list[int], bytes]) -> torch.Tensor:
    dtype, shape, content = plain
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)).view(getattr(torch, dtype)).view(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_batch = msgspec.msgpack.Decoder(Batch, dec_hook=_tensor)
_error = msgspec.msgpack.Decoder(dict[str, str])


def share_batches(
    loader: Iterable[Batch] | None, *, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Yield the batches of the first process's ``loader`` in every process of ``group`` (default: all processes).

    device: device of the batches, from which the group's backend can send. Only the first process's loader is used, and
    only there a batch can be completed. All processes must take the same number of batches.
    """
    batches = () if loader is None else loader
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        yield from (batch.to(device) for batch in batches)
        return
    iterator = chain.from_iterable((batches,))  # starts at the first take(), so that all processes get its error
    batch: Batch | None = None

    def take() -> bytearray:
        nonlocal batch
        batch = next(iterator, None)
        return bytearray() if batch is None else _encoded(batch)

    while message := broadcast(take, group, torch.device(device)):
        yield (_batch.decode(message) if batch is None else batch).to(device)


def broadcast(
    make: Callable[[], bytearray], group: dist.ProcessGroup | None, device: torch.device | None = None
) -> memoryview:
    """Return the result of ``make()`` in the first process of ``group`` in every process, or raise its error there.

    device: where the bytes are sent from, by default a device that the group's backend can use.
    """
    if device is None and "gloo" not in dist.get_backend(group):
        device = torch.accelerator.current_accelerator()
    source = dist.get_global_rank(group, 0) if group is not None else 0
    failure: Exception | None = None
    message = bytearray()
    if dist.get_rank(group) == 0:
        try:
            message = make()
        except Exception as error:  # noqa: BLE001 # all processes of the group raise it
            failure = error
            if not isinstance(error, AsyncFlowError):
                error = RemoteError(repr(error), where="first process of the group")
            message = bytearray(_encoder.encode(error.to_wire()))
    head = torch.tensor([len(message), failure is not None], device=device)
    dist.broadcast(head, src=source, group=group)
    length, failed = head.tolist()
    if length:
        payload = torch.frombuffer(message or bytearray(length), dtype=torch.uint8).to(device)
        dist.broadcast(payload, src=source, group=group)
        received = payload.cpu().numpy().data
    if failed:
        raise failure or from_wire(_error.decode(received))
    return received if length else memoryview(b"")


def _encoded(batch: Batch) -> bytearray:
    if not isinstance(batch, Batch):
        raise TypeError(f"share_batches needs a loader of Batch, not of {type(batch).__name__}")
    return bytearray(_encoder.encode(replace(batch, lease=None)))
