"""The counting trainer: its weights count how often each sample was trained, to verify exactly-once training.

The tensor ``counts``, int64[N], is indexed by serial * group_size + sample; every step adds one for each sample of D_k.
It passes through the real packing of slots, checkpoints, publications and restores, so the verification does not depend
on the ledger. Every element of a second tensor, ``moving``, changes at every step, as the weights of a model do, so
that whole versions are transferred.

A separate critic (``separate_critic``) counts the samples that it learns from in the same way, in its own file.

Invariant: after step k the entry of a sample is the number of steps up to k whose D_k contained it, times the epochs of
each, among the steps that are part of the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.plugins import read_options
from asyncflow.rpc.columns import Jagged
from asyncflow.training.backend import OPTIONS, TrainerBackend
from asyncflow.training.batch import MicroBatch
from asyncflow.training.critic import CriticModel, Meeting
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings, WeightsDtype

TENSOR = "counts"
MOVING = "moving"
_FILE = "counts.npy"
CRITIC_COUNTS = "critic-counts.npy"


_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class CountingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the backend ``counting``.

    capacity: N; moving: elements of the second tensor, int64; sleep_s, sample_s, token_s, step_s: simulated seconds
    per micro-batch, per sample, per token (including prompts), and per optimizer step.
    """

    capacity: Annotated[int, msgspec.Meta(ge=1)] = 65_536
    moving: Annotated[int, msgspec.Meta(ge=0)] = 0
    sleep_s: _Seconds = 0.0
    sample_s: _Seconds = 0.0
    token_s: _Seconds = 0.0
    step_s: _Seconds = 0.0

    def micro_batch_s(self, *, samples: int, tokens: int) -> float:
        """Return the simulated duration of a micro-batch in seconds."""
        return self.sleep_s + self.sample_s * samples + self.token_s * tokens


class CountingBackend(TrainerBackend):
    """Adds one for each trained sample; needs neither a model nor torch."""

    Options = CountingOptions
    of_model = False

    def __init__(self, settings: BackendSettings, *, group: ProcessGroup) -> None:
        super().__init__(settings, group=group)
        options = read_options(settings.options, CountingOptions, where=OPTIONS)
        self._counts = np.zeros(options.capacity, dtype=np.int64)
        self._pending = np.zeros_like(self._counts)
        self._moving = options.moving
        self._durations = options

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:  # noqa: ARG002
        """Load the counts of ``checkpoint``, or zeros; the model folder is not read."""
        first = self.group.rank == 0
        counts = np.zeros_like(self._counts)
        if checkpoint is not None and first:
            counts = _stored(checkpoint / _FILE, like=counts)
        if self.critic_link is not None and first:
            self.critic_link.load(checkpoint)
        self._counts = self.group.gather(counts, what="counts")[0]
        self._pending[:] = 0

    @classmethod
    def separate_critic(cls, settings: BackendSettings, *, folder: Path) -> CriticModel:  # noqa: ARG003
        """See the base class."""
        return CountingCritic(settings)

    def micro_batch(self, batch: MicroBatch, *, version: int | None) -> None:  # noqa: ARG002
        """Add one for each sample of ``batch``. Raises ManifestError for an index beyond the capacity."""
        if self.critic_link is not None:
            values = self.critic_link.values(batch)
            self.critic_link.learn(replace(batch, values=values, returns=values))
        _count(self._pending, batch, group_size=self.settings.group_size)
        self.trained += len(batch)
        tokens = len(batch.prompts.values) + len(batch.responses.values)
        time.sleep(self._durations.micro_batch_s(samples=len(batch), tokens=tokens))

    def update(self, step: int) -> None:
        """Update only the critic; counts are added at the end of the step."""
        self._move_critic(step)
        if self.critic_link is not None:
            self.group.gather(np.zeros(1), what=f"the critic's update of step {step}")

    def finish_step(self, step: int) -> dict[str, float]:
        """Add the counts of all ranks."""
        self._move_critic(step)
        time.sleep(self._durations.step_s)
        added = self.group.gather(self._pending, what=f"counts of step {step}").sum(axis=0)
        self._counts = self._counts + added
        self._pending[:] = 0
        self.trained = 0
        return {"counted": float(added.sum()), "counted_max": float(self._counts.max())}

    def _move_critic(self, step: int) -> None:
        if self.critic_link is None:
            return
        self.group.gather(np.zeros(1), what=f"the critic's gradient of step {step}")
        if self.group.rank == 0:
            self.critic_link.settle(step)
            self.critic_link.update(step, divisor=1.0, moves=True)

    def tensors(self, *, dtype: WeightsDtype = "float32") -> Iterator[tuple[str, NDArray[Any]]]:  # noqa: ARG002
        """Yield the integer tensors ``counts`` and, if enabled, ``moving``; its elements are the sum of all counts."""
        yield TENSOR, self._counts
        if self._moving:
            yield MOVING, np.full(self._moving, self._counts.sum())

    def snapshot(self, *, shared: bool = True) -> Callable[[Path], None]:  # noqa: ARG002
        """Return the writer of counts.npy; only rank 0 writes, because all ranks have the same counts."""
        counts, writes = self._counts, self.group.rank == 0
        link = self.critic_link if writes else None
        if link is not None:
            link.copy()

        def write(folder: Path) -> None:
            if writes:
                np.save(folder / _FILE, counts, allow_pickle=False)
            if link is not None:
                link.write(folder)

        return write

    def close(self) -> None:
        """Do nothing: no resources are held."""


class CountingCritic:
    """The critic of one process: it counts the samples that it has learned from, and every value is 0."""

    files: tuple[str, ...] = (CRITIC_COUNTS,)

    def __init__(self, settings: BackendSettings) -> None:
        options = read_options(settings.options, CountingOptions, where=OPTIONS)
        self._group_size = settings.group_size
        self._counts = np.zeros(options.capacity, dtype=np.int64)
        self._pending = np.zeros_like(self._counts)

    def load(self, checkpoint: Path | None, meeting: Meeting | None = None) -> None:
        """Load the counts of ``checkpoint``, or zeros. Raises ManifestError if there are other replicas."""
        if meeting is not None:
            raise ManifestError(
                "the counting critic supports only one process",
                where="spec.critic.role.replicas",
                hint="Set replicas: 1",
            )
        zeros = np.zeros_like(self._counts)
        self._counts = zeros if checkpoint is None else _stored(checkpoint / CRITIC_COUNTS, like=zeros)
        self.forget()

    def values(self, batch: MicroBatch) -> Jagged:
        """Return 0 for each response token."""
        return Jagged(np.zeros(len(batch.responses.values), np.float32), batch.responses.offsets)

    def learn(self, batch: MicroBatch) -> None:
        """Add one for each sample of ``batch``."""
        _count(self._pending, batch, group_size=self._group_size)

    def forget(self) -> None:
        """Discard the counts since the last step."""
        self._pending = np.zeros_like(self._counts)

    def settle(self) -> dict[str, float]:
        """Return no figures."""
        return {}

    def update(self, step: int, *, divisor: float, moves: bool) -> None:  # noqa: ARG002
        """Add the counts since the last update, if ``moves``."""
        if moves:
            self._counts = self._counts + self._pending
        self.forget()

    def copy(self) -> Callable[[Path], None]:
        """Return the writer of critic-counts.npy; later updates do not change the array that it writes."""
        counts = self._counts

        def write(folder: Path) -> None:
            np.save(folder / CRITIC_COUNTS, counts, allow_pickle=False)

        return write


def _count(pending: NDArray[np.int64], batch: MicroBatch, *, group_size: int) -> None:
    """Add one for each sample of ``batch``. Raises ManifestError for an index beyond the capacity."""
    for key in batch.keys:
        index = key.serial * group_size + key.sample
        if index >= pending.size:
            raise ManifestError(
                f"sample {tuple(key)} has index {index}, and the counting trainer has capacity {pending.size}",
                where=f"{OPTIONS}.capacity",
                hint="Set at least prompts * groupSize",
            )
        pending[index] += 1


def _stored(file: Path, *, like: NDArray[np.int64]) -> NDArray[np.int64]:
    stored: NDArray[np.int64] = np.load(file, allow_pickle=False)
    if stored.shape != like.shape or stored.dtype != like.dtype:
        raise CheckpointError(
            f"counts are {stored.dtype}{stored.shape}, not {like.dtype}{like.shape}",
            where=str(file),
            hint="Resume with the same capacity as at the start of the run",
        )
    return stored
