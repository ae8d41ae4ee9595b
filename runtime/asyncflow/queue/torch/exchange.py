"""Identical batches in a model-parallel group: the first process fetches, the others receive from it.

A batch crosses torch.distributed as two broadcasts of plain tensors: its length, then a heading (msgpack) with the
frames of its columns behind it, as they cross a socket. Nothing is pickled, and no other process of the group needs a
connection to the queue.

Invariant: every process of the group sees the same batches, the same end, and the same error of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import msgspec
import torch
import torch.distributed as dist

from asyncflow.errors import AsyncFlowError, RemoteError, from_wire
from asyncflow.queue.protocol.messages import RowMeta, StepTotals
from asyncflow.queue.torch.batch import Batch, columns_of
from asyncflow.rpc.columns import BatchHeader, Buffer, decode_batch, encode_batch


class _Heading(msgspec.Struct, frozen=True, tag="batch"):
    """A batch without its values. frames: bytes of each frame of the columns."""

    metas: list[RowMeta]
    columns: BatchHeader
    frames: list[int]
    step: int
    slot: int
    last: bool
    totals: StepTotals | None


class _Number(msgspec.Struct, frozen=True, tag="number"):
    number: int


class _End(msgspec.Struct, frozen=True, tag="end"):
    pass


class _Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: dict[str, str]


_Message: TypeAlias = _Heading | _Number | _End | _Failed
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)


def share_batches(
    loader: Iterable[Batch] | None, *, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """Yield the batches of the first process's ``loader`` in every process of ``group`` (by default, of all).

    device: where the batches go, one that the group's backend can send from. Only the first process's loader is used,
    and only there a batch can be completed. All processes must take the same number of batches.
    """
    batches: Iterable[Batch] = () if loader is None else loader
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        yield from (batch.to(device) for batch in batches)
    elif dist.get_rank(group) == 0:
        yield from _sent(batches, group, torch.device(device))
    else:
        yield from _received(group, torch.device(device))


def broadcast_number(find: Callable[[], int], group: dist.ProcessGroup | None) -> int:
    """Return, in every process of ``group``, what ``find()`` returns in the first, or raise what it raises."""
    device = torch.device("cpu") if "gloo" in dist.get_backend(group) else torch.accelerator.current_accelerator()
    assert device is not None
    if dist.get_rank(group) == 0:
        with _failures_sent(group, device):
            number = find()
        _send(_Number(number), [], group, device)
        return number
    message, _ = _receive(group, device)
    assert isinstance(message, _Number)
    return message.number


def _sent(loader: Iterable[Batch], group: dist.ProcessGroup | None, device: torch.device) -> Iterator[Batch]:
    with _failures_sent(group, device):
        batches = iter(loader)
    while True:
        with _failures_sent(group, device):
            batch = next(batches, None)
            if batch is not None and not isinstance(batch, Batch):
                raise TypeError(f"a loader of Batch can be shared, not of {type(batch).__name__}")
        if batch is None:
            _send(_End(), [], group, device)
            return
        header, frames = encode_batch({name: column.jagged() for name, column in batch.columns.items()})
        sizes = [memoryview(frame).nbytes for frame in frames]
        heading = _Heading(batch.metas, header, sizes, batch.step, batch.slot, batch.last, batch.totals)
        _send(heading, frames, group, device)
        yield batch.to(device)


def _received(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[Batch]:
    while True:
        message, payload = _receive(group, device)
        if isinstance(message, _End):
            return
        assert isinstance(message, _Heading)
        frames = [part.numpy().data for part in payload.split(message.frames)]
        columns = decode_batch(message.columns, frames, max_bytes=len(payload))
        batch = Batch(
            metas=message.metas,
            columns=columns_of(columns, list(columns)),
            step=message.step,
            slot=message.slot,
            last=message.last,
            totals=message.totals,
        )
        yield batch.to(device)


@contextmanager
def _failures_sent(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Let the followers fail as the first does, instead of waiting for it."""
    try:
        yield
    except Exception as error:
        failure = (
            error if isinstance(error, AsyncFlowError) else RemoteError(repr(error), where="first process of the group")
        )
        _send(_Failed(failure.to_wire()), [], group, device)
        raise


def _send(message: _Message, frames: Sequence[Buffer], group: dist.ProcessGroup | None, device: torch.device) -> None:
    heading = _encode(message)
    payload = torch.frombuffer(bytearray().join([heading, *frames]), dtype=torch.uint8).to(device)
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast(torch.tensor([len(heading), len(payload)], device=device), src=source, group=group)
    dist.broadcast(payload, src=source, group=group)


def _receive(group: dist.ProcessGroup | None, device: torch.device) -> tuple[_Message, torch.Tensor]:
    """Return the message that was sent, and the bytes of its frames."""
    source = dist.get_global_rank(group, 0) if group is not None else 0
    sizes = torch.zeros(2, dtype=torch.int64, device=device)
    dist.broadcast(sizes, src=source, group=group)
    heading, total = sizes.tolist()
    payload = torch.empty(total, dtype=torch.uint8, device=device)
    dist.broadcast(payload, src=source, group=group)
    payload = payload.cpu()
    message = _decoder.decode(payload[:heading].numpy().data)
    if isinstance(message, _Failed):
        raise from_wire(message.error)
    return message, payload[heading:]
