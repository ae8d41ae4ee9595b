"""The critic: a second model that estimates the remaining reward at each token, and its training.

    V(s_t) = w · h(prompt, tokens before t) + b        h: last states of a model like the policy; w, b: initially 0

It starts with the weights of the policy's model folder, has its own optimizer, is sharded over the ranks like the
policy, and is part of each checkpoint. It is never published.

Invariants: advantages and returns use the values before the step, whatever updates the step makes. A step updates both
critic and policy or neither, so a checkpoint contains both after the same step. The gradient is that of one big padded
batch up to rounding, for any division of D_k into slots, packs and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from asyncflow.algorithms.ppo import Ppo, value_loss
from asyncflow.algorithms.whitening import whitened
from asyncflow.models.folder import named_weights
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.critic import CRITIC_FILE, CRITIC_STATE_FILE
from asyncflow.training.packing import Pack
from asyncflow.training.ranks import ProcessGroup, gather_rows
from asyncflow.training.settings import BackendSettings, TorchOptions
from asyncflow.training.torch.device import TensorGroup, on_device
from asyncflow.training.torch.figures import StepFigures
from asyncflow.training.torch.model import (
    PackModel,
    checkpoint_layers,
    compile_layers,
    open_model,
    smallest_pack,
)
from asyncflow.training.torch.optimizer import FlatAdamW
from asyncflow.training.torch.packs import entries
from asyncflow.training.torch.sharding import open_sharded
from asyncflow.training.torch.shards import TensorShard, read_first, read_saved, tensor_shard

_HEAD = "value_head"
_SALT = 1
"""Seeds the critic's stochastic rounding differently from the policy's."""


class ValueModel(PackModel):
    """A model that returns one number per token in place of logits."""

    def __init__(self, model: nn.Module, *, compute: torch.dtype, few_sizes: bool = False) -> None:
        super().__init__(model.base_model, compute=compute, few_sizes=few_sizes)
        logits = model.get_output_embeddings().weight
        self.prefix = f"{model.base_model_prefix}."
        self.head = nn.Linear(logits.shape[1], 1, device=logits.device, dtype=logits.dtype)

    def evaluate(self, pack: Pack) -> Tensor:
        """Return the value of each target's state, without a gradient: float32[N]; collective if sharded."""
        with torch.no_grad():
            values: Tensor = self(pack)
        if isinstance(self, FSDPModule):
            self.reshard()
        return values

    def forward(self, pack: Pack) -> Tensor:
        """Return the value of the state in which each target of ``pack`` was chosen: float32[N]."""
        inputs = self.inputs(pack)
        with self.cast():
            states = inputs.of(self.model(**inputs.arguments).last_hidden_state)
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        return functional.linear(states, self.head.weight.to(states.dtype), self.head.bias.to(states.dtype))[:, 0]

    def weights(self) -> list[TensorShard]:
        """Return this rank's part of the weights that are in a model folder, by their names there."""
        return [tensor_shard(self.prefix + name, tensor) for name, tensor in named_weights(self.model)]

    def value_head(self) -> list[TensorShard]:
        """Return this rank's part of the layer that computes values from states."""
        return [tensor_shard(f"{_HEAD}.{name}", tensor) for name, tensor in self.head.named_parameters()]


def open_critic(
    folder: Path,
    checkpoint: Path | None,
    *,
    resumed: bool,
    settings: BackendSettings,
    options: TorchOptions,
    device: torch.device,
    group: ProcessGroup,
    ranks: TensorGroup,
) -> Critic | None:
    """Open the critic with the weights of the model folder, or ``resumed`` from a checkpoint. Collective.

    Returns None for an algorithm without a critic. Raises CheckpointError if the checkpoint has no critic that fits.
    """
    if settings.critic is None:
        return None
    wrap = partial(ValueModel, compute=getattr(torch, settings.compute), few_sizes=options.compile)
    held: dict[str, Any] = {"device": device, "dtype": getattr(torch, settings.weights), "longest": settings.longest}
    if ranks.mesh is None:
        model = wrap(open_model(folder, weights=not resumed, **held))
    else:
        model = open_sharded(folder, mesh=ranks.mesh, wrap=wrap, **held)
        if not resumed:
            read_first(folder, model.weights(), longest=settings.longest, group=group, ranks=ranks)
    for shard in model.value_head():
        shard.tensor.zero_()
    if options.gradient_checkpointing:
        checkpoint_layers(model.model)
    if options.compile:
        compile_layers(model.model, device=device)
    critic = Critic(model, settings, group=group)
    for file, shards in critic.state().items() if resumed else ():
        read_saved(checkpoint, file, shards, group=group, ranks=ranks)
    return critic


def add_estimates(
    batch: MicroBatch, *, values: Jagged, penalty: NDArray[np.float64], algorithm: Ppo, group: ProcessGroup
) -> MicroBatch:
    """Return this rank's samples of a step with values, returns and advantages from the critic's values. Collective.

    values: value of the state in which each response token was chosen; penalty [N]: penalty of each response token.
    """
    counted = batch.counted()
    advantages, returns = algorithm.estimates(
        batch.required_outcomes(), values.values, lengths=values.lengths, counted=counted, penalties=penalty
    )
    if algorithm.options.whiten:
        advantages = whitened(advantages, counted, all_gather=partial(gather_rows, group))
    valued = replace(batch, values=values, returns=Jagged(returns.astype(np.float32), values.offsets))
    return valued.with_advantages(advantages.astype(np.float32))


class Critic:
    """One rank's part of the critic: its model, its optimizer, and the gradient of its loss. padded: see ``PackModel``.

    Raises TypeError if the algorithm of ``settings`` has no critic.
    """

    def __init__(self, model: ValueModel, settings: BackendSettings, *, group: ProcessGroup) -> None:
        critic, algorithm = settings.critic, settings.loss.algorithm
        if critic is None or not isinstance(algorithm, Ppo):
            raise TypeError(f"{type(algorithm).__name__} has no critic")
        self.padded = model.padded
        self._model = model
        self._algorithm = algorithm
        self.optimizer = FlatAdamW(model, critic.optimizer, seed=(settings.seed, group.rank, _SALT))

    def state(self) -> dict[str, list[TensorShard]]:
        """Return this rank's tensors for a checkpoint, by file, sharing their memory."""
        return {
            CRITIC_FILE: [*self._model.weights(), *self._model.value_head()],
            CRITIC_STATE_FILE: list(self.optimizer.state()),
        }

    def evaluate(self, pack: Pack) -> Tensor:
        """Return the value of each target's state, without a gradient: float32[N]; collective if sharded."""
        return self._model.evaluate(pack)

    def add(self, batch: MicroBatch, pack: Pack, *, figures: StepFigures) -> NDArray[np.floating]:
        """Add the gradient of the loss of a pack of ``batch``; return the advantage of each of its targets, float[N].

        If the batch has no values yet, as before the first update of a step, uses the values of this pass, which
        requires waiting for the device.
        """
        if batch.values is not None:
            self.learn(batch, pack, figures=figures)
            return batch.credit()[entries(batch, pack)]
        values = self._model(pack)
        old: NDArray[np.floating] = values.detach().cpu().numpy()
        begins = np.flatnonzero(np.diff(pack.samples, prepend=-1))
        lengths, outcomes = np.diff(np.r_[begins, len(old)]), batch.required_outcomes()[pack.samples[begins]]
        found = self._algorithm.estimates(outcomes, old, lengths=lengths, counted=np.ones(len(old), np.bool_))
        self._add(values, old, found.returns, figures=figures)
        return found.advantages

    def learn(self, batch: MicroBatch, pack: Pack, *, figures: StepFigures) -> None:
        """Add the gradient of the loss of a pack of ``batch``, which has values and returns."""
        assert batch.values is not None
        assert batch.returns is not None
        places = entries(batch, pack)
        self._add(self._model(pack), batch.values.values[places], batch.returns.values[places], figures=figures)

    def _add(
        self, values: Tensor, old: NDArray[np.floating], returns: NDArray[np.floating], *, figures: StepFigures
    ) -> None:
        terms = value_loss(values, self._tensor(old), self._tensor(returns), clip=self._algorithm.options.value_clip)
        loss = terms.loss.sum()
        loss.backward()
        figures.values(loss=loss.detach(), clipped=terms.clipped.sum())
        figures.count(_figures(old, returns))

    def empty_pass(self) -> None:
        """Make a pass that adds no gradient, because other ranks make a pass."""
        (self._model(smallest_pack()) * 0).sum().backward()

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return on_device(array.astype(np.float32), self._model.device)


def _figures(values: NDArray[np.floating], returns: NDArray[np.floating]) -> Iterator[tuple[str, float]]:
    """Yield the sums for the explained variance of returns by values."""
    errors = returns.astype(np.float64) - values
    yield "value_tokens", float(len(returns))
    for name, numbers in (("return", returns), ("value_error", errors)):
        yield name, float(numbers.sum(dtype=np.float64))
        yield f"{name}_squares", float(np.square(numbers, dtype=np.float64).sum())
