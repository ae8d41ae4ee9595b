"""The optimizer steps of a training task as a data set, for one of several data-parallel ranks.

All ranks are one consumer, the queue's gang (``table.training``): they share the groups of a step. The queue divides
them into slots, and each rank gets its part of every slot, so that all ranks make the same number of micro-batches of
about the same number of tokens. A slot never changes, and can be requested again until a checkpoint contains it.

    data.begin(step=0)                                    # the weights are θ_0
    for batch in DataLoader(data, batch_size=None, num_workers=4):
        accumulate(batch)
        if batch.last:
            optimizer_step()
            data.step_done(batch.step)                    # and after a checkpoint: data.commit()

Invariants: slots come in order, each once per iteration, for any number of loader workers: worker w of W fetches every
W-th slot. Only committed rows are freed, so a trainer that starts again from θ_k gets everything after k again.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from asyncflow.errors import DeadlineExceeded, Refused, StaleHandle
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import Slot
from asyncflow.queue.torch.batch import Batch, columns_of
from asyncflow.queue.torch.dataset import CALL_S, QueueAddress, QueueDataset
from asyncflow.queue.torch.exchange import broadcast

_OPEN = 1 << 62


class StepDataset(QueueDataset):
    """The slots of the steps of ``partition``, for rank ``rank`` of ``world`` data-parallel ranks.

    tokens: most tokens of one batch; a longer sample (or group, if the task says ``groups``) comes alone. A batch may
    be empty if a slot has no rows for this rank. The iteration starts at the first step that is not done and ends where
    the partition was closed; see ``seek``.
    """

    def __init__(
        self,
        *,
        queue: QueueAddress | str,
        partition: str,
        columns: Sequence[str],
        tokens: int,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 1,
        patience_s: float = 3600.0,
    ) -> None:
        super().__init__(queue=queue, partition=partition, columns=columns, prefetch=prefetch, patience_s=patience_s)
        self._where = f"{partition} rank {rank} of {world}"
        if tokens < 1 or not 0 <= rank < world:
            raise Refused(f"{tokens} tokens are fewer than 1, or there is no such rank", where=self._where)
        self.rank = rank
        self.world = world
        self._tokens = tokens
        self._done = 0
        self._position = torch.tensor([-1, 1, _OPEN]).share_memory_()

    @property
    def attempt(self) -> int:
        """The trainer's attempt, -1 before ``begin``. Loader workers see it, including persistent ones."""
        return int(self._position[0])

    def begin(
        self, *, step: int | None = None, attempt: int | None = None, group: dist.ProcessGroup | None = None
    ) -> int:
        """Start to train from weights θ_step, by default the step of the loaded state, or 0; return the attempt.

        Steps up to ``step`` are committed, later ones start again, and older attempts are fenced. attempt: by default
        one more than the last one, which the first process of ``group`` (default: all processes) reads and broadcasts;
        then every process of the group must call this.
        """
        done = self._done if step is None else step
        attempt = self._next_attempt(group) if attempt is None else attempt
        request = {"partition": self.partition, "attempt": attempt, "step": done, "world": self.world}
        self._consumer().queue.begin(**request, timeout=CALL_S)
        self._done = done
        self._position[0] = attempt
        self.seek(done + 1)
        return attempt

    def seek(self, step: int, *, last: int | None = None) -> None:
        """Set the next iteration to start at ``step`` and to end after ``last``; uncommitted steps are repeated.

        A running iteration is not changed.
        """
        if step < 1 or (last is not None and last < step):
            raise Refused(f"there are no steps from {step} to {last}", where=self._where)
        self._position[1], self._position[2] = step, _OPEN if last is None else last

    def step_done(self, step: int) -> None:
        """Report that this rank has made its optimizer step; the next iteration starts after it."""
        request = {"partition": self.partition, "attempt": self._started_attempt(), "step": step, "rank": self.rank}
        self._consumer().queue.step_done(**request, timeout=CALL_S)
        self._done = step
        self._position[1] = max(int(self._position[1]), step + 1)

    def commit(self, step: int | None = None) -> None:
        """Report that a checkpoint contains all steps up to ``step`` (default: the last done), to free their rows."""
        done, attempt = self._done if step is None else step, self._started_attempt()
        self._consumer().queue.commit(partition=self.partition, attempt=attempt, step=done, timeout=CALL_S)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in the checkpoint with the weights: the last step that they contain."""
        return {"partition": self.partition, "step": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the checkpoint from which the weights were read; call ``begin`` next."""
        if set(state) != {"partition", "step"} or state["partition"] != self.partition:
            raise Refused(f"the state is that of {dict(state)}", where=self._where)
        self._done = int(state["step"])
        self._position[0] = -1

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one step after another; ``Batch.last`` ends a step."""
        attempt, first, last = self._started_attempt(), int(self._position[1]), int(self._position[2])
        consumer = self._consumer()
        batches = self._batches(consumer.client, range(first, last + 1), attempt, get_worker_info())
        yield from consumer.prefetched(batches, self._prefetch)

    async def _batches(self, client: QueueClient, steps: range, attempt: int, loader: Any) -> AsyncGenerator[Batch]:
        """Yield the batches of ``loader``, one of several loader workers, or all batches if it is None."""
        numbers = itertools.count()
        for step in steps:
            for place in itertools.count():
                slot = await self._slot(client, attempt, step, place)
                if slot is None:
                    return
                if loader is None or next(numbers) % loader.num_workers == loader.id:
                    yield await self._fetch(client, slot)
                if slot.last:
                    break

    async def _slot(self, client: QueueClient, attempt: int, step: int, number: int) -> Slot | None:
        """Return a slot as soon as it is decided; None if the partition was closed before its step."""
        slot = await client.slot(
            partition=self.partition,
            attempt=attempt,
            step=step,
            slot=number,
            rank=self.rank,
            tokens=self._tokens,
            timeout=self._patience_s,
        )
        if slot is None:
            closed = (await client.snapshot(partition=self.partition, timeout=CALL_S)).closed
            if closed is None or step <= closed:
                hint = "Check that the tasks before this one make progress, and that the step was opened"
                what = f"slot {number} of step {step} was not ready within {self._patience_s:g} s"
                raise DeadlineExceeded(what, where=self._where, hint=hint)
        return slot

    async def _fetch(self, client: QueueClient, slot: Slot) -> Batch:
        try:
            fetched = await client.fetch(slot.rows, self.columns, timeout=CALL_S)
        except StaleHandle as error:
            hint = "Storage was lost: begin again at the last checkpoint, and the queue requests these samples again"
            raise StaleHandle(error.what, where=f"slot {slot.slot} of step {slot.step}", hint=hint) from error
        return Batch(
            metas=[row.meta for row in slot.rows],
            columns=columns_of(fetched, self.columns),
            step=slot.step,
            slot=slot.slot,
            last=slot.last,
            totals=slot.totals,
        )

    def _next_attempt(self, group: dist.ProcessGroup | None) -> int:
        """Return the attempt after the last one, as read by the first process of ``group``."""

        def find() -> bytearray:
            last = self._consumer().queue.snapshot(partition=self.partition, timeout=CALL_S).attempt
            return bytearray(str(last + 1).encode())

        if dist.is_initialized() and dist.get_world_size(group) > 1:
            return int(bytes(broadcast(find, group)))
        if self.world > 1:
            hint = "Initialize torch.distributed, or pass the attempt: one more than the last, the same on all ranks"
            raise Refused(f"{self.world} ranks cannot agree on an attempt", where=self._where, hint=hint)
        return int(find())

    def _started_attempt(self) -> int:
        if self.attempt < 0:
            hint = "Call begin first, with the step of the weights"
            raise Refused("the training has not started", where=self._where, hint=hint)
        return self.attempt
