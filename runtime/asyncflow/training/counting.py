"""The counting trainer: its weights say how often each sample was trained.

The tensor ``counts``, int64[N], is indexed by serial * group_size + sample, and every step adds one for each sample of
D_k. It goes through the real packing of slots, checkpoints, publications and restores, and is so a witness of
exactly-once training that is independent of the ledger. A second tensor, ``moving``, changes in every element at every
step, as the weights of a model do, so that whole versions travel.

Invariant: after step k the entry of a sample is the number of steps up to k whose D_k held it, times the epochs of
each, in the weights that survived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.plugins import read_options
from asyncflow.training.backend import OPTIONS, TrainerBackend
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings, WeightsDtype

TENSOR = "counts"
MOVING = "moving"
_FILE = "counts.npy"


class CountingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """capacity: N; moving: elements of the second tensor, int64; sleep_s: seconds that a micro-batch takes."""

    capacity: Annotated[int, msgspec.Meta(ge=1)] = 65_536
    moving: Annotated[int, msgspec.Meta(ge=0)] = 0
    sleep_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class CountingBackend(TrainerBackend):
    """Adds one for each trained sample; needs no model and no torch."""

    Options = CountingOptions
    of_model = False

    def __init__(self, settings: BackendSettings, *, group: ProcessGroup) -> None:
        super().__init__(settings, group=group)
        options = read_options(settings.options, CountingOptions, where=OPTIONS)
        self._counts = np.zeros(options.capacity, dtype=np.int64)
        self._pending = np.zeros_like(self._counts)
        self._moving = options.moving
        self._sleep_s = options.sleep_s

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:  # noqa: ARG002
        """Take the counts of ``checkpoint``, or zeros; the model folder is not looked at."""
        counts = np.zeros_like(self._counts)
        if checkpoint is not None and self.group.rank == 0:
            stored = np.load(checkpoint / _FILE, allow_pickle=False)
            if stored.shape != counts.shape or stored.dtype != counts.dtype:
                raise CheckpointError(
                    f"counts are {stored.dtype}{stored.shape}, not {counts.dtype}{counts.shape}",
                    where=str(checkpoint / _FILE),
                    hint="Resume with the capacity that the run began with.",
                )
            counts = stored
        self._counts = self.group.gather(counts, what="counts")[0]
        self._pending[:] = 0

    def micro_batch(self, batch: MicroBatch, *, version: int | None) -> None:  # noqa: ARG002
        """Add one for each sample of ``batch``; an entry beyond the capacity is a ManifestError."""
        for key in batch.keys:
            index = key.serial * self.settings.group_size + key.sample
            if index >= self._pending.size:
                raise ManifestError(
                    f"sample {tuple(key)} has index {index}, the counting trainer holds {self._pending.size}",
                    where=f"{OPTIONS}.capacity",
                    hint="Give at least prompts * groupSize.",
                )
            self._pending[index] += 1
        self.trained += len(batch)
        time.sleep(self._sleep_s)

    def update(self, step: int) -> None:
        """Count on: everything since the last step is added at its end."""

    def finish_step(self, step: int) -> dict[str, float]:
        """Add what all ranks counted."""
        added = self.group.gather(self._pending, what=f"counts of step {step}").sum(axis=0)
        self._counts = self._counts + added
        self._pending[:] = 0
        self.trained = 0
        return {"counted": float(added.sum()), "counted_max": float(self._counts.max())}

    def tensors(self, *, dtype: WeightsDtype = "float32") -> Iterator[tuple[str, NDArray[Any]]]:  # noqa: ARG002
        """Yield ``counts``, which are whole numbers, and ``moving``, where it is wanted: the sum of all counts."""
        yield TENSOR, self._counts
        if self._moving:
            yield MOVING, np.full(self._moving, self._counts.sum())

    def snapshot(self, *, shared: bool = True) -> Callable[[Path], None]:  # noqa: ARG002
        """Return what writes counts.npy, by rank 0: all ranks count the same, and a step makes new counts."""
        counts, writes = self._counts, self.group.rank == 0

        def write(folder: Path) -> None:
            if writes:
                np.save(folder / _FILE, counts, allow_pickle=False)

        return write

    def close(self) -> None:
        """Nothing is held."""
