"""Adapters in the trainer: their gradient, what is published and saved, the reference, and the engine's log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_torch_backend import assert_same_bits, train, weights
from train_reference import (
    HORIZON,
    TEMPERATURE,
    padded_logprobs,
    reference_gradient,
    relative_error,
    samples,
)
from transformers import AutoModelForCausalLM, DeepseekV3Config

from asyncflow.algorithms.loss import Loss
from asyncflow.api.workers import LoraSpec
from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.identity import SampleKey, Version
from asyncflow.models.folder import export_folder
from asyncflow.models.lora import MergedWeights, adapters_of, export_adapters, merge_folder, weight_of
from asyncflow.models.source import stored_matrices
from asyncflow.rollout.engines.base import GenerationRequest
from asyncflow.rollout.engines.transformers import TransformersEngine
from asyncflow.rpc.columns import Jagged
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.training.torch.lora import trained_weights

LORA = LoraSpec(rank=4, alpha=6, targets=("q_proj", "v_proj", "down_proj"))


def backend(folder: Path, *, checkpoint: Path | None = None, lora: LoraSpec = LORA, **more: Any) -> TorchBackend:
    optimizer = OptimizerSettings(learning_rate=1e-2, steps=8, max_grad_norm=0)
    more = {"optimizer": optimizer, "temperature": TEMPERATURE, "threads": 1, "lora": lora} | more
    made = TorchBackend(BackendSettings(**more), group=SingleProcess())
    made.load(folder, checkpoint=checkpoint)
    return made


def merged(trainer: TorchBackend, folder: Path) -> dict[str, np.ndarray]:
    return MergedWeights(folder, scale=LORA.scale, dtype="float32")(weights(trainer))


def test_fresh_adapters_change_nothing_and_are_all_that_is_trained(tiny_folder: Path) -> None:
    trainer = backend(tiny_folder)
    base = load_file(tiny_folder / "model.safetensors")
    for name, array in merged(trainer, tiny_folder).items():
        assert np.array_equal(array, base[name].numpy())
    frozen = {name: p.detach().clone() for name, p in trainer._model.named_parameters() if not p.requires_grad}
    assert len(frozen) == len(base)
    before = weights(trainer)
    train(trainer, 1, 2)
    assert all(parameter.equal(frozen[name]) for name, parameter in trainer._model.named_parameters() if name in frozen)
    assert before.keys() == weights(trainer).keys()
    assert {name.split(".")[-4] + name.split(".")[-3] for name in before} == {
        "self_attnq_proj",
        "self_attnv_proj",
        "mlpdown_proj",
    }
    assert not any(np.array_equal(array, before[name]) for name, array in weights(trainer).items())


@pytest.mark.parametrize("more", [{}, {"layout": "shared-prompt"}, {"options": {"gradient_checkpointing": True}}])
def test_the_gradient_is_that_of_all_weights_restricted_to_the_adapters(
    tiny_folder: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    trainer, batch = backend(tiny_folder, **more), samples()
    train(trainer, 1, 2)
    adapters = weights(trainer)
    export_folder(merged(trainer, tiny_folder), tiny_folder, tmp_path / "merged")
    whole = reference_gradient(tmp_path / "merged", batch, Loss())
    trainer.micro_batch(batch, version=0)
    tokens = batch.loss_lengths().sum()
    own = {name: tensor.grad.clone() / tokens for name, tensor in trained_weights(trainer._model)}
    expected = {}
    for name in own:
        full = whole[weight_of(name)]
        a, b = (torch.from_numpy(adapters[each]) for each in adapters_of(weight_of(name)))
        expected[name] = LORA.scale * (b.T @ full if "lora_A" in name else full @ a.T)
    assert all(array.any() for array in adapters.values())
    assert relative_error(own, expected) < 1e-5


def test_a_checkpoint_holds_adapters_alone_and_goes_on_with_the_same_bits(tiny_folder: Path, tmp_path: Path) -> None:
    loss = Loss(kl=0.1)
    first, whole = (backend(tiny_folder, loss=loss) for _ in range(2))
    train(first, 1, 2)
    first.snapshot()(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == weights(first).keys()
    resumed = backend(tiny_folder, loss=loss, checkpoint=tmp_path)
    assert_same_bits(weights(resumed), weights(first))
    metrics = train(whole, 1, 4)
    assert train(resumed, 3, 4) == metrics
    assert_same_bits(weights(resumed), weights(whole))
    with pytest.raises(CheckpointError, match="do not fit"):
        backend(tiny_folder, lora=LoraSpec(rank=2, targets=LORA.targets), checkpoint=tmp_path)


def test_the_reference_is_the_model_without_adapters(tiny_folder: Path, tmp_path: Path) -> None:
    trainer, batch = backend(tiny_folder, loss=Loss(kl=0.1, kl_name="k2")), samples()
    assert train(trainer, 1, 1)["kl"] == 0
    train(trainer, 2, 3)
    export_folder(merged(trainer, tiny_folder), tiny_folder, tmp_path / "merged")
    trainer.micro_batch(batch, version=0)
    with torch.no_grad():
        policy, reference = (
            padded_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), batch, HORIZON)
            for folder in (tmp_path / "merged", tiny_folder)
        )
    assert batch.loss_mask is not None
    distances = torch.cat([(policy - reference)[i, : len(batch.responses.row(i))] for i in range(len(batch))])
    expected = (distances**2 / 2)[torch.from_numpy(batch.loss_mask.values.astype(bool))].mean()
    assert trainer.finish_step(4)["kl"] == pytest.approx(float(expected), rel=1e-4)
    assert expected > 1e-4


def test_bfloat16_computes_nearly_the_same_and_keeps_float32_adapters(tiny_folder: Path) -> None:
    exact, half = (backend(tiny_folder, compute=compute) for compute in ("float32", "bfloat16"))
    a, b = train(exact, 1, 1), train(half, 1, 1)
    assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.1)
    assert {array.dtype for array in weights(half).values()} == {np.dtype(np.float32)}


def test_an_export_is_loaded_by_peft(tiny_folder: Path, tmp_path: Path) -> None:
    trainer, batch = backend(tiny_folder), samples()
    train(trainer, 1, 2)
    export_adapters(weights(trainer), LORA, base=str(tiny_folder), target=tmp_path / "export")
    base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "export").eval()
    with torch.no_grad():
        exact = padded_logprobs(model, batch, HORIZON)
    rows = [exact[i, : len(batch.responses.row(i))].numpy() for i in range(len(batch))]
    trainer.micro_batch(replace(batch, logprobs=Jagged.from_rows(rows, "float32")), version=Version(0, 0).packed)
    assert trainer.finish_step(3)["logprob_gap_p99"] < 1e-4


async def test_an_engine_with_merged_weights_has_the_log_probs_of_the_trainer(tiny_folder: Path) -> None:
    trainer, version = backend(tiny_folder), Version(0, 2)
    train(trainer, 1, 2)
    adapters = weights(trainer)
    engine = TransformersEngine(folder=tiny_folder, slots=8, max_length=40)
    await engine.start()
    await engine.load(version, merged(trainer, tiny_folder))
    batch = samples()
    made = [
        await engine.generate(
            GenerationRequest(
                key=SampleKey(i, 0), prompt_ids=tuple(prompt.tolist()), max_tokens=20, temperature=TEMPERATURE
            )
        )
        for i, prompt in enumerate(batch.prompts.row(4 * i) for i in range(5))
    ]
    await engine.close()
    own = replace(
        batch.take(range(0, 20, 4)),
        keys=[SampleKey(i, 0) for i in range(5)],
        responses=Jagged.from_rows([each.ids for each in made], "int32"),
        logprobs=Jagged.from_rows([each.logprobs for each in made], "float32"),
        versions=Jagged.from_rows([each.versions for each in made], "int64"),
        loss_mask=None,
    )
    trainer.micro_batch(own, version=version.packed)
    metrics = trainer.finish_step(3)
    assert metrics["logprob_gap_tokens"] == 100
    assert metrics["logprob_gap_p99"] < 1e-4
    trainer.measure(own, weights=adapters)
    assert trainer.finish_step(4)["logprob_gap_p99"] < 1e-4
    trainer.measure(own, weights=weights(trainer))
    assert trainer.finish_step(5)["logprob_gap_p99"] > 1e-3


def test_a_target_that_the_model_lacks_is_refused_before_anything_is_trained(tiny_folder: Path) -> None:
    for wrong in ("query", "lm_head", "embed_tokens"):
        with pytest.raises(ManifestError, match=rf"called '{wrong}'.*It has down_proj, gate_proj, k_proj"):
            backend(tiny_folder, lora=LoraSpec(targets=("q_proj", wrong)))


def test_dense_layers_beside_experts_have_adapters_and_experts_have_none(tmp_path: Path) -> None:
    config = DeepseekV3Config(
        hidden_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=24,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=12,
        vocab_size=64,
        max_position_embeddings=64,
    )
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    lora = LoraSpec(rank=4, alpha=6)
    trainer = backend(folder, lora=lora)
    train(trainer, 1, 2)
    names = {weight_of(name) for name in weights(trainer)}
    assert names == {f"{layer}.weight" for layer in stored_matrices(folder) if not layer.endswith("mlp.gate")}
    assert {name.split(".", 3)[-1] for name in names} >= {"mlp.up_proj.weight", "mlp.shared_experts.up_proj.weight"}
    whole, base = merged(trainer, folder), MergedWeights(folder, scale=1, dtype="float32")({})
    assert {name for name, array in whole.items() if not np.array_equal(array, base[name])} == names
    export_adapters(weights(trainer), lora, base=str(folder), target=tmp_path / "export")
    with pytest.raises(ManifestError, match="does not load"):
        merge_folder(tmp_path / "export", tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
