"""The streaming loader of AsyncFlow's Code 1 (arXiv 2507.01663): a stage's rows as they become ready, with an index.

    for data, index in create_stream_data_loader(queue, "actor_rollout", ["prompts"], 16):
        engines.put_experience_data({"responses": generate(data["prompts"])}, index)

Invariant: a row is claimed by one consumer at a time, and is that one's until its results are put, also when the loader
goes on; what was claimed and not put is claimed by others once the loader is closed, or its process is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
from torch.utils.data import DataLoader

from asyncflow.errors import Refused
from asyncflow.queue.partition import Partition
from asyncflow.queue.torch.batch import Batch, BatchLease
from asyncflow.queue.torch.dataset import Consumer, QueueAddress, StreamingDataset

OPEN = "experience"
"""Partition of a queue that stands alone, unless the caller names one."""
_CALL_S = 60.0
Check: TypeAlias = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
"""Returns the columns to be written for what is put of so many rows. Raises Refused for what may not be written."""


@dataclass(frozen=True, kw_only=True)
class _Form:
    """Form of a batch. lists: rows as lists of their entries; multiple: of the length that padded rows have."""

    lists: bool
    multiple: int

    def __call__(self, batch: Batch) -> tuple[dict[str, Any], BatchLease]:
        assert batch.lease is not None
        forms: dict[str, Any] = {}
        for name, column in batch.columns.items():
            if column.kind not in ("rows", "scalar"):
                forms[name] = [column[row] for row in range(len(column))]
            elif self.lists:
                forms[name] = [column[row].tolist() for row in range(len(column))]
            else:
                padded = column.padded()
                if column.kind == "rows" and (over := padded.shape[1] % self.multiple):
                    fill = padded.new_zeros(len(padded), self.multiple - over, *padded.shape[2:])
                    padded = torch.cat([padded, fill], dim=1)
                forms[name] = padded
                if column.kind == "rows":
                    forms[f"{name}_length"] = column.lengths
        return forms, batch.lease


class StreamLoader:
    """Rows of one stage: iterates over (data, index). A context that closes it; see ``create_stream_data_loader``."""

    def __init__(self, dataset: StreamingDataset, *, form: _Form, workers: int, check: Check | None) -> None:
        self._dataset = dataset
        self._check = check
        self._loader = DataLoader(dataset, batch_size=None, collate_fn=form, num_workers=workers, in_order=workers == 0)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], BatchLease]]:
        return iter(self._loader)

    def put(self, data: Mapping[str, Any], index: BatchLease) -> list[bool]:
        """Write what was made of rows, which are completed by this; False for one that another consumer has now.

        Raises Refused for what ``check`` refuses, and then nothing is written.
        """
        if self._check is not None:
            data = self._check(data, len(index.rows))
        return self._dataset.complete(Batch(metas=[], columns={}, lease=index), data)

    def close(self) -> None:
        """Return to other consumers what was claimed here and not put."""
        self._dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def create_stream_data_loader(
    queue: QueueAddress | str,
    experience_consumer_stage: str,
    experience_columns: Sequence[str],
    experience_count: int,
    *,
    use_vllm: bool = False,
    pad_to_multiple_of: int = 1,
    partition: str = OPEN,
    num_workers: int = 0,
    prefetch: int = 1,
    patience_s: float = 3600.0,
    check: Check | None = None,
) -> StreamLoader:
    """Return a loader that yields (data, index), up to ``experience_count`` rows at a time, as they become ready.

    queue: its address, or what ``Engines.queue`` is; experience_consumer_stage: the task that consumes, which is made
    known to an open partition where it is not; experience_columns: what it reads of each row. use_vllm: columns as
    lists of token ids, which vLLM takes; else tensors [rows, longest], filled up with 0 to a multiple of
    ``pad_to_multiple_of``, and ``NAME_length`` int64[rows] beside each. num_workers: loader processes, each of which
    claims for itself; prefetch: batches that are fetched while one is computed; patience_s: seconds without a row
    after which the iteration fails with DeadlineExceeded. check: what ``put`` asks for the columns to be written.

    It ends when the partition was closed, or has had as many rows as ``expect`` said.
    """
    if experience_count < 1 or pad_to_multiple_of < 1:
        what = f"experience_count {experience_count} and pad_to_multiple_of {pad_to_multiple_of} must be at least 1"
        raise Refused(what, where="create_stream_data_loader")
    where = QueueAddress(address=queue) if isinstance(queue, str) else queue
    consumer = Consumer(where)
    try:
        rows = Partition(consumer.client, partition)
        consumer.run(make_known(rows, experience_consumer_stage, experience_columns))
    finally:
        consumer.close()
    dataset = StreamingDataset(
        queue=where,
        partition=partition,
        task=experience_consumer_stage,
        columns=experience_columns,
        rows=experience_count,
        acknowledge="explicit",
        prefetch=prefetch,
        patience_s=patience_s,
    )
    form = _Form(lists=use_vllm, multiple=pad_to_multiple_of)
    return StreamLoader(dataset, form=form, workers=num_workers, check=check)


async def make_known(rows: Partition, stage: str, columns: Sequence[str]) -> None:
    """Make a stage known that consumes rows with ``columns``, unless the partition has it already."""
    if rows.name in await rows.queue.partitions(timeout=_CALL_S):
        view = await rows.queue.show(rows.name, timeout=_CALL_S)
        if stage in {task.name for task in view.tasks}:
            return
    await rows.declare(stage, list(columns), timeout=_CALL_S)
