"""A trainer backend whose computation is done by the user's loop, in the user's thread.

    trainer (``training.trainer``)             the user's loop
    load            checkpoint  ────>  state
    tensors         weights     <────  begin
    micro_batch     samples     ────>  take, take, ..., None
    finish_step     weights     <────  finish

The trainer does everything else as with any backend: claims and prefetches samples, publishes weights, reports steps,
writes and commits checkpoints, and leaves.

Invariants: neither thread computes for the other; weights and state from the user are copied before the call returns,
so a checkpoint or a publication of a step contains the values with which the step was finished; once the session has
ended, for any reason, no thread stays blocked here.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.errors import CheckpointError, DeadlineExceeded, ManifestError, Refused
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import MANIFEST, CheckpointManifest
from asyncflow.training.ranks import GroupLeft, ProcessGroup
from asyncflow.training.settings import BackendSettings, WeightsDtype
from asyncflow.training.torch.device import as_array, rounded

T = TypeVar("T")

_FILE: Final = "state.pt"
_END: Final = "end"


class Handover(TrainerBackend):
    """The trainer's side and the user's side (``begin``, ``take``, ``finish``) of one session.

    state: the user's state in the checkpoint from which the session continues, None if it starts at θ_0; step: the last
    completed step. opened: set once both are known, or the session has ended.
    """

    def __init__(self, settings: BackendSettings, *, group: ProcessGroup) -> None:
        if group.world > 1:
            what, hint = f"{group.world} ranks", "Set trainer.replicas: 1"
            raise ManifestError(what, where="spec.trainer", hint=hint)
        super().__init__(settings, group=group)
        self.state: Any = None
        self.step = 0
        self.opened = threading.Event()
        self._changed = threading.Condition()
        self._ended: Callable[[], BaseException] | None = None
        self._weights: dict[str, Tensor] | None = None
        self._packed_state = b""
        self._offered: MicroBatch | Literal["end"] | None = None
        self._exhausted = self._finished = False
        self._metrics: dict[str, float] = {}

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights with which the session starts."""
        copied = _copied(weights)
        with self._changed:
            self._check()
            self._weights = copied
            self._changed.notify_all()

    @property
    def has_weights(self) -> bool:
        """True once the user has set weights."""
        return self._weights is not None

    @property
    def within_step(self) -> bool:
        """True while samples of a step were taken that the user has not finished."""
        with self._changed:
            return self._exhausted or (self.trained > 0 and not self._finished)

    def take(self, convert: Callable[[MicroBatch], T], *, what: str, timeout: float) -> T | None:
        """Return the next samples of the step, converted; None once all were taken.

        Samples whose conversion fails, or is interrupted, are not taken. Raises DeadlineExceeded for ``what``.
        """
        with self._changed:
            if not self._exhausted:
                self._wait(lambda: self._offered is not None or self._exhausted, what=what, timeout=timeout)
            if self._exhausted:
                return None
            offered = self._offered
            taken = convert(offered) if isinstance(offered, MicroBatch) else None
            self._offered = None
            self._changed.notify_all()
            if not isinstance(offered, MicroBatch):
                self._exhausted = True
                return None
            self.trained += len(offered)
            return taken

    def finish(self, weights: Mapping[str, Tensor], *, state: Any, metrics: Mapping[str, float]) -> None:
        """Set the weights, state and metrics after the step. Raises Refused if samples of the step were not taken."""
        copied, packed = _copied(weights), _packed(state)
        with self._changed:
            self._check()
            if not self._exhausted:
                hint = "Call get_experience_data until it returns None: a step trains all of its samples"
                what = f"step {self.step + 1} has samples that were not taken yet"
                raise Refused(what, where="weight_sync_notify", hint=hint)
            self._weights, self._packed_state, self._metrics = copied, packed, dict(metrics)
            self._exhausted, self._finished = False, True
            self.step += 1
            self._changed.notify_all()

    def end(self, reason: Callable[[], BaseException]) -> None:
        """Wake both threads: the trainer's thread leaves, and calls of the user raise ``reason()`` from now on."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()
        self.opened.set()

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:  # noqa: ARG002
        """Read the user's state from ``checkpoint``, and wait for the first weights (``begin``)."""
        if checkpoint is not None:
            self.step = msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=CheckpointManifest).step
            try:
                self._packed_state = (checkpoint / _FILE).read_bytes()
                self.state = torch.load(io.BytesIO(self._packed_state), weights_only=True)
            except Exception as error:
                hint = "It was written by another backend, or torch.load(weights_only=True) refuses its objects"
                raise CheckpointError(f"{_FILE}: {error}", where=str(checkpoint), hint=hint) from error
        self.opened.set()
        with self._changed:
            self._wait_here(lambda: self._weights is not None)

    def micro_batch(self, batch: MicroBatch, *, version: int | None) -> None:  # noqa: ARG002
        """Offer the samples, and wait until they are taken."""
        if len(batch):
            self._offer(batch)

    def update(self, step: int) -> None:
        """Raise ManifestError: the user's loop makes its updates itself."""
        raise ManifestError(
            f"step {step} has several updates", where="spec.algorithm", hint="Leave epochs and miniBatches at 1"
        )

    def finish_step(self, step: int) -> dict[str, float]:  # noqa: ARG002
        """Signal that the step has no more samples, and wait until the user has finished it."""
        self._offer(_END)
        with self._changed:
            self._wait_here(lambda: self._finished)
            self._finished, self.trained = False, 0
            return self._metrics

    def tensors(self, *, dtype: WeightsDtype = "float32") -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the last weights from the user."""
        with self._changed:
            weights = self._weights
        for name, tensor in (weights or {}).items():
            yield name, as_array(rounded(tensor, getattr(torch, dtype)))

    def snapshot(self, *, shared: bool = True) -> Callable[[Path], None]:  # noqa: ARG002
        """Return a function that writes the state with which the last step was finished."""
        return partial(_write, packed=self._packed_state)

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _offer(self, offered: MicroBatch | Literal["end"]) -> None:
        with self._changed:
            self._offered = offered
            self._changed.notify_all()
            self._wait_here(lambda: self._offered is None)

    def _wait_here(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition in the trainer's thread. Raises GroupLeft once the session has ended."""
        while not condition():
            if self._ended is not None:
                raise GroupLeft
            self._changed.wait()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended()

    def _wait(self, condition: Callable[[], bool], *, what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                hint = "GET /v1/status of the driver, or the view of asyncflow run, says what the job waits for"
                raise DeadlineExceeded(f"{what} did not arrive within {timeout:g} s", where="session", hint=hint)
            self._changed.wait(left)


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}


def _packed(state: Any) -> bytes:
    """Return the state as bytes. Raises Refused for a state that could not be read again."""
    target = io.BytesIO()
    try:
        torch.save(state, target)
        _check_readable(target)
    except Exception as error:
        hint = "Pass tensors, numbers, texts, and lists and dicts of them, as state_dict() returns"
        what = f"a checkpoint with this state could not be read: {error}"
        raise Refused(what, where="weight_sync_notify", hint=hint) from error
    return target.getvalue()


def _check_readable(packed: io.BytesIO) -> None:
    """Read a state again, without the data of its tensors, which takes long; with the data if that fails."""
    with contextlib.suppress(Exception):
        packed.seek(0)
        torch.load(packed, weights_only=True, map_location="meta")
        return
    packed.seek(0)
    torch.load(packed, weights_only=True)


def _write(folder: Path, *, packed: bytes) -> None:
    (folder / _FILE).write_bytes(packed)
