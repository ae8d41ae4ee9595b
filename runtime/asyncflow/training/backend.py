"""Interface of every trainer backend. The loops know nothing else of it.

Invariant: the weights change in ``update`` and ``finish_step`` only, however many micro-batches come between; each
turns the gradient of all micro-batches since the last change into one optimizer update, the same on every rank.
``finish_step`` makes the last update of a step, so a state that ``snapshot`` takes after it has seen whole steps only.

All methods block and are called from one thread, the compute thread, in the same order on every rank; but ``tensors``
is called from another, while no ``load`` and no ``finish_step`` runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from numpy.typing import NDArray

from asyncflow.errors import ManifestError
from asyncflow.flow.slots import SLOT_TOKENS
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.training.batch import MicroBatch
from asyncflow.training.critic import CriticLink, CriticModel
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings, WeightsDtype
from asyncflow.weights.probe import WeightProbe
from asyncflow.weights.sender import PublishedSlice, Tensors

OPTIONS = "spec.trainer.backend.options"
"""Field of a manifest with the backend's own options."""


class TrainerBackend(ABC):
    """One rank's model and optimizer.

    of_model: whether its tensors are those of the model in the folder, so that θ_0 has to lie there, and the last
    weights can be exported as one. Options: the shape of its own options, each field with a default, so that they are
    checked before anything starts; None: the backend alone can tell. trained: samples whose gradient was added since
    the last ``finish_step``, once in each epoch; another thread may read it. slot_tokens: most tokens that a rank's
    part of a slot should have, the same on all ranks; ``load`` may change it, and nothing does so afterwards.
    spans: by which a back end may tell apart what it does in a micro-batch.
    critic_link: calls of the critic where that is a role of its own, set before ``load``.
    """

    Options: ClassVar[type[msgspec.Struct] | None] = None
    of_model = True
    trained = 0
    spans: Spans = NO_SPANS
    critic_link: CriticLink | None = None

    def __init__(self, settings: BackendSettings, *, group: ProcessGroup) -> None:
        """Prepare. A backend raises ManifestError for ``settings.options`` that it does not know, and for
        ``settings.critic`` where it learns and has none.
        """
        self.settings = settings
        self.group = group
        self.slot_tokens = settings.pack_tokens or max(SLOT_TOKENS, settings.longest_part)

    @classmethod
    def apart(cls, settings: BackendSettings, *, folder: Path) -> CriticModel:  # noqa: ARG003
        """Return the critic of this back end for a process of its own. folder: of the model; settings: for it.

        Raises ManifestError where there is none, as by default.
        """
        what = f"{cls.__name__} has no critic in a process of its own"
        raise ManifestError(what, where="spec.critic.role", hint="Leave it out, or take the back end torch")

    @abstractmethod
    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        """Take θ_0 from the model folder, or the state of a ``snapshot`` that was written into ``checkpoint``.

        All ranks need ``folder``/config.json. What a rank sees of the weights and of the checkpoint (None where it sees
        none) it may read by itself; rank 0 sees all. Raises CheckpointError where what is there does not fit.
        """

    def take_weights(self, folder: Path, *, checkpoint: Path | None) -> None:
        """Take the weights alone of a checkpoint, as ``load`` is given it: they are exported, and nothing is trained.

        By default ``load``.
        """
        self.load(folder, checkpoint=checkpoint)

    def prepare(self, batch: MicroBatch, *, weights: Mapping[str, NDArray[Any]] | None = None) -> MicroBatch:  # noqa: ARG002
        """Return ``batch`` with what the loss needs of its old policy, and the advantages that need all of a step.

        weights: the old policy's, as ``tensors`` gave them on this rank then; None: those before the updates of the
        step, which are the weights as they are. Called on every rank: with its samples of a whole step, where that
        makes several updates or the algorithm needs it, else with those of a slot, where the loss has the old policy
        ``lagged``. By default nothing is needed.
        """
        return batch

    @abstractmethod
    def micro_batch(self, batch: MicroBatch, *, version: int | None) -> None:
        """Add the unnormalised gradient of ``batch``, which may be empty.

        ``version``: packed, of the weights as they are now; samples made by it measure engine against trainer. None:
        the weights are between two versions.
        """

    def measure(self, batch: MicroBatch, *, weights: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Measure the engine against the trainer on samples that older ``weights`` made, as part of this step.

        weights: as ``tensors`` gave them on this rank then. Called on every rank for the same weights, with a batch
        that may be empty. Changes no weights and no gradient. By default nothing is measured.
        """

    @abstractmethod
    def update(self, step: int) -> None:
        """Make an optimizer update of ``step`` that is not its last, normalised as in ``finish_step``."""

    @abstractmethod
    def finish_step(self, step: int) -> dict[str, float]:
        """Make the last update of a step, which is θ_step then, and return its metrics, equal on every rank.

        Normalised over all ranks and the micro-batches since the last update. ``skipped`` among the metrics is 1 where
        no update of the step had a finite gradient, and the weights stayed as they were. Raises Diverged on every rank
        when that goes on.
        """

    @abstractmethod
    def tensors(self, *, dtype: WeightsDtype = "float32") -> Iterator[tuple[str, NDArray[Any] | PublishedSlice]]:
        """Yield the weights by name, as views where possible: valid until the next ``finish_step``.

        Of a tensor that is cut over the ranks each yields its slice; any other is the same on all ranks. dtype: what
        weights that are floating-point numbers are rounded to; bfloat16 is given by its uint16 bits.
        """

    def probe(self) -> WeightProbe | None:
        """Return a probe of the weights as they are now, with which a process that loads them compares itself.

        Collective. None, by default: the backend's tensors are not those of a model.
        """
        return None

    def whole(self, tensors: Tensors) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield whole tensors, one after another, of which each rank has what ``tensors`` gave it; collective.

        For what rank 0 has to write alone. By default nothing is cut.
        """
        for name, given in tensors.items():
            yield name, given.array if isinstance(given, PublishedSlice) else given

    @abstractmethod
    def snapshot(self, *, shared: bool = True) -> Callable[[Path], None]:
        """Return the function that writes the state as it is now, this rank's part of it, into its own empty folder.

        Weights, optimizer and generators: ``load`` continues bit for bit with as many ranks, and up to rounding with
        more or fewer. shared: whether the ranks' folders will be seen by all. Then the state has been copied, and the
        function may run in another thread while training goes on. Otherwise only rank 0's folder exists and rank 0
        writes all: the function is collective, and called in the compute thread before anything changes. It raises
        OSError or DiskError where the disk fails.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the collectives and free what is held."""
