"""Largest size of a micro-batch in tokens: determined by trials on an accelerator, halved once if memory runs out.

A pass needs a fixed amount of memory and an amount proportional to the tokens of its pack. Two trials of different size
determine both, and the largest pack that leaves some memory free is used.

Invariant: in a trial every token except a one-token prompt is a target, and samples are as long as the longest sample.
So no real pack of the same size needs more memory, apart from fragmentation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from asyncflow.errors import ManifestError
from asyncflow.identity import SampleKey
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch

log = logging.getLogger(__name__)

FIELD = "spec.trainer.backend.tokensPerMicroBatch"
MOST_TOKENS = 32_768
"""Most tokens that trials may determine: larger packs are not faster, and balance between ranks becomes coarser."""
_FIRST_TRIAL = 1024
_LAST_TRIAL = 4096
_MULTIPLE = 256
_USED = 0.9
"""Fraction of the free memory that a pack may use; the rest is for fragmentation."""
_HINT = (
    f"Set a smaller {FIELD.rpartition('.')[2]} (at least the longest sample) or options.gradient_checkpointing: true, "
    "or use a device with more memory"
)


class Trial(NamedTuple):
    """One trial pass. tokens: size of its pack; bytes: peak memory allocated beyond the memory before the pass."""

    tokens: int
    bytes: int


def largest_pack(small: Trial, large: Trial, *, free: int, longest: int) -> int:
    """Return the most tokens of a pack that fits into ``free`` bytes, estimated from two trials of different size.

    longest: tokens of the longest sample. Raises ManifestError if it does not fit.
    """
    each = max(1.0, (large.bytes - small.bytes) / (large.tokens - small.tokens))
    fixed = max(0.0, large.bytes - each * large.tokens)
    fits = int((_USED * free - fixed) / each)
    if fits < longest:
        raise ManifestError(
            f"the longest sample has {longest} tokens, and the device's free memory of {free / 1e9:.1f} GB fits "
            f"a micro-batch of {max(0, fits)}",
            where=FIELD,
            hint="Lower sampling.maxTokens, set options.gradient_checkpointing: true, or use a device with more memory",
        )
    whole = fits // _MULTIPLE * _MULTIPLE
    return max(longest, min(MOST_TOKENS, whole or fits))


def find_largest_pack(
    step: Callable[[MicroBatch, int], None], *, device: torch.device, share: float, reserved: int, longest: int
) -> int:
    """Return the most tokens of a pack that fits the accelerator, determined by trials of ``step``.

    step: computes a micro-batch forward and backward in packs of the given size, and discards the result; share:
    fraction of the device memory that this process may use; reserved: bytes to leave free for other purposes; longest:
    tokens of the longest sample. Raises ManifestError if it does not fit.
    """
    trials: list[Trial] = []
    tokens = max(_FIRST_TRIAL, longest)
    try:
        step(trial_batch(tokens, longest=longest), tokens)  # libraries allocate their workspaces the first time
        free = _free_bytes(device, share=share) - reserved
        while len(trials) < 2 or trials[-1].tokens < _LAST_TRIAL:
            trials.append(_measure(step, tokens, device=device, longest=longest))
            tokens *= 2
    except torch.OutOfMemoryError as full:
        if not trials:
            what = f"a micro-batch of {tokens} tokens does not fit the device: {full}"
            raise ManifestError(what, where=FIELD, hint=_HINT) from full
    found = largest_pack(*trials[-2:], free=free, longest=longest) if len(trials) > 1 else trials[0].tokens
    log.info("micro-batches have at most %d tokens: %.1f GB were free, and %d tokens took %.1f GB", found, free / 1e9,
             trials[-1].tokens, trials[-1].bytes / 1e9)  # fmt: skip
    return found


def trial_batch(tokens: int, *, longest: int) -> MicroBatch:
    """Return artificial samples of ``longest`` tokens each, ``tokens`` in total; all but one of each are targets."""
    lengths = [longest] * (tokens // longest) or [tokens]
    responses = Jagged.from_rows([np.zeros(length, dtype=np.int32) for length in lengths], "int32")
    return MicroBatch(
        keys=[SampleKey(number, 0) for number in range(len(lengths))],
        prompts=Jagged.from_rows([np.zeros(1, dtype=np.int32)] * len(lengths), "int32"),
        responses=responses,
        logprobs=Jagged(np.zeros(len(responses.values), dtype=np.float32), responses.offsets),
        versions=Jagged(np.full(len(responses.values), -1, dtype=np.int64), responses.offsets),
        advantages=np.ones(len(lengths), dtype=np.float32),
        outcomes=np.ones(len(lengths), dtype=np.float32),
    )


def _measure(step: Callable[[MicroBatch, int], None], tokens: int, *, device: torch.device, longest: int) -> Trial:
    batch = trial_batch(tokens, longest=longest)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    step(batch, tokens)
    torch.accelerator.synchronize(device)
    return Trial(len(batch.responses.values), torch.accelerator.max_memory_allocated(device) - before)


def _free_bytes(device: torch.device, *, share: float) -> int:
    """Return the bytes that this process may still allocate on ``device``."""
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info(device)
    return min(int(free), int(total * share) - int(torch.accelerator.memory_reserved(device)))


class PackBudget:
    """Current limit of tokens per pack. It is halved at most once: if memory runs out again, the model does not fit."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._halved = False

    def halve(self, full: torch.OutOfMemoryError) -> None:
        """Halve the limit after memory ran out. Raises ManifestError if it was halved before."""
        if self._halved:
            raise ManifestError(
                f"out of memory with packs of {self.tokens} tokens, which is already half of the original limit: "
                f"{full}",
                where=FIELD,
                hint=_HINT,
            ) from full
        self._halved = True
        self.tokens = max(1, self.tokens // 2)
        log.warning("out of memory: packs have at most %d tokens from now on, and this step is computed again: %s",
                    self.tokens, full)  # fmt: skip
