"""The record of a trainer rank: the samples of each slot in order, and the versions that generated their tokens.

    DIR/steps/rank-0000.jsonl
      {"type":"begin", ...}    an attempt starts with the weights of a step
      {"type":"step", ...}     a step was completed with these samples
      {"type":"weights", ...}  the digest of weights that this rank published

Together with the checkpoints, the data and the seed this suffices to repeat a step (``asyncflow replay``). In streaming
modes a run depends on its manifest, on the order in which samples arrived, and on the versions that generated them. The
record contains digests of samples, not their contents, so that a regenerated sample can be compared with the original.

Invariants: every line is complete, except the last line of a process that was killed. If a disk fails, whole lines are
missing and training continues. The lines of an attempt are in chronological order. A sample takes about 100 bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from asyncflow.durable import make_folder
from asyncflow.errors import AsyncFlowError
from asyncflow.identity import SampleKey, Version
from asyncflow.training.batch import MicroBatch
from asyncflow.weights.manifest import ManifestPart, entries_digest

log = logging.getLogger(__name__)

STEPS = "steps"
"""Folder with these files in the folder of a run."""
_BYTES = 8


class TokenRun(Struct, frozen=True, array_like=True):
    """Consecutive tokens of a response that one version generated."""

    tokens: int
    attempt: int
    step: int

    @property
    def version(self) -> Version:
        """The version that generated the tokens."""
        return Version(self.attempt, self.step)


class SampleRecord(Struct, frozen=True, array_like=True):
    """A sample that was trained.

    runs: token runs in order; reward; decided: what the driver wrote (see ``StepRecord``), None if each token has its
    own advantage; ids, logprobs: digests of the response's tokens and of the engine's log-probs.
    """

    serial: int
    sample: int
    runs: list[TokenRun]
    reward: float | None
    decided: float | None
    ids: str
    logprobs: str

    @property
    def key(self) -> SampleKey:
        """The sample's key."""
        return SampleKey(self.serial, self.sample)

    @property
    def tokens(self) -> int:
        """Number of tokens of the response."""
        return sum(run.tokens for run in self.runs)


class BeginRecord(Struct, frozen=True, tag="begin", kw_only=True):
    """Attempt ``attempt`` of the trainer, with ``ranks`` ranks, started with the weights θ_step."""

    attempt: int
    step: int
    ranks: int


class StepRecord(Struct, frozen=True, tag="step", kw_only=True):
    """``attempt`` completed step ``step``.

    slots: this rank's samples of each slot, in the order of accumulation; decided: the column that the driver wrote,
    ``advantage``, or ``outcome`` if the trainer computed the advantages.
    """

    attempt: int
    step: int
    slots: list[list[SampleRecord]]
    decided: str = "advantage"


class WeightsRecord(Struct, frozen=True, tag="weights", kw_only=True):
    """Digest of θ_step as published by this rank (``entries_digest``)."""

    attempt: int
    step: int
    digest: str


Record: TypeAlias = BeginRecord | StepRecord | WeightsRecord

_decode = msgspec.json.Decoder(Record).decode


def digest(values: NDArray[np.generic]) -> str:
    """Return a digest of the values of an array [n], in hex."""
    return blake2b(np.ascontiguousarray(values).tobytes(), digest_size=_BYTES).hexdigest()


def runs_of(versions: NDArray[np.int64]) -> list[TokenRun]:
    """Return the token runs of a response; versions: ``Version.packed`` of each token, int64[n]."""
    bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [
        TokenRun(end - start, *Version.unpack(int(versions[start]))) for start, end in pairwise(bounds) if end > start
    ]


def records_of(batch: MicroBatch) -> list[SampleRecord]:
    """Return the records of the samples of a slot, in their order."""
    decided = batch.advantages if batch.advantages is not None else batch.outcomes
    if batch.token_advantages is not None:
        decided = None
    return [
        SampleRecord(
            *key,
            runs_of(batch.versions.row(index)),
            None if batch.rewards is None else float(batch.rewards[index]),
            None if decided is None else float(decided[index]),
            digest(np.asarray(batch.responses.row(index), np.int32)),
            digest(np.asarray(batch.logprobs.row(index), np.float32)),
        )
        for index, key in enumerate(batch.keys)
    ]


def step_file(run: Path, rank: int) -> Path:
    """Return the path of a rank's record."""
    return run / STEPS / f"rank-{rank:04d}.jsonl"


class StepRecorder:
    """Writes the record of one rank in the folder of a run; if the disk fails, lines are missing.

    decided: as in ``StepRecord``.
    """

    def __init__(self, run: Path, *, rank: int, attempt: int, decided: str) -> None:
        self._path = step_file(run, rank)
        self._attempt = attempt
        self._decided = decided
        self._slots: list[list[SampleRecord]] = []
        self._started = self._failing = False

    def begin(self, step: int, *, ranks: int) -> None:
        """Record that the attempt starts with θ_step."""
        self._write(BeginRecord(attempt=self._attempt, step=step, ranks=ranks))

    def add(self, batch: MicroBatch) -> None:
        """Add this rank's part of the next slot."""
        self._slots.append(records_of(batch))

    def finish(self, step: int) -> None:
        """Record that the step was completed with the slots added since the last one."""
        slots, self._slots = self._slots, []
        self._write(StepRecord(attempt=self._attempt, step=step, slots=slots, decided=self._decided))

    def published(self, part: ManifestPart) -> None:
        """Record the digest of a published version; called from another task of the same thread."""
        step = Version.unpack(part.version).step
        self._write(WeightsRecord(attempt=self._attempt, step=step, digest=entries_digest(part.tensors)))

    def _write(self, record: Record) -> None:
        line = msgspec.json.encode(record) + b"\n"
        try:
            make_folder(self._path.parent)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                end = os.fstat(descriptor).st_size
                torn = not self._started and end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
                if os.write(descriptor, data := b"\n" * torn + line) < len(data):
                    os.ftruncate(descriptor, end)
                    raise OSError("the disk is full")
            finally:
                os.close(descriptor)
            self._started, self._failing = True, False
        except OSError as error:
            if not self._failing:
                log.warning("%s cannot be written and will lack steps: %s", self._path, error)
            self._failing = True


def read_records(run: Path, rank: int) -> Iterator[Record]:
    """Yield a rank's records in order, skipping lines that were torn when a process was killed.

    Raises AsyncFlowError if there is no such file.
    """
    path = step_file(run, rank)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        hint = "The run has not trained a step, or was made by an older version of AsyncFlow"
        raise AsyncFlowError(f"there is no record of steps: {error.strerror}", where=str(path), hint=hint) from error
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            yield _decode(line)


def ranks_of(run: Path) -> Sequence[int]:
    """Return the ranks that have a record."""
    return sorted(int(path.stem.removeprefix("rank-")) for path in (run / STEPS).glob("rank-*.jsonl"))
