"""Packs of a rank's batches: their size is limited by memory, and all ranks make equally many passes.

Invariants: a pack identifies each target by its sample's index in the batch, and every target counts in the loss. All
ranks of a gang make equally many passes over a batch, so that no rank waits in a collective that another rank never
enters. A single rank that runs out of memory halves its packs once. A rank of a gang that runs out of memory ends,
because the other ranks would not repeat their passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.errors import ManifestError
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.packing import LayoutName, Pack, pack_samples
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings
from asyncflow.training.torch.memory import FIELD, PackBudget
from asyncflow.training.torch.model import smallest_pack


class Packs:
    """The packs of one rank. tokens: most tokens of a pack; padded: whether the model takes them as padded batches."""

    def __init__(self, settings: BackendSettings, *, tokens: int, group: ProcessGroup, padded: bool) -> None:
        self._layout: LayoutName = "separate" if padded else settings.layout
        self._padded = padded
        self._pairs = settings.loss.algorithm.pairs
        self._group = group
        self._budget = PackBudget(tokens)

    def of(self, batch: MicroBatch, chosen: NDArray[np.int64]) -> list[Pack]:
        """Pack the samples ``chosen``, each of which has a loss token; only loss tokens are targets."""
        groups = batch.pairs().tolist() if self._pairs else [key.serial for key in batch.keys]
        packs = pack_samples(
            [batch.prompts.row(i) for i in chosen.tolist()],
            [batch.responses.row(i) for i in chosen.tolist()],
            [groups[i] for i in chosen.tolist()],
            layout=self._layout,
            budget=self._budget.tokens,
            whole=self._pairs,
            padded=self._padded,
        )
        packs = [replace(pack, samples=chosen[pack.samples]) for pack in packs]
        if batch.loss_mask is None:
            return packs
        counted = batch.counted()
        return [pack.targeting(counted[entries(batch, pack)]) for pack in packs]

    def aligned(self, packs: list[Pack]) -> Iterator[Pack | None]:
        """Yield the packs, and then None until all ranks have made equally many passes.

        Collective before the first pack, so that no rank starts a pass that a leaving rank does not make.
        """
        most = self._group.gather(np.array([len(packs)]), what="the number of packs").max()
        yield from packs
        yield from (None for _ in range(int(most) - len(packs)))

    def evaluated(self, batch: MicroBatch, chosen: NDArray[np.int64], evaluate: Callable[[Pack], Tensor]) -> Jagged:
        """Return the results of ``evaluate`` for the targets of the samples ``chosen``, and 0 elsewhere. Collective.

        If memory runs out, repeats the evaluation in packs of half the size.
        """
        try:
            return self._evaluated_once(batch, chosen, evaluate)
        except torch.OutOfMemoryError as full:
            self.halve(full)
        return self._evaluated_once(batch, chosen, evaluate)

    def _evaluated_once(
        self, batch: MicroBatch, chosen: NDArray[np.int64], evaluate: Callable[[Pack], Tensor]
    ) -> Jagged:
        values = np.zeros(len(batch.responses.values), np.float32)
        for pack in self.aligned(self.of(batch, chosen)):
            found = evaluate(pack or smallest_pack()).cpu().numpy()
            if pack is not None:
                values[entries(batch, pack)] = found
        return Jagged(values, batch.responses.offsets)

    def halve(self, full: torch.OutOfMemoryError) -> None:
        """Halve the packs after memory ran out. Raises ManifestError if they were halved before, or in a gang."""
        self.refuse_in_gang(full)
        self._budget.halve(full)

    def refuse_in_gang(self, full: torch.OutOfMemoryError) -> None:
        """Raise ManifestError if other ranks took part in the pass that ran out of memory; they would not repeat it."""
        if self._group.world > 1:
            raise ManifestError(
                f"out of memory with packs of {self._budget.tokens} tokens: {full}",
                where=FIELD,
                hint="Set half of that: ranks of a gang make equally many passes, so one rank alone cannot repeat them",
            ) from full


def entries(batch: MicroBatch, pack: Pack) -> NDArray[np.int64]:
    """Return the indices of the targets of ``pack`` among the response tokens of its batch, [N]."""
    return batch.responses.offsets[pack.samples] + pack.offsets
