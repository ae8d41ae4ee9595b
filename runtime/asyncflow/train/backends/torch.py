"""The torch trainer: streamed micro-batches, one exact optimizer step.

A micro-batch goes forward and backward at once, on sums that are not normalised; samples that contribute exactly
nothing are counted but not computed. The last word is ``finish_step``: counts of the whole step over all ranks, one
division, one step.

Invariant: the gradient of a step is that of one big padded batch up to rounding, however D_k was cut into slots,
packs and ranks; the same seed, order and number of threads give the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncflow.algorithms.aggregation import LossTotals
from asyncflow.algorithms.grpo import TokenLoss
from asyncflow.algorithms.losses import MAX_LOG_RATIO
from asyncflow.errors import CheckpointError, DiskError
from asyncflow.plugins import read_options
from asyncflow.train.backends.base import OPTIONS, TrainerBackend
from asyncflow.train.backends.torch_model import named_weights, open_model, read_weights, token_logprobs
from asyncflow.train.backends.torch_optimizer import FlatAdamW
from asyncflow.train.backends.torch_ranks import TensorGroup, pick_device
from asyncflow.train.batch import MicroBatch
from asyncflow.train.meter import Meter
from asyncflow.train.packing import Pack, pack_samples
from asyncflow.train.ranks import Group
from asyncflow.train.settings import BackendSettings

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "optimizer.safetensors"
_GENERATOR = "generator"
_SUMS = (
    "tokens", "sequences", "computed", "loss", "kl", "entropy", "surprise", "ratio", "approx_kl",
    "clip_low", "clip_high", "clip_dual", "silent", "gap_tokens", "gap",
)  # fmt: skip


class TorchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The backend's own options.

    pack_tokens: most tokens of one forward pass, which bounds the memory of its logits; collective_timeout_s:
    how long a rank waits for the others in a collective.
    """

    pack_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024
    gradient_checkpointing: bool = False
    collective_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0


class TorchBackend(TrainerBackend):
    """A causal language model of transformers with AdamW."""

    def __init__(self, settings: BackendSettings, *, group: Group) -> None:
        super().__init__(settings, group=group)
        self._options = options = read_options(settings.options, TorchOptions, where=OPTIONS)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._device = pick_device(settings.device)
        torch.use_deterministic_algorithms(True, warn_only=self._device.type != "cpu")
        torch.manual_seed(settings.seed)
        self._compute = getattr(torch, settings.compute)
        self._pack_tokens = min(settings.pack_tokens, options.pack_tokens)
        self._ranks = TensorGroup(
            group,
            device=self._device,
            host=settings.host,
            timeout_s=options.collective_timeout_s,
        )
        self._meter = _meter()

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        """See the base class; the reference for the KL term is always θ_0, also after a resume."""
        self._ranks.meet()
        first, keep_reference = self.group.rank == 0, self.settings.loss.kl > 0
        self._model = open_model(folder, weights=first and (checkpoint is None or keep_reference), device=self._device)
        self._reference = None
        if keep_reference:
            self._ranks.from_first(tensor for _, tensor in named_weights(self._model))
            self._reference = deepcopy(self._model).requires_grad_(False)
        if self._options.gradient_checkpointing:
            self._model.train()
            self._model.gradient_checkpointing_enable()
        self._optimizer = FlatAdamW(self._model, self.settings.optimizer)
        if checkpoint is not None and first:
            self._restore(checkpoint)
        self._ranks.from_first(tensor for _, tensor in named_weights(self._model))
        self._ranks.from_first(tensor for _, tensor in self._optimizer.state())

    def _restore(self, checkpoint: Path) -> None:
        read_weights(self._model, checkpoint / WEIGHTS_FILE)
        state = load_file(checkpoint / STATE_FILE)
        try:
            torch.set_rng_state(state.pop(_GENERATOR))
            self._optimizer.take(state)
        except (KeyError, RuntimeError) as wrong:
            raise CheckpointError(
                f"the optimizer's state does not fit: {wrong}",
                where=str(checkpoint / STATE_FILE),
                hint="Resume with the model that the run began with.",
            ) from wrong

    def micro_batch(self, batch: MicroBatch, *, version: int) -> None:
        """See the base class. The pack budget bounds memory; a slot may hold any number of packs."""
        loss, lengths = self.settings.loss, batch.loss_lengths()
        silent = loss.silent(batch.advantages)
        totals = ("tokens", lengths.sum()), ("sequences", np.count_nonzero(lengths)), ("silent", silent.sum())
        self._meter.add((name, float(value)) for name, value in totals)
        active = np.flatnonzero(~silent & (lengths > 0))
        if not len(active):
            return
        packs = pack_samples(
            [batch.prompts.row(i) for i in active.tolist()],
            [batch.responses.row(i) for i in active.tolist()],
            [batch.keys[i].serial for i in active.tolist()],
            layout=self.settings.layout,
            budget=self._pack_tokens,
        )
        weights, current = loss.aggregation.weights(lengths), batch.made_by(version)
        for pack in packs:
            self._accumulate(batch, pack, active[pack.samples], weights, current)

    def _accumulate(
        self,
        batch: MicroBatch,
        pack: Pack,
        samples: NDArray[np.int64],
        weights: NDArray[np.float64],
        current: NDArray[np.bool_],
    ) -> None:
        settings, loss = self.settings, self.settings.loss
        entries = batch.responses.offsets[samples] + pack.offsets
        counted = np.ones(len(entries), bool) if batch.loss_mask is None else batch.loss_mask.values[entries]
        weight = self._tensor(weights[samples] * counted)
        behaviour = self._tensor(batch.logprobs.values[entries])
        how: dict[str, Any] = {"temperature": settings.temperature, "compute": self._compute}
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = token_logprobs(self._reference, pack, entropy=False, **how)
        logprobs, entropy = token_logprobs(self._model, pack, entropy=loss.entropy != 0, **how)
        terms = loss.tokens(
            logprobs,
            behaviour=behaviour,
            advantages=self._tensor(batch.advantages[samples]),
            reference=reference,
            entropy=entropy,
        )
        value = (terms.total * weight).sum()
        value.backward()
        self._measure(
            terms,
            logprobs=logprobs.detach(),
            behaviour=behaviour,
            entropy=entropy,
            counted=self._tensor(counted),
            on_policy=self._tensor(current[samples] & counted),
        )
        self._meter.add([("loss", float(value.detach()))])

    def _measure(
        self,
        terms: TokenLoss,
        *,
        logprobs: Tensor,
        behaviour: Tensor,
        entropy: Tensor | None,
        counted: Tensor,
        on_policy: Tensor,
    ) -> None:
        policy, logratio = terms.policy, logprobs - behaviour
        gap, zero = logratio.abs(), logprobs.new_zeros(())
        values = {
            "computed": counted.sum(),
            "kl": zero if terms.kl is None else (terms.kl.detach() * counted).sum(),
            "entropy": zero if entropy is None else (entropy.detach() * counted).sum(),
            "surprise": -(logprobs * counted).sum(),
            "ratio": (policy.ratio * counted).sum(),
            "ratio_max": (policy.ratio * counted).max(),
            "approx_kl": ((logratio.clamp(max=MAX_LOG_RATIO).exp() - 1 - logratio) * counted).sum(),
            "clip_low": (policy.clipped_low * counted).sum(),
            "clip_high": (policy.clipped_high * counted).sum(),
            "clip_dual": (policy.clipped_dual * counted).sum(),
            "gap_tokens": on_policy.sum(),
            "gap": (gap * on_policy).sum(),
        }
        self._meter.add(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
        self._meter.histogram.add(gap[on_policy > 0].cpu().numpy())

    def finish_step(self, step: int) -> dict[str, float]:
        """See the base class. Collective: the counts, then the gradient."""
        meter = self._meter.merged(self.group.gather(self._meter.array(), what=f"the counts of step {step}"))
        self._meter = _meter()
        sums = meter.sums
        divisor = self.settings.loss.aggregation.divisor(LossTotals(int(sums["tokens"]), int(sums["sequences"])))
        applied = self._optimizer.apply(step, divisor=divisor, total=self._ranks.total)
        if not applied.moved:
            log.warning("step %d: the gradient is not finite, the weights stay as they are", step)
        computed, gap_tokens = max(1.0, sums["computed"]), sums["gap_tokens"]
        means = ("kl", "entropy", "surprise", "ratio", "approx_kl", "clip_low", "clip_high", "clip_dual")
        metrics = {name: sums[name] / computed for name in means} | {
            "loss": sums["loss"] / divisor,
            "ratio_max": meter.maxima["ratio_max"],
            "grad_norm": applied.grad_norm,
            "learning_rate": applied.learning_rate,
            "skipped": float(not applied.moved),
            "silent_samples": sums["silent"],
            "computed_tokens": sums["computed"],
            "logprob_gap_tokens": gap_tokens,
            "logprob_gap": sums["gap"] / max(1.0, gap_tokens),
            "logprob_gap_p99": meter.histogram.quantile(0.99),
        }
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def tensors(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Give the weights in float32 under transformers' names; on the CPU they share the model's memory."""
        for name, tensor in named_weights(self._model):
            yield name, tensor.detach().cpu().contiguous().numpy()

    def save(self, folder: Path) -> None:
        """Write model.safetensors and optimizer.safetensors (moments, step counts, the generator's state)."""
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in named_weights(self._model)}
        state = {name: tensor.cpu() for name, tensor in self._optimizer.state()} | {_GENERATOR: torch.get_rng_state()}
        try:
            save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
            save_file(state, folder / STATE_FILE)
        except SafetensorError as wrong:
            hint = "Free space, or give a folder that this process may write to."
            raise DiskError(f"the weights cannot be written: {wrong}", where=str(folder), hint=hint) from wrong

    def close(self) -> None:
        """Leave the process group."""
        self._ranks.close()

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.require(array, np.float32, ["W"])).to(self._device)


def _meter() -> Meter:
    return Meter(sums=_SUMS, maxima=("ratio_max",))
