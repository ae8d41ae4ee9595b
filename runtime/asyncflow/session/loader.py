"""The streaming loader of AsyncFlow's Code 1 (arXiv 2507.01663): yields a stage's rows, with an index, when ready.

    for data, index in create_stream_data_loader(queue, "actor_rollout", ["prompts"], 16):
        engines.put_experience_data({"responses": generate(data["prompts"])}, index)

Invariants: one consumer at a time has a row, until the results of the row are put, even if the loader yields further
rows meanwhile; rows without results become claimable by other consumers when the loader is closed or its process ends.
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
"""Default partition of a standalone queue."""
_CALL_S = 60.0
Check: TypeAlias = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
"""Returns the columns to write for the data that is put and its number of rows. Raises Refused for invalid data."""


@dataclass(frozen=True, kw_only=True)
class _Form:
    """Conversion of a batch. lists: return rows as lists; multiple: divisor of the length of padded rows."""

    lists: bool
    multiple: int

    def __call__(self, batch: Batch) -> tuple[dict[str, Any], BatchLease]:
        assert batch.lease is not None
        data: dict[str, Any] = {}
        for name, column in batch.columns.items():
            if column.kind not in ("rows", "scalar"):
                data[name] = [column[row] for row in range(len(column))]
            elif self.lists:
                data[name] = [column[row].tolist() for row in range(len(column))]
            else:
                padded = column.padded()
                if column.kind == "rows" and (remainder := padded.shape[1] % self.multiple):
                    fill = padded.new_zeros(len(padded), self.multiple - remainder, *padded.shape[2:])
                    padded = torch.cat([padded, fill], dim=1)
                data[name] = padded
                if column.kind == "rows":
                    data[f"{name}_length"] = column.lengths
        return data, batch.lease


class StreamLoader:
    """Iterates over the rows of one stage as (data, index); a context manager. See ``create_stream_data_loader``."""

    def __init__(self, dataset: StreamingDataset, *, form: _Form, workers: int, check: Check | None) -> None:
        self._dataset = dataset
        self._check = check
        self._loader = DataLoader(dataset, batch_size=None, collate_fn=form, num_workers=workers, in_order=workers == 0)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], BatchLease]]:
        return iter(self._loader)

    def put(self, data: Mapping[str, Any], index: BatchLease) -> list[bool]:
        """Write the results of rows, which completes the rows; return False for each row that another consumer has now.

        Raises Refused, and writes nothing, if ``check`` refuses the data.
        """
        if self._check is not None:
            data = self._check(data, len(index.rows))
        return self._dataset.complete(Batch(metas=[], columns={}, lease=index), data)

    def close(self) -> None:
        """Return the claimed rows without results to other consumers."""
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
    """Return a loader that yields (data, index), up to ``experience_count`` rows at a time, when they are ready.

    queue: its address, or ``Engines.queue``; experience_consumer_stage: the consuming task, which is declared in an
    open partition if necessary; experience_columns: columns that it reads. use_vllm: return columns as lists of token
    ids, the input of vLLM; otherwise as tensors [rows, longest], padded with 0 to a multiple of ``pad_to_multiple_of``,
    each with a tensor ``NAME_length`` int64[rows]. num_workers: number of loader processes, each with its own claims;
    prefetch: number of batches that are fetched while one is computed; patience_s: seconds without a row after which
    the iteration raises DeadlineExceeded. check: called by ``put``; returns the columns to write.

    The iteration ends when the partition is closed or has had the number of rows that ``expect`` set.
    """
    if experience_count < 1 or pad_to_multiple_of < 1:
        what = f"experience_count {experience_count} and pad_to_multiple_of {pad_to_multiple_of} must be at least 1"
        raise Refused(what, where="create_stream_data_loader")
    address = QueueAddress(address=queue) if isinstance(queue, str) else queue
    consumer = Consumer(address)
    try:
        rows = Partition(consumer.client, partition)
        consumer.run(declare_stage(rows, experience_consumer_stage, experience_columns))
    finally:
        consumer.close()
    dataset = StreamingDataset(
        queue=address,
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


async def declare_stage(rows: Partition, stage: str, columns: Sequence[str]) -> None:
    """Declare a stage that reads ``columns``, unless the partition has it already."""
    if rows.name in await rows.queue.partitions(timeout=_CALL_S):
        view = await rows.queue.show(rows.name, timeout=_CALL_S)
        if stage in {task.name for task in view.tasks}:
            return
    await rows.declare(stage, list(columns), timeout=_CALL_S)
