"""The interface of all trainer backends. The training loops use nothing else of a backend.

Invariants: the weights change only in ``update`` and ``finish_step``. Each of these calls turns the gradient of all
micro-batches since the last change into one optimizer update, the same on every rank. ``finish_step`` makes the last
update of a step, so a ``snapshot`` taken after it contains whole steps only.

All methods block. They are called from one thread, the compute thread, in the same order on every rank. The exception
is ``tensors``, which is called from another thread while neither ``load`` nor ``finish_step`` runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from numpy.typing import NDArray

from asyncflow.errors import Diverged, ManifestError
from asyncflow.flow.slots import SLOT_TOKENS
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.training.batch import MicroBatch
from asyncflow.training.critic import CriticLink, CriticModel
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings, WeightsDtype
from asyncflow.weights.probe import WeightProbe
from asyncflow.weights.sender import PublishedSlice, Tensors

_MOST_SKIPPED = 3
"""Number of consecutive steps without a finite gradient at which training ends."""

OPTIONS = "spec.trainer.backend.options"
"""The manifest field with the backend's own options."""


class TrainerBackend(ABC):
    """The model and the optimizer of one rank.

    of_model: whether the backend trains the model in the model folder. If so, θ_0 must be in that folder, and the last
        weights can be exported as a model folder.
    Options: structure of the backend's own options, each field with a default, so that they are checked before any
        process starts; None: only the backend itself can check them.
    trained: samples whose gradient was added since the last ``finish_step``, counted once per epoch. Other threads may
        read it.
    slot_tokens: most tokens of a rank's part of a slot, the same on all ranks; it does not change after ``load``.
    spans: recorder with which a backend may record the phases of a micro-batch.
    critic_link: calls to the critic if it is a role of its own, set before ``load``.
    """

    Options: ClassVar[type[msgspec.Struct] | None] = None
    of_model = True
    trained = 0
    spans: Spans = NO_SPANS
    critic_link: CriticLink | None = None

    def __init__(self, settings: BackendSettings, *, group: ProcessGroup) -> None:
        """Prepare the backend. Raises ManifestError for unknown ``settings.options``, and for ``settings.critic`` if
        the backend does not support a critic.
        """
        self.settings = settings
        self.group = group
        self.slot_tokens = settings.pack_tokens or max(SLOT_TOKENS, settings.longest_part)

    @classmethod
    def separate_critic(cls, settings: BackendSettings, *, folder: Path) -> CriticModel:  # noqa: ARG003
        """Return the critic of this backend for a separate process. folder: the model's; settings: the critic's.

        Raises ManifestError if the backend does not support this, which is the default.
        """
        what = f"{cls.__name__} does not support a critic in its own process"
        raise ManifestError(what, where="spec.critic.role", hint="Leave it out, or use the backend torch")

    @abstractmethod
    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        """Load θ_0 from the model folder, or the state that a ``snapshot`` wrote into ``checkpoint``.

        All ranks need ``folder``/config.json. Rank 0 can read all files. Another rank may read the weights and the
        checkpoint if it can access them (``checkpoint`` is None if it cannot, or if there is none). Raises
        CheckpointError if the files do not fit the settings.
        """

    def load_weights(self, folder: Path, *, checkpoint: Path | None) -> None:
        """Load only the weights of a checkpoint, in order to export them without training. Arguments as of ``load``.

        By default this is ``load``.
        """
        self.load(folder, checkpoint=checkpoint)

    def prepare(self, batch: MicroBatch, *, weights: Mapping[str, NDArray[Any]] | None = None) -> MicroBatch:  # noqa: ARG002
        """Return ``batch`` with the log-probs of the old policy and the advantages that need all samples of a step.

        weights: the old policy's weights, as ``tensors`` yielded them on this rank; None: the current weights, which
        are those before the updates of the step. Called on every rank. If a step makes several updates or the algorithm
        needs it, the batch holds the rank's samples of a whole step. If the loss has the old policy ``lagged``, it
        holds the samples of a slot. By default the batch is returned unchanged.
        """
        return batch

    @abstractmethod
    def micro_batch(self, batch: MicroBatch, *, version: int | None) -> None:
        """Add the unnormalised gradient of ``batch``, which may be empty.

        version: packed version of the current weights; samples generated by it are used to compare engine and trainer.
        None: the weights are between two versions.
        """

    def measure(self, batch: MicroBatch, *, weights: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Compare engine and trainer on samples that older ``weights`` generated, as part of this step.

        weights: the tensors of that version, as ``tensors`` yielded them on this rank. Called on every rank for the
        same weights, with a batch that may be empty. Changes neither weights nor gradient. By default nothing is
        measured.
        """

    @abstractmethod
    def update(self, step: int) -> None:
        """Make an optimizer update of ``step`` that is not its last, normalised as in ``finish_step``."""

    @abstractmethod
    def finish_step(self, step: int) -> dict[str, float]:
        """Make the last update of a step, which produces θ_step, and return its metrics, equal on every rank.

        The gradient is normalised over all ranks and all micro-batches since the last update. The metric ``skipped`` is
        1 if no update of the step had a finite gradient and the weights did not change. Raises Diverged on every rank
        if this repeats.
        """

    @abstractmethod
    def tensors(self, *, dtype: WeightsDtype = "float32") -> Iterator[tuple[str, NDArray[Any] | PublishedSlice]]:
        """Yield the weights by name, as views if possible, which are valid until the next ``finish_step``.

        Each rank yields its slice of a sharded tensor; any other tensor is the same on all ranks. dtype: dtype to which
        floating-point weights are rounded; bfloat16 is returned as uint16 bits.
        """

    def probe(self) -> WeightProbe | None:
        """Return a probe of the current weights, which a process that loads them uses to verify its own log-probs.

        Collective. None, by default: the backend's tensors are not a model's.
        """
        return None

    def full_tensors(self, tensors: Tensors) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield full tensors, gathered from the parts in ``tensors`` of all ranks. Collective.

        Used if rank 0 must write everything. By default no tensor is sharded.
        """
        for name, tensor in tensors.items():
            yield name, tensor.array if isinstance(tensor, PublishedSlice) else tensor

    @abstractmethod
    def snapshot(self, *, shared: bool = True) -> Callable[[Path], None]:
        """Return a function that writes this rank's part of the current state into the rank's own empty folder.

        The state consists of weights, optimizer and generators. ``load`` continues bit for bit with the same number of
        ranks, and up to rounding with another number. shared: whether all ranks can read the folders. If so, the state
        has been copied, and the function may run in another thread during training. Otherwise only rank 0 has a folder
        and writes everything: the function is collective and must be called in the compute thread before the state
        changes. It raises OSError or DiskError if the disk fails.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the collectives and release all resources."""


def check_skipped(skipped: int, *, step: int) -> None:
    """Raise Diverged if ``skipped``, the number of consecutive steps up to ``step`` without an update, is 3."""
    if skipped == _MOST_SKIPPED:
        raise Diverged(
            f"the gradient is not finite in steps {step - _MOST_SKIPPED + 1} to {step}",
            where="trainer",
            hint="Try a lower learningRate or a lower maxGradNorm, or another precision; the run can be resumed",
        )
