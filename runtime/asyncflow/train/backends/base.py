"""What every trainer backend does. The loops know nothing else of it.

Invariant: between two ``finish_step`` the weights do not change, however many micro-batches came; ``finish_step``
turns the gradient of all micro-batches since the last one into one step, the same on every rank. So at any moment
``save`` gives a state that has seen whole steps only.

All methods block and are called from one thread, the compute thread, in the same order on every rank; but ``tensors``
is called from another, while no ``load`` and no ``finish_step`` runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from numpy.typing import NDArray

from asyncflow.train.batch import MicroBatch
from asyncflow.train.ranks import Group
from asyncflow.train.settings import BackendSettings, WeightsDtype

OPTIONS = "spec.trainer.backend.options"
"""Where a manifest gives a backend its own options."""
SLOT_TOKENS = 4096
"""Most tokens of a rank's part of a slot, where neither the manifest nor a device's memory decides it."""


class TrainerBackend(ABC):
    """One rank's model and optimizer.

    of_model: whether its tensors are those of the model in the folder, so that θ_0 has to lie there, and the last
    weights can be exported as one. Options: the shape of its own options, each field with a default, so that they are
    checked before anything starts; None: the backend alone can tell. trained: samples whose gradient was added since
    the last ``finish_step``; another thread may read it. slot_tokens: most tokens that a rank's part of a slot should
    have, the same on all ranks; ``load`` may change it, and nothing does so afterwards.
    """

    Options: ClassVar[type[msgspec.Struct] | None] = None
    of_model = True
    trained = 0

    def __init__(self, settings: BackendSettings, *, group: Group) -> None:
        """Prepare. A backend raises ManifestError for ``settings.options`` that it does not know."""
        self.settings = settings
        self.group = group
        self.slot_tokens = settings.pack_tokens or max(SLOT_TOKENS, settings.longest or 0)

    @abstractmethod
    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        """Take θ_0 from the model folder, or the state that ``save`` left in ``checkpoint``.

        All ranks need ``folder``/config.json; the weights and the checkpoint are read by rank 0 alone and sent to the
        others. Raises CheckpointError where what is there does not fit.
        """

    @abstractmethod
    def micro_batch(self, batch: MicroBatch, *, version: int) -> None:
        """Add the unnormalised gradient of ``batch``, which may be empty.

        ``version``: packed, of the weights as they are now; samples made by it measure engine against trainer.
        """

    def measure(self, batch: MicroBatch, *, weights: Mapping[str, NDArray[Any]]) -> None:  # noqa: B027
        """Measure the engine against the trainer on samples that older ``weights`` made, as part of this step.

        weights: as ``tensors`` gave them then. Changes no weights and no gradient. By default nothing is measured.
        """

    @abstractmethod
    def finish_step(self, step: int) -> dict[str, float]:
        """Normalise over the whole step and all ranks, make θ_step, and return the metrics, equal on every rank.

        ``skipped`` among them is 1 where the gradient was not finite, and the weights stayed as they were. Raises
        Diverged on every rank when that goes on.
        """

    @abstractmethod
    def tensors(self, *, dtype: WeightsDtype = "float32") -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the weights by name, as views where possible: valid until the next ``finish_step``.

        dtype: what weights that are floating-point numbers are rounded to; bfloat16 is given by its uint16 bits.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write weights, optimizer and generators into the empty ``folder``; ``load`` continues bit for bit."""

    @abstractmethod
    def close(self) -> None:
        """Leave the collectives and free what is held."""
