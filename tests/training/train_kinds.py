"""The runs of ``test_sharded_kinds``, made by one rank and by two, each with its share of the samples.

A run returns what it found by name: ``first/...`` (the weights that it began with), ``weights/...`` and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from ppo_reference import rewarded
from torch import nn
from train_reference import TEMPERATURE, GradientKept, adapter_steps, part, samples, train_share
from transformers import (
    AutoModelForCausalLM,
    LongcatFlashConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncflow.algorithms.correction import Correction
from asyncflow.algorithms.loss import Loss
from asyncflow.algorithms.ppo import Ppo, PpoOptions
from asyncflow.api.workers import LoraSpec
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings, CriticSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.training.torch.critic import CRITIC_FILE
from asyncflow.weights.sender import PublishedSlice

Found: TypeAlias = dict[str, NDArray[Any]]

LORA = LoraSpec(rank=3, alpha=6, targets=("q_proj", "down_proj"))
COMPUTES = ("float32", "bfloat16")
SMOOTH = Loss(old="recompute")
"""A loss without clipping: rounding in bfloat16 would move tokens over the edge, each a jump in the gradient."""
STEPS = 5
SAVED_AFTER = 2
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
MODELS: Mapping[str, Callable[[], PretrainedConfig]] = {
    "dense": lambda: Qwen3Config(**_SIZES, num_hidden_layers=2, head_dim=8),
    "experts": lambda: Qwen3MoeConfig(
        **_SIZES, num_hidden_layers=2, head_dim=8, num_experts=7, num_experts_per_tok=2, moe_intermediate_size=12
    ),
    # Most tokens go to an expert that computes nothing, so that a pass may reach no parameter of any expert.
    "idle-experts": lambda: LongcatFlashConfig(
        **{**_SIZES, **_LATENT},
        num_layers=2,
        n_routed_experts=2,
        zero_expert_num=14,
        moe_topk=2,
        ffn_hidden_size=24,
        expert_ffn_hidden_size=12,
    ),
}
MIXTURES = ("experts", "idle-experts")


def make_models(folder: Path) -> None:
    """Write each model into a folder of its own name."""
    for name, config in MODELS.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder / name)


def settings(**more: Any) -> BackendSettings:
    # A large epsilon, so that AdamW does not blow up differences of rounding.
    optimizer = OptimizerSettings(learning_rate=3e-3, steps=8, warmup_steps=2, weight_decay=0.1, epsilon=1e-2)
    given = {"optimizer": optimizer, "temperature": TEMPERATURE, "pack_tokens": 48, "threads": 1} | more
    return BackendSettings(**given)


def run(
    model: Path,
    group: ProcessGroup,
    *,
    resumed: Path | None = None,
    saved: Path | None = None,
    watch: Callable[[nn.Module], Callable[[], Found]] | None = None,
    **more: Any,
) -> Found:
    """Train ``STEPS`` steps, or those after ``SAVED_AFTER`` from the checkpoint ``resumed``; leave one in ``saved``."""
    backend = TorchBackend(settings(**more), group=group)
    backend.load(model, checkpoint=resumed)
    told = watch(backend._model) if watch is not None else dict
    found = whole(backend, "first")
    if resumed is None:
        train_share(backend, 1, SAVED_AFTER)
    if saved is not None:
        mine = saved / f"rank-{group.rank:04d}" if group.rank else saved
        mine.mkdir(parents=True, exist_ok=True)
        backend.snapshot()(mine)
    metrics = train_share(backend, SAVED_AFTER + 1, STEPS)
    found |= {name: np.array(metrics[name]) for name in ("kl", "grad_norm") if name in metrics}
    found |= whole(backend, "weights") | told()
    backend.close()
    return found


def whole(backend: TorchBackend, what: str) -> Found:
    return {f"{what}/{name}": array.copy() for name, array in backend.full_tensors(dict(backend.tensors()))}


def watched_experts(model: nn.Module) -> Callable[[], Found]:
    """Note how many experts that have parameters a pass of this rank reaches; return what tells the fewest."""
    reached: list[int] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            reached.append(int((inputs[1].unique() < len(module.down_proj)).sum()))

    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(note)
    return lambda: {"fewest": np.array(min(reached))}


def adapters_run(folder: Path, group: ProcessGroup, **more: Any) -> Found:
    """Train adapters with a KL term, whose reference is the model without them."""
    return run(folder / "dense", group, lora=LORA, loss=Loss(kl=0.5, kl_name="k2"), **more)


def critic_run(model: Path, group: ProcessGroup, *, resumed: Path | None = None, saved: Path | None = None) -> Found:
    """Train policy and critic as ``run`` does; every other step makes two updates, of whitened advantages.

    Rank 1 has no sample of the second mini-batch.
    """
    optimizer = OptimizerSettings(learning_rate=3e-3, steps=8, epsilon=1e-2)
    chosen = {"loss": Loss(algorithm=Ppo(PpoOptions(whiten=True))), "critic": CriticSettings(optimizer=optimizer)}
    backend = TorchBackend(settings(**chosen), group=group)
    backend.load(model, checkpoint=resumed)
    found, batch, metrics = models_of(backend, "first"), rewarded(samples()), dict[str, float]()
    mine = [i for i in range(len(batch)) if group.world == 1 or (i < 6 and i % 2 == 0) == group.rank]
    for step in range(1 if resumed is None else SAVED_AFTER + 1, STEPS + 1):
        if step % 2:
            prepared = backend.prepare(batch.take(mine))
            for half in (range(10), range(10, 20)):
                if half.start:
                    backend.update(step)
                backend.micro_batch(prepared.take([n for n, i in enumerate(mine) if i in half]), version=None)
        else:
            backend.micro_batch(batch.take(mine), version=None)
        metrics = backend.finish_step(step)
        if step == SAVED_AFTER and saved is not None:
            (folder := saved / f"rank-{group.rank:04d}" if group.rank else saved).mkdir(parents=True, exist_ok=True)
            backend.snapshot()(folder)
    found |= models_of(backend, "weights")
    found |= {name: np.array(metrics[name]) for name in ("value_loss", "critic_grad_norm", "explained_variance")}
    backend.close()
    return found


def models_of(backend: TorchBackend, what: str) -> Found:
    """The weights of policy and critic, whole."""
    assert backend._critic is not None
    critic = backend._critic.state()[CRITIC_FILE]
    gathered = {
        one.name: backend._ranks.full_tensor(one.tensor, one.shape) if one.sharded else one.tensor for one in critic
    }
    return whole(backend, what) | {f"{what}/critic/{name}": t.numpy().copy() for name, t in gathered.items()}


def lagged_run(model: Path, group: ProcessGroup) -> Found:
    """Train with the old policy of one step behind, and a correction by the products over responses."""
    loss = Loss(old="lagged", correction=Correction(level="sequence", low=0.1, high=3.0))
    backend, found = TorchBackend(settings(loss=loss), group=group), dict[str, NDArray[Any]]()
    backend.load(model, checkpoint=None)
    batch, before = samples(), held(backend)
    mine = [i for i in range(len(batch)) if i % group.world == group.rank]
    for step in range(1, STEPS + 1):
        now = held(backend)
        for slot in (mine[: 1 + group.rank], mine[1 + group.rank :]):
            backend.micro_batch(backend.prepare(part(batch, slot), weights=before), version=None)
        metrics, before = backend.finish_step(step), now
        found |= named(f"step{step}", {name: np.array(value) for name, value in metrics.items() if is_figure(name)})
    found |= whole(backend, "weights")
    backend.close()
    return found


def is_figure(name: str) -> bool:
    return name.startswith("correction_") or name == "ratio_max"


def held(backend: TorchBackend) -> Found:
    return {
        name: np.array(given.array if isinstance(given, PublishedSlice) else given) for name, given in backend.tensors()
    }


def compiled_run(folder: Path, group: ProcessGroup) -> Found:
    """Return the gradient of one step, of layers as they are and compiled, in each precision."""
    found: Found = {}
    for compute in COMPUTES:
        for compiled in (False, True):
            options = {"compile": compiled, "gradient_checkpointing": compiled}
            more = {
                "loss": SMOOTH,
                "compute": compute,
                "layout": "shared-prompt",
                "pack_tokens": 60,
                "options": options,
            }
            optimizer = OptimizerSettings(learning_rate=1e-3, steps=1, max_grad_norm=0)
            backend = GradientKept(settings(**more, optimizer=optimizer), group=group)
            backend.load(folder / "dense", checkpoint=None)
            batch = samples()
            backend.micro_batch(part(batch, range(group.rank, len(batch), group.world)), version=None)
            backend.finish_step(1)
            found |= named(f"{compute}-{compiled}", {name: grad.numpy() for name, grad in backend.kept.items()})
            backend.close()
    return found | {"frames": np.array(torch._dynamo.utils.counters["frames"]["ok"])}


def all_runs(folder: Path, group: ProcessGroup) -> Found:
    """Return what every kind of run but the compiled one finds on this rank."""
    found = named("adapters", adapters_run(folder, group, saved=folder / f"adapters-{group.world}"))
    for saved in sorted(folder.glob("adapters-[12]")):
        found |= named(saved.name, adapters_run(folder, group, resumed=saved))
    # Rank 1 has no sample of the second mini-batch.
    mine = [i for i in range(len(samples())) if group.world == 1 or (i < 6 and i % 2 == 0) == group.rank]
    found |= named("mini-batches", adapter_steps(folder / "dense", group, mine))
    found |= named("critic", critic_run(folder / "dense", group, saved=folder / f"critic-{group.world}"))
    for saved in sorted(folder.glob("critic-[12]")):
        found |= named(saved.name, critic_run(folder / "dense", group, resumed=saved))
    found |= named("lagged", lagged_run(folder / "dense", group))
    for model in MIXTURES:
        found |= named(model, run(folder / model, group, watch=watched_experts))
    for compute in COMPUTES:
        found |= named(compute, run(folder / "dense", group, compute=compute, loss=SMOOTH))
    return found


def named(name: str, found: Mapping[str, NDArray[Any]]) -> Found:
    return {f"{name}/{what}": array for what, array in found.items()}
