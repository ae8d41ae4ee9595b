"""Advantages that need all samples of a step: the algorithm's ``credit``, out of a rank's samples and what they cost.

Invariant: the ranks exchange what the algorithm asks for and nothing else, so which rank has a sample changes rounding
only; an advantage is written once, before the first update of a step, and all its epochs and mini-batches use it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from asyncflow.algorithms.base import StepSamples
from asyncflow.algorithms.loss import Loss
from asyncflow.algorithms.losses import kl_penalty
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import ProcessGroup, gather_rows


def divergences(batch: MicroBatch, reference: Jagged, loss: Loss) -> NDArray[np.float64]:
    """Return the KL of each response token from the reference, under the old policy: float64[N], 0 where masked."""
    old = _double(batch.logprobs if batch.old is None else batch.old)
    found: NDArray[np.float64] = kl_penalty(old, _double(reference), loss.kl_name).numpy()
    return np.where(batch.counted(), found, 0.0)


def credited(batch: MicroBatch, penalty: NDArray[np.float64], loss: Loss, *, group: ProcessGroup) -> MicroBatch:
    """Return ``batch``, this rank's samples of a step, with the advantage of each response token. Collective.

    penalty: what each token costs, float64[N].
    """
    keys = np.array(batch.keys, dtype=np.int64).reshape(-1, 2)
    step = StepSamples(
        serials=keys[:, 0],
        samples=keys[:, 1],
        rewards=batch.earned().astype(np.float64),
        offsets=batch.responses.offsets,
        counted=batch.counted(),
        penalty=penalty,
    )
    return batch.credited(loss.algorithm.credit(step, everywhere=partial(gather_rows, group)))


def _double(column: Jagged) -> torch.Tensor:
    return torch.from_numpy(np.asarray(column.values, dtype=np.float64))
