"""The torch trainer: streamed micro-batches, exact optimizer updates.

A micro-batch is computed forward and backward immediately, with unnormalised sums. Samples that contribute exactly
nothing are counted but not computed. ``update`` combines the counts of all micro-batches and ranks, divides once, and
makes one optimizer update. Most steps make one update.

Invariants: the gradient of an update is that of one big padded batch up to rounding, for any division of D_k into
slots, packs and ranks. The same seed, order and number of threads give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from asyncflow.algorithms.loss import LossTotals
from asyncflow.algorithms.ppo import Ppo
from asyncflow.api.workers import LoraSpec
from asyncflow.errors import ManifestError
from asyncflow.models.device import find_device
from asyncflow.plugins import read_options
from asyncflow.rpc.columns import Jagged
from asyncflow.training.backend import OPTIONS, TrainerBackend, check_skipped
from asyncflow.training.batch import MicroBatch
from asyncflow.training.critic import CriticModel
from asyncflow.training.loops import combined
from asyncflow.training.packing import Pack, few_sizes_below, pack_samples
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings, TorchOptions, WeightsDtype
from asyncflow.training.slice_files import unwritable
from asyncflow.training.torch.credit import assign_credit, divergences
from asyncflow.training.torch.critic import add_estimates, open_critic
from asyncflow.training.torch.critic_role import TorchCritic
from asyncflow.training.torch.device import TensorGroup, as_array, collective, on_device, rounded
from asyncflow.training.torch.figures import StepFigures, critic_metrics, metrics_of
from asyncflow.training.torch.lora import (
    add_adapters,
    base_shards,
    initialise_adapters,
    names_in_model,
    trained_shards,
    without_adapters,
)
from asyncflow.training.torch.memory import FIELD, find_largest_pack
from asyncflow.training.torch.model import (
    LogprobModel,
    checkpoint_layers,
    choose_kernels,
    compile_layers,
    open_model,
    smallest_pack,
)
from asyncflow.training.torch.optimizer import Applied, FlatAdamW, apply_together
from asyncflow.training.torch.packs import Packs, entries
from asyncflow.training.torch.sharding import open_sharded, with_weights
from asyncflow.training.torch.shards import (
    TensorShard,
    copied,
    read_first,
    read_saved,
    write_gathered,
    write_shards,
)
from asyncflow.weights.probe import TOKENS, WeightProbe, probe_ids
from asyncflow.weights.sender import PublishedSlice, Tensors
from asyncflow.weights.slices import Box

log = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "optimizer.safetensors"
_GENERATOR = "generator"


class TorchBackend(TrainerBackend):
    """A causal language model of transformers with AdamW."""

    Options = TorchOptions

    def __init__(self, settings: BackendSettings, *, group: ProcessGroup) -> None:
        super().__init__(settings, group=group)
        self._options = options = read_options(settings.options, TorchOptions, where=OPTIONS)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self._device = find_device(settings.device, share=settings.share, local_rank=settings.local_rank)
        choose_kernels(self._device, deterministic=settings.deterministic)
        torch.manual_seed(settings.seed)
        self._logprobs = partial(
            LogprobModel,
            temperature=settings.temperature,
            compute=getattr(torch, settings.compute),
            rows=options.head_tokens,
            few_sizes=options.compile,
        )
        self._ranks = TensorGroup(
            group,
            device=self._device,
            host=settings.host,
            timeout_s=options.collective_timeout_s,
        )
        self._loss = settings.loss
        self._figures = StepFigures(settings.loss.algorithm.figures)
        self._updates: list[dict[str, float]] = []
        self._penalty_sums: dict[str, float] = {}
        self._step: list[tuple[MicroBatch, int | None]] = []
        self._trained_before = 0
        self._skipped = 0
        self._has_memory = True
        self._copy_stream: torch.Stream | None = None

    @classmethod
    def separate_critic(cls, settings: BackendSettings, *, folder: Path) -> CriticModel:
        """See the base class."""
        return TorchCritic(folder, settings)

    @collective()
    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        """See the base class; the reference is always θ_0, even after a resume."""
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)  # the device is a setting of each thread
        self._ranks.meet()
        seen = np.array([checkpoint is not None])
        resumed = bool(self.group.gather(seen, what="access to the checkpoint")[0, 0])
        lora = self.settings.lora
        compared = self.settings.loss.references and not self.settings.reference_given
        self._policy = self._open(folder, first=not resumed or lora is not None, lora=lora)
        self._model = self._policy.model
        self._packs = self._packs_of(self.slot_tokens)
        self._reference: Callable[..., tuple[Tensor, Tensor | None]] | None = None
        if compared and lora is not None:
            self._reference = without_adapters(self._model, self._policy)
        elif compared:
            self._reference = self._open(folder, first=True, frozen=True)
        self._shards = trained_shards(self._model)
        if resumed:
            read_saved(checkpoint, WEIGHTS_FILE, self._shards, group=self.group, ranks=self._ranks)
        self._policy.evaluate(smallest_pack())
        if self._options.gradient_checkpointing:
            checkpoint_layers(self._model)
        if self._options.compile:
            compile_layers(self._model, device=self._device)
        seed = self.settings.seed, self.group.rank
        self._optimizer = FlatAdamW(self._model, self.settings.optimizer, seed=seed)
        self._critic = None
        if self.critic_link is None:
            self._critic = open_critic(
                folder,
                checkpoint,
                resumed=resumed,
                settings=self.settings,
                options=self._options,
                device=self._device,
                group=self.group,
                ranks=self._ranks,
            )
        else:
            if self.group.rank == 0:
                self.critic_link.load(checkpoint)
            self.group.gather(np.zeros(1), what="the critic's start")
        if resumed:
            generator, state = self._generator(), list(self._optimizer.state())
            if read_saved(checkpoint, STATE_FILE, state, optional=generator, group=self.group, ranks=self._ranks):
                torch.set_rng_state(generator.tensor.reshape(-1))
            self._resume_coefficient(checkpoint)
        if self.settings.pack_tokens is None and self._device.type != "cpu":
            self._find_slot_tokens()

    def load_weights(self, folder: Path, *, checkpoint: Path | None) -> None:  # noqa: ARG002
        """See the base class; the optimizer state is not loaded."""
        read_saved(checkpoint, WEIGHTS_FILE, self._shards, group=self.group, ranks=self._ranks)

    def _find_slot_tokens(self) -> None:
        """Determine by trials which packs fit the device; the ranks use the smallest size of all."""

        def step(batch: MicroBatch, tokens: int) -> None:
            if self.settings.reference_given:
                batch = replace(batch, reference=batch.logprobs)
            self._packs = self._packs_of(tokens)
            try:
                self._add(batch, version=None)
            except torch.OutOfMemoryError as full:
                self._packs.refuse_in_gang(full)
                raise
            finally:
                self._discard_step()

        found = find_largest_pack(
            step,
            device=self._device,
            share=self.settings.share,
            reserved=sum(2 * shard.tensor.numel() for shard in self._shards),
            longest=self.settings.longest or 1,
        )
        if found < self.settings.longest_part:
            raise ManifestError(
                f"a pair has up to {self.settings.longest_part} tokens, and the device fits {found}",
                where=FIELD,
                hint="Set a smaller sampling.maxTokens or options.gradient_checkpointing: true, or use another device",
            )
        if self._options.compile:
            found = max(self.settings.longest_part or 1, few_sizes_below(found))
        self.slot_tokens = int(self.group.gather(np.array([found]), what="tokens of a micro-batch").min())
        self.trained = 0
        self._packs = self._packs_of(self.slot_tokens)

    def _packs_of(self, tokens: int) -> Packs:
        return Packs(self.settings, tokens=tokens, group=self.group, padded=self._policy.padded)

    def _open(self, folder: Path, *, first: bool, frozen: bool = False, lora: LoraSpec | None = None) -> LogprobModel:
        """Open the model, sharded over the ranks, with the weights of the folder (``first``) or arbitrary ones."""
        mesh = self._ranks.mesh
        dtype: torch.dtype = getattr(torch, self.settings.weights)
        held: dict[str, Any] = {"device": self._device, "dtype": dtype, "longest": self.settings.longest}
        if mesh is None:
            model = open_model(folder, weights=first, frozen=frozen, **held)
            if lora is not None:
                add_adapters(model, lora)
            opened = self._logprobs(model)
        else:
            opened = open_sharded(folder, mesh=mesh, frozen=frozen, lora=lora, wrap=self._logprobs, **held)
            if first:
                longest = self.settings.longest
                read_first(folder, base_shards(opened.model), longest=longest, group=self.group, ranks=self._ranks)
        if lora is not None:
            initialise_adapters(opened.model, seed=self.settings.seed)
        return opened

    def _generator(self) -> TensorShard:
        """Return the state of torch's generator; in a gang, this rank's row of all ranks' states."""
        state, world = torch.get_rng_state(), self.group.world
        if world == 1:
            return TensorShard(_GENERATOR, state, Box.whole(state.shape), tuple(state.shape))
        row = Box((self.group.rank, 0), (1, len(state)))
        return TensorShard(_GENERATOR, state[None], row, (world, len(state)), sharded=True)

    def _coefficient(self) -> TensorShard:
        """Return the weight of the KL in the next step, which changes if it has a target."""
        weight = torch.tensor([self._loss.kl], dtype=torch.float64)
        return TensorShard("kl.coefficient", weight, Box.whole(weight.shape), tuple(weight.shape))

    def _resume_coefficient(self, checkpoint: Path | None) -> None:
        kept, group = self._coefficient(), self.group
        if self._loss.target is None:
            return
        if read_saved(checkpoint, STATE_FILE, [], optional=kept, group=group, ranks=self._ranks):
            self._loss = replace(self._loss, kl=kept.tensor.item())

    @collective()
    def prepare(self, batch: MicroBatch, *, weights: Mapping[str, NDArray[Any]] | None = None) -> MicroBatch:
        """See the base class: adds log-probs of the old policy, 0 for samples without gradient, then advantages.

        Other weights are used as in ``measure``; if they must be copied, every call copies them once.
        """
        loss = self.settings.loss
        if loss.old != "behaviour":
            with nullcontext(self._policy.evaluate) if weights is None else self._with_weights(weights) as evaluate:
                batch = replace(batch, old=self._evaluated(batch, evaluate))
        if not loss.algorithm.whole_step and (self.settings.critic is None or weights is not None):
            return batch
        penalty = np.zeros(len(batch.responses.values))
        if loss.penalised and (batch.reference is not None or self._reference is not None):
            reference = self._evaluated(batch, self._evaluate_reference) if batch.reference is None else batch.reference
            kl = divergences(batch, reference, loss)
            # Counted in ``update``: if memory runs out, the figures are discarded, and this is not computed again.
            self._penalty_sums = {"penalty_tokens": float(batch.loss_lengths().sum()), "penalty": float(kl.sum())}
            penalty = self._loss.kl * kl
        if self.settings.critic is not None:
            return self._with_estimates(batch, penalty=penalty)
        return assign_credit(batch, penalty, loss, group=self.group)

    def _with_estimates(self, batch: MicroBatch, *, penalty: NDArray[np.float64]) -> MicroBatch:
        """Return ``batch`` with the critic's values, and the resulting advantages and returns. Collective."""
        algorithm = self.settings.loss.algorithm
        assert isinstance(algorithm, Ppo)
        if self._critic is not None:
            values = self._evaluated(batch, self._critic.evaluate)
        else:
            assert self.critic_link is not None
            values = self.critic_link.values(batch)
        return add_estimates(batch, values=values, penalty=penalty, algorithm=algorithm, group=self.group)

    def _evaluate_reference(self, pack: Pack) -> Tensor:
        assert self._reference is not None
        with torch.no_grad():
            return self._reference(pack, entropy=False)[0]

    def _evaluated(self, batch: MicroBatch, evaluate: Callable[[Pack], Tensor]) -> Jagged:
        """Return the results of ``evaluate`` for tokens of samples that are not silent, and 0 elsewhere. Collective."""
        active = np.flatnonzero(~self._silent(batch) & (batch.loss_lengths() > 0))
        return self._packs.evaluated(batch, active, evaluate)

    def _silent(self, batch: MicroBatch) -> NDArray[np.bool_]:
        """Return whether each sample's gradient is exactly 0; never true if a critic learns from the samples."""
        silent = self._loss.silent(batch.largest_advantages())
        return silent if self.settings.critic is None else np.zeros_like(silent)

    def _without_advantage(self, batch: MicroBatch) -> int:
        """Return the number of samples whose advantage is 0; always 0 with a critic, whose advantages are of tokens."""
        return int((batch.largest_advantages() == 0).sum()) if self.settings.critic is None else 0

    @contextmanager
    def _with_weights(self, weights: Mapping[str, NDArray[Any]]) -> Iterator[Callable[[Pack], Tensor]]:
        """Yield a function that returns the log-probs of a pack under other weights; called on every rank."""
        names = names_in_model(self._model)
        with torch.no_grad(), with_weights(self._policy, self._shards, weights, names=names) as policy:
            yield lambda pack: policy(pack, entropy=False)[0]

    @collective()
    def micro_batch(self, batch: MicroBatch, *, version: int | None) -> None:
        """See the base class. If memory runs out, the step is computed again in packs of half the size, once."""
        self._step.append((batch, version))
        try:
            self._add(batch, version=version)
        except torch.OutOfMemoryError as full:
            self._packs.halve(full)
        else:
            return
        # Not in the except block, where the traceback still references the tensors of the failed pass.
        batches, before = self._step, self._trained_before
        self._discard_step()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        self.trained = before
        for batch, version in batches:
            self.micro_batch(batch, version=version)

    def _discard_step(self) -> None:
        """Discard all work since the last update; a failed backward pass has added a part of its gradient."""
        self._optimizer.clear()
        if self._critic is not None:
            self._critic.optimizer.clear()
        if self.critic_link is not None:
            self.critic_link.forget()
        self._figures, self._step = StepFigures(self._loss.algorithm.figures), []

    def _add(self, batch: MicroBatch, *, version: int | None) -> None:
        loss, lengths = self._loss, batch.loss_lengths()
        if self.critic_link is not None:
            if batch.values is None:
                batch = self._with_estimates(batch, penalty=np.zeros(len(batch.responses.values)))
            self.critic_link.learn(batch)
        silent = self._silent(batch)
        totals = {
            "tokens": lengths.sum(),
            "sequences": np.count_nonzero(lengths),
            "silent": self._without_advantage(batch),
        }
        self._figures.count((name, float(value)) for name, value in totals.items())
        active = np.flatnonzero(~silent & (lengths > 0))
        self.trained += len(batch) - len(active)
        packs = self._packs.of(batch, active)
        sizes = ("packed_tokens", sum(len(pack.ids) for pack in packs)), ("computed", sum(len(p.rows) for p in packs))
        self._figures.count((name, float(value)) for name, value in sizes)
        weights, current = loss.aggregation.weights(lengths), batch.sole_versions() == version
        for pack in self._packs.aligned(packs):
            if pack is None:
                self._empty_pass()
            else:
                self._accumulate(batch, pack, weights, current)
                self.trained += len(np.unique(pack.samples))

    def _empty_pass(self) -> None:
        """Make a pass that adds no gradient, because other ranks make a pass."""
        if self._reference is not None and self.settings.loss.compares:
            with torch.no_grad():
                self._reference(smallest_pack(), entropy=False)
        if self._critic is not None:
            self._critic.empty_pass()
        logprobs, _ = self._policy(smallest_pack(), entropy=False)
        (logprobs * 0).sum().backward()

    @collective()
    def measure(self, batch: MicroBatch, *, weights: Mapping[str, NDArray[Any]]) -> None:
        """See the base class. On the CPU float32 weights are used in place; otherwise they are copied.

        If a device lacks the memory for the copy, no rank measures older weights from then on.
        """
        if not self._has_memory:
            return
        try:
            self._has_memory = self._check_memory()
            if self._has_memory:
                self._measure_older(batch, weights)
        except torch.OutOfMemoryError:
            if self.group.world > 1:
                raise
            self._has_memory = False
        if not self._has_memory:
            log.warning("log-probs under older weights are not measured: a device has not enough memory for a copy")

    def _check_memory(self) -> bool:
        """Return whether every rank of a gang can allocate its shards again; always true for a single rank."""
        if self.group.world == 1:
            return True
        fits = True
        try:
            _ = [torch.empty_like(shard.tensor) for shard in self._shards]
        except torch.OutOfMemoryError:
            fits = False
        return bool(self.group.gather(np.array([fits]), what="memory for older weights").all())

    def _measure_older(self, batch: MicroBatch, weights: Mapping[str, NDArray[Any]]) -> None:
        nonempty = np.flatnonzero(batch.loss_lengths() > 0)
        packs = self._packs.of(batch, nonempty)
        with self._with_weights(weights) as evaluate:
            for pack in self._packs.aligned(packs):
                logprobs = evaluate(pack or smallest_pack())
                if pack is not None:
                    behaviour = self._tensor(batch.logprobs.values[entries(batch, pack)])
                    self._figures.gaps((logprobs - behaviour).abs().cpu().numpy())

    def _accumulate(
        self, batch: MicroBatch, pack: Pack, weights: NDArray[np.float64], current: NDArray[np.bool_]
    ) -> None:
        loss, places = self._loss, entries(batch, pack)
        behaviour = self._tensor(batch.logprobs.values[places])
        reference = None
        if batch.reference is not None and loss.compares:
            reference = on_device(batch.reference.values[places], self._device)
        elif self._reference is not None and loss.compares:
            with torch.no_grad():
                reference, _ = self._reference(pack, entropy=False)
        advantages: NDArray[np.floating] = (
            batch.credit()[places] if self._critic is None else self._critic.add(batch, pack, figures=self._figures)
        )
        self._phase("forward")
        logprobs, entropy = self._policy(pack, entropy=loss.entropy != 0)
        terms = loss.tokens(
            logprobs,
            behaviour=behaviour,
            advantages=self._tensor(advantages),
            reference=reference,
            entropy=entropy,
            before=None if batch.old is None else self._tensor(batch.old.values[places]),
            sequences=self._numbers(pack.samples),
            pairs=self._numbers(batch.pairs()[pack.samples]) if loss.algorithm.pairs else None,
        )
        value = (terms.total * self._tensor(weights[pack.samples])).sum()
        self._phase("backward")
        value.backward()
        self._phase("compute")
        self._figures.pack(
            terms,
            loss=value.detach(),
            logprobs=logprobs.detach(),
            behaviour=behaviour,
            entropy=entropy,
            on_policy=self._tensor(current[pack.samples]),
        )

    def _phase(self, kind: Literal["forward", "backward", "compute"]) -> None:
        """Record the phase of the computation; only on the CPU, since other devices compute asynchronously."""
        if self._device.type == "cpu":
            self.spans.enter(kind)

    @collective()
    def finish_step(self, step: int) -> dict[str, float]:
        """See the base class. Training ends after three consecutive skipped steps."""
        self._update(step)
        metrics, self._updates, self.trained, self._trained_before = combined(self._updates), [], 0, 0
        self._skipped = self._skipped + 1 if metrics["skipped"] else 0
        check_skipped(self._skipped, step=step)
        if self._loss.target is not None:
            metrics["kl_coefficient"] = self._loss.kl
            self._loss = self._loss.after(metrics)
        return metrics

    @collective()
    def update(self, step: int) -> None:
        """See the base class. No rank sends the critic samples of the next update before it has made this one."""
        self._update(step)
        if self.critic_link is not None:
            self.group.gather(np.zeros(1), what=f"the critic's update of step {step}")

    def _update(self, step: int) -> None:
        """Make an update. Collective: gathers the counts, then the gradient."""
        link, critic = self.critic_link, self.settings.critic
        if link is not None:
            self.group.gather(np.zeros(1), what=f"the critic's gradient of step {step}")
            self._figures.count(link.settle(step).items() if self.group.rank == 0 else ())
        self._figures.count(self._penalty_sums.items())
        self._penalty_sums = {}
        meter = self._figures.merged(self.group, step=step)
        totals = LossTotals(int(meter.sums["tokens"]), int(meter.sums["sequences"]))
        divisor, tokens = self.settings.loss.aggregation.divisor(totals), float(max(1, totals.tokens))
        gradients, frozen = {self._optimizer: divisor}, set[FlatAdamW]()
        if critic is not None:
            gradients |= {} if self._critic is None else {self._critic.optimizer: tokens}
            frozen = {self._optimizer} if step <= critic.warmup_steps else frozen
        norm = meter.sums["critic_norm"] / tokens
        applied, *others = apply_together(step, gradients, norm=self._ranks.norm, frozen=frozen, other_norm=norm)
        if link is not None and critic is not None:
            others = [Applied(norm, critic.optimizer.rate(step), applied.moved)]
            if self.group.rank == 0:
                link.update(step, divisor=tokens, moves=applied.moved)
        if not applied.moved:
            log.warning("step %d: the gradient is not finite, so the weights are not changed", step)
        self._step, self._trained_before = [], self.trained
        metrics = metrics_of(meter, divisor=divisor, applied=applied, own=self._loss.algorithm.figures)
        self._updates.append(
            metrics | {name: value for other in others for name, value in critic_metrics(other).items()}
        )

    def tensors(self, *, dtype: WeightsDtype = "float32") -> Iterator[tuple[str, NDArray[Any] | PublishedSlice]]:
        """Yield the trained weights, by the names of transformers or peft; on the CPU unrounded weights are shared.

        On other devices they are copied on a separate stream, after the operations that produced them, and
        concurrently with later computation.
        """
        kind = getattr(torch, dtype)
        with self._copying():
            weights = [(shard, rounded(shard.tensor, kind)) for shard in self._shards if shard.tensor.numel()]
        for shard, tensor in weights:
            array = as_array(tensor)
            yield (
                shard.name,
                PublishedSlice(array=array, offset=shard.box.offset, shape=shard.shape) if shard.sharded else array,
            )

    def full_tensors(self, tensors: Tensors) -> Iterator[tuple[str, NDArray[Any]]]:
        """See the base class: gathers one tensor after another, on every rank."""
        arrays = {name: one.array if isinstance(one, PublishedSlice) else one for name, one in tensors.items()}
        rounded_to = np.uint16 if any(array.dtype == np.uint16 for array in arrays.values()) else np.float32
        for shard in self._shards:
            array = arrays.get(shard.name)
            if not shard.sharded and array is not None:
                yield shard.name, array
                continue
            weights = np.zeros(shard.box.extent, rounded_to) if array is None else array
            held = torch.from_numpy(weights).to(self._device)
            held = held.view(torch.bfloat16) if weights.dtype == np.uint16 else held
            yield shard.name, as_array(self._ranks.full_tensor(held, shard.shape).cpu())

    @collective()
    def probe(self) -> WeightProbe:
        """See the base class; computed like a step, at temperature 1."""
        config = self._model.config.get_text_config()
        ids = probe_ids(vocabulary=config.vocab_size, most=getattr(config, "max_position_embeddings", TOKENS))
        (pack,) = pack_samples([ids[:1]], [ids[1:]], [0], layout="separate", budget=len(ids))
        return WeightProbe(ids, self._policy.evaluate(pack, temperature=1.0).cpu().numpy())

    def _copying(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's copies from a device use a separate stream."""
        if self._device.type == "cpu":
            return nullcontext()
        self._copy_stream = self._copy_stream or torch.Stream(self._device)
        self._copy_stream.wait_stream(torch.accelerator.current_stream(self._device))
        return cast(AbstractContextManager[Any], self._copy_stream)

    def _state(self) -> list[TensorShard]:
        adapted = [] if self._loss.target is None else [self._coefficient()]
        return [*self._optimizer.state(), self._generator(), *adapted]

    @collective()
    def snapshot(self, *, shared: bool = True) -> Callable[[Path], None]:
        """See the base class: model.safetensors and optimizer.safetensors (moments, step counts, the generator)."""
        state = {WEIGHTS_FILE: self._shards, STATE_FILE: self._state()}
        if self._critic is not None:
            state |= self._critic.state()
        link = self.critic_link if self.group.rank == 0 else None
        if link is not None:
            link.copy()
        if shared:
            state = {name: copied(shards, group=self.group) for name, shards in state.items()}

        def write(folder: Path) -> None:
            try:
                if not shared:
                    write_gathered(folder, state, group=self.group, ranks=self._ranks)
                else:
                    for name, shards in state.items():
                        write_shards(folder / name, shards)
                if link is not None:
                    link.write(folder)
            except SafetensorError as error:
                raise unwritable(folder, error) from error

        return write if shared else collective()(write)

    def close(self) -> None:
        """Leave the process group."""
        self._ranks.close()

    def _numbers(self, named: NDArray[np.int64]) -> Tensor:
        """Return for each target the index, from 0, of its value in ``named`` among the distinct values."""
        return on_device(np.unique(named, return_inverse=True)[1], self._device)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return on_device(array.astype(np.float32, copy=False), self._device)
