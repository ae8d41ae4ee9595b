"""Rows that a task has leased, with what they hold."""

import numpy as np

from asyncflow.data.base import Prompt
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta
from asyncflow.rpc.columns import Jagged


def batch(count: int) -> tuple[list[LeasedRow], dict[str, Jagged]]:
    rows = [
        LeasedRow(
            row=index,
            meta=RowMeta(partition="train", serial=3, sample=index, step=1),
            attempt=0,
            lease="1@task-a-0",
            until=9.0,
            unit=0,
            bytes={},
        )
        for index in range(count)
    ]
    packed = np.frombuffer(Prompt(question="why?", answer=4).packed(), np.uint8)
    return rows, {
        "response_ids": Jagged.from_rows([np.arange(index) for index in range(count)], np.int32),
        "task": Jagged.from_rows([packed] * count, np.uint8),
    }
