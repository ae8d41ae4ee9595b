"""Advantages that need all samples of a step: calls the algorithm's ``credit`` with a rank's samples and penalties.

Invariants: the ranks exchange only the data that the algorithm requests, so the distribution of samples over ranks
changes only rounding. Advantages are computed once, before the first update of a step, for all its epochs and
mini-batches.
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
    """Return the KL of each response token from the reference under the old policy, float64[N]; 0 if masked."""
    old = _double(batch.logprobs if batch.old is None else batch.old)
    found: NDArray[np.float64] = kl_penalty(old, _double(reference), loss.kl_name).numpy()
    return np.where(batch.counted(), found, 0.0)


def assign_credit(batch: MicroBatch, penalty: NDArray[np.float64], loss: Loss, *, group: ProcessGroup) -> MicroBatch:
    """Return ``batch``, this rank's samples of a step, with the advantage of each response token. Collective.

    penalty: penalty of each token, float64[N].
    """
    keys = np.array(batch.keys, dtype=np.int64).reshape(-1, 2)
    step = StepSamples(
        serials=keys[:, 0],
        samples=keys[:, 1],
        rewards=batch.required_outcomes().astype(np.float64),
        offsets=batch.responses.offsets,
        counted=batch.counted(),
        penalty=penalty,
    )
    return batch.with_advantages(loss.algorithm.credit(step, all_gather=partial(gather_rows, group)))


def _double(column: Jagged) -> torch.Tensor:
    return torch.from_numpy(np.asarray(column.values, dtype=np.float64))
