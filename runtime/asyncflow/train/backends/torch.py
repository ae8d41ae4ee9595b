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
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from asyncflow.algorithms.aggregation import LossTotals
from asyncflow.algorithms.grpo import TokenLoss
from asyncflow.algorithms.losses import MAX_LOG_RATIO
from asyncflow.errors import CheckpointError, DiskError, Diverged
from asyncflow.plugins import read_options
from asyncflow.train.backends.base import OPTIONS, TrainerBackend
from asyncflow.train.backends.torch_copies import as_array, on_device, rounded, weights_on_device
from asyncflow.train.backends.torch_layers import checkpoint_layers, choose_kernels, compile_layers
from asyncflow.train.backends.torch_memory import PackBudget, find_largest_pack
from asyncflow.train.backends.torch_model import LogprobModel, named_weights, open_model, read_weights
from asyncflow.train.backends.torch_optimizer import FlatAdamW
from asyncflow.train.backends.torch_ranks import TensorGroup, find_device
from asyncflow.train.batch import MicroBatch
from asyncflow.train.meter import Meter
from asyncflow.train.packing import Pack, pack_samples
from asyncflow.train.ranks import Group
from asyncflow.train.settings import BackendSettings, TorchOptions, WeightsDtype

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "optimizer.safetensors"
_GENERATOR = "generator"
_MOST_SKIPPED = 3
"""Steps in a row whose gradient is not finite, at which the training ends."""
_SUMS = (
    "tokens", "sequences", "computed", "loss", "kl", "entropy", "surprise", "ratio", "approx_kl",
    "clip_low", "clip_high", "clip_dual", "silent", "packed_tokens", "gap_tokens", "gap",
)  # fmt: skip


class TorchBackend(TrainerBackend):
    """A causal language model of transformers with AdamW."""

    Options = TorchOptions

    def __init__(self, settings: BackendSettings, *, group: Group) -> None:
        super().__init__(settings, group=group)
        self._options = options = read_options(settings.options, TorchOptions, where=OPTIONS)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._device = find_device(settings.device, share=settings.share)
        choose_kernels(self._device, deterministic=settings.deterministic)
        torch.manual_seed(settings.seed)
        self._how: dict[str, Any] = {
            "temperature": settings.temperature,
            "compute": getattr(torch, settings.compute),
            "rows": options.head_tokens,
            "few_sizes": options.compile,
        }
        self._budget = PackBudget(self.slot_tokens)
        self._ranks = TensorGroup(
            group,
            device=self._device,
            host=settings.host,
            timeout_s=options.collective_timeout_s,
        )
        self._meter = _meter()
        self._measured: list[tuple[tuple[str, ...], Tensor, Tensor]] = []
        self._step: list[tuple[MicroBatch, int]] = []
        self._skipped = 0
        self._has_room = True
        self._copies: torch.Stream | None = None

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        """See the base class; the reference for the KL term is always θ_0, also after a resume."""
        self._ranks.meet()
        first, keep_reference = self.group.rank == 0, self.settings.loss.kl > 0
        self._model = open_model(
            folder,
            weights=first and (checkpoint is None or keep_reference),
            device=self._device,
            longest=self.settings.longest,
        )
        self._reference = None
        if keep_reference:
            self._ranks.from_first(tensor for _, tensor in named_weights(self._model))
            self._reference = LogprobModel(deepcopy(self._model).requires_grad_(False), **self._how)
        self._policy = LogprobModel(self._model, **self._how)
        if self._options.gradient_checkpointing:
            checkpoint_layers(self._model)
        if self._options.compile:
            compile_layers(self._model, device=self._device)
        self._optimizer = FlatAdamW(self._model, self.settings.optimizer)
        self._forget_step()
        if checkpoint is not None and first:
            self._restore(checkpoint)
        self._ranks.from_first(tensor for _, tensor in named_weights(self._model))
        self._ranks.from_first(tensor for _, tensor in self._optimizer.state())
        if self.settings.pack_tokens is None and self._device.type != "cpu":
            self._find_slot_tokens()

    def _find_slot_tokens(self) -> None:
        """Try which packs fit the device; the ranks agree on what fits all of them."""

        def step(batch: MicroBatch, tokens: int) -> None:
            self._budget = PackBudget(tokens)
            try:
                self._add(batch, version=-1)
            finally:
                self._forget_step()

        found = find_largest_pack(
            step,
            device=self._device,
            share=self.settings.share,
            reserved=sum(2 * tensor.numel() for _, tensor in named_weights(self._model)),
            longest=self.settings.longest or 1,
        )
        self.slot_tokens = int(self.group.gather(np.array([found]), what="tokens of a micro-batch").min())
        self._budget = PackBudget(self.slot_tokens)

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
        """See the base class. Where memory runs out, the step is computed again in packs of half the size, once."""
        self._step.append((batch, version))
        try:
            self._add(batch, version=version)
        except torch.OutOfMemoryError as full:
            self._budget.halve(full)
        else:
            return
        # Not above, where the error's traceback still holds the tensors of the pass that failed.
        again = self._step
        self._forget_step()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        for batch, version in again:
            self.micro_batch(batch, version=version)

    def _forget_step(self) -> None:
        """Be as after the last ``finish_step``: a backward pass that failed has added a part of its gradient."""
        self._optimizer.clear()
        self._meter, self._measured, self._step, self.trained = _meter(), [], [], 0

    def _add(self, batch: MicroBatch, *, version: int) -> None:
        loss, lengths = self.settings.loss, batch.loss_lengths()
        silent = loss.silent(batch.advantages)
        totals = ("tokens", lengths.sum()), ("sequences", np.count_nonzero(lengths)), ("silent", silent.sum())
        self._meter.add((name, float(value)) for name, value in totals)
        active = np.flatnonzero(~silent & (lengths > 0))
        self.trained += len(batch) - len(active)
        if not len(active):
            return
        packs = self._packs(batch, active)
        self._meter.add([("packed_tokens", float(sum(len(pack.ids) for pack in packs)))])
        weights, current = loss.aggregation.weights(lengths), batch.makers() == version
        for pack in packs:
            self._accumulate(batch, pack, active[pack.samples], weights, current)
            self.trained += len(np.unique(pack.samples))

    def measure(self, batch: MicroBatch, *, weights: Mapping[str, NDArray[Any]]) -> None:
        """See the base class. On the CPU weights in float32 are used where they lie, else they are copied.

        Where the device has no room for them, no older weights are measured from then on.
        """
        if not self._has_room:
            return
        try:
            self._measure_older(batch, weights)
        except torch.OutOfMemoryError as full:
            self._has_room = False
            log.warning("log-probs of older weights are not measured: the device has no room for them: %s", full)

    def _measure_older(self, batch: MicroBatch, weights: Mapping[str, NDArray[Any]]) -> None:
        tensors = {f"model.{name}": weights_on_device(array, self._device) for name, array in weights.items()}
        with torch.no_grad():
            for pack in self._packs(batch, np.arange(len(batch))):
                entries, counted = _entries(batch, pack, pack.samples)
                logprobs, _ = functional_call(self._policy, tensors, args=(pack,), kwargs={"entropy": False})
                gap = (logprobs - self._tensor(batch.logprobs.values[entries])).abs().cpu().numpy()[counted]
                self._meter.add([("gap_tokens", float(len(gap))), ("gap", float(gap.sum(dtype=np.float64)))])
                self._meter.histogram.add(gap)

    def _packs(self, batch: MicroBatch, chosen: NDArray[np.int64]) -> list[Pack]:
        return pack_samples(
            [batch.prompts.row(i) for i in chosen.tolist()],
            [batch.responses.row(i) for i in chosen.tolist()],
            [batch.keys[i].serial for i in chosen.tolist()],
            layout=self.settings.layout,
            budget=self._budget.tokens,
        )

    def _accumulate(
        self,
        batch: MicroBatch,
        pack: Pack,
        samples: NDArray[np.int64],
        weights: NDArray[np.float64],
        current: NDArray[np.bool_],
    ) -> None:
        loss = self.settings.loss
        entries, counted = _entries(batch, pack, samples)
        weight = self._tensor(weights[samples] * counted)
        behaviour = self._tensor(batch.logprobs.values[entries])
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference(pack, entropy=False)
        logprobs, entropy = self._policy(pack, entropy=loss.entropy != 0)
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
            loss=value.detach(),
            logprobs=logprobs.detach(),
            behaviour=behaviour,
            entropy=entropy,
            counted=self._tensor(counted),
            on_policy=self._tensor(current[samples] & counted),
        )

    def _measure(
        self,
        terms: TokenLoss,
        *,
        loss: Tensor,
        logprobs: Tensor,
        behaviour: Tensor,
        entropy: Tensor | None,
        counted: Tensor,
        on_policy: Tensor,
    ) -> None:
        """Compute the figures of a pack where it was computed; nothing waits for them before the step is over."""
        policy, logratio = terms.policy, logprobs - behaviour
        gap, zero = logratio.abs(), logprobs.new_zeros(())
        values = {
            "loss": loss,
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
        gaps = torch.where(on_policy > 0, gap, float("nan"))
        self._measured.append((tuple(values), torch.stack(list(values.values())), gaps))

    def _read_measured(self) -> None:
        """Wait for the figures of all packs since the last step, and add them up."""
        if not self._measured:
            return
        names, figures, gaps = zip(*self._measured, strict=True)
        self._measured = []
        for name, row in zip(names, torch.stack(figures).tolist(), strict=True):
            self._meter.add(zip(name, row, strict=True))
        found = torch.cat(gaps).cpu().numpy()
        self._meter.histogram.add(found[~np.isnan(found)])

    def finish_step(self, step: int) -> dict[str, float]:
        """See the base class. Collective: the counts, then the gradient. Three skipped steps in a row are too many."""
        self._read_measured()
        meter = self._meter.merged(self.group.gather(self._meter.array(), what=f"the counts of step {step}"))
        self._meter, self._step, self.trained = _meter(), [], 0
        sums = meter.sums
        divisor = self.settings.loss.aggregation.divisor(LossTotals(int(sums["tokens"]), int(sums["sequences"])))
        applied = self._optimizer.apply(step, divisor=divisor, total=self._ranks.total)
        self._skipped = 0 if applied.moved else self._skipped + 1
        if self._skipped == _MOST_SKIPPED:
            raise Diverged(
                f"the gradient is not finite in steps {step - _MOST_SKIPPED + 1} to {step}",
                where="trainer",
                hint="Try a lower learningRate or a lower maxGradNorm, or another precision; the run can be resumed",
            )
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
            "packed_tokens": sums["packed_tokens"],
            "logprob_gap_tokens": gap_tokens,
            "logprob_gap": sums["gap"] / max(1.0, gap_tokens),
            "logprob_gap_p99": meter.histogram.quantile(0.99),
        }
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def tensors(self, *, dtype: WeightsDtype = "float32") -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the weights under transformers' names; in float32 on the CPU they share the model's memory.

        Elsewhere they are copied on a stream of their own, behind what made them and beside what computes with them.
        """
        kind = getattr(torch, dtype)
        with self._beside():
            weights = [(name, rounded(tensor.detach(), kind)) for name, tensor in named_weights(self._model)]
        for name, tensor in weights:
            yield name, as_array(tensor)

    def _beside(self) -> AbstractContextManager[Any]:
        """Return what has this thread's copies from a device go on a stream of their own."""
        if self._device.type == "cpu":
            return nullcontext()
        self._copies = self._copies or torch.Stream(self._device)
        self._copies.wait_stream(torch.accelerator.current_stream(self._device))
        return cast(AbstractContextManager[Any], self._copies)

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
        return on_device(np.require(array, np.float32, ["W"]), self._device)


def _entries(batch: MicroBatch, pack: Pack, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where the targets of ``pack`` are among the batch's response tokens, and whether they count in the loss.

    samples: the index in the batch of each target's sample.
    """
    entries = batch.responses.offsets[samples] + pack.offsets
    return entries, np.ones(len(entries), bool) if batch.loss_mask is None else batch.loss_mask.values[entries]


def _meter() -> Meter:
    return Meter(sums=_SUMS, maxima=("ratio_max",))
