"""Models of many families: engine and trainer have the same log-probs, in any batch and pack, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import ManifestError, NotYetError
from asyncflow.models.source import check_model, check_packs

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
MIXED = ["sliding_attention", "full_attention"]
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "num_key_value_heads": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 8, **EXPERTS},
    "mistral": {"sliding_window": 64},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "phi3": {},
    "gemma": {"head_dim": 8},
    "olmo2": {},
    "olmoe": EXPERTS,
    "gpt_neox": {"num_key_value_heads": None},
    "gpt2": GPT2,
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "starcoder2": {},
    "deepseek_v3": LATENT,
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 16, "layer_types": MIXED, "sliding_window": 3},
    "olmo3": {"layer_types": MIXED, "sliding_window": 5},
    "cohere2": {"layer_types": MIXED, "sliding_window": 4},
    "exaone4": {"layer_types": MIXED, "sliding_window": 6},
    "ministral": {"head_dim": 8, "layer_types": MIXED, "sliding_window": 4},
    "qwen2 in windows": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "mistral in windows": {"sliding_window": 4},
    "mixtral in windows": {"num_local_experts": 4, "sliding_window": 2},
    "phi3 in windows": {"sliding_window": 3},
    "starcoder2 in windows": {"sliding_window": 5},
}
"""By the model type, and a word about the variant."""
IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ROTARY = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
QWEN_IMAGES = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
LLAMA4_IMAGES = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}


def texts(model_type: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of the decoder of a model of texts and images."""
    return {**SIZES, "model_type": model_type, **more}


WITH_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": texts("gemma3_text", **FAMILIES["gemma3_text"]),
        "vision_config": IMAGES,
        "mm_tokens_per_image": 4,
        "image_token_index": 60,
        "boi_token_index": 61,
        "eoi_token_index": 62,
    },
    "mistral3": {
        "text_config": texts("mistral"),
        "vision_config": {**IMAGES, "model_type": "pixtral", "head_dim": 8},
        "image_token_index": 60,
    },
    "qwen2_5_vl": {
        "text_config": texts("qwen2_5_vl_text", **ROTARY),
        "vision_config": {**QWEN_IMAGES, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {
        "text_config": texts("qwen3_vl_text", head_dim=8, **ROTARY),
        "vision_config": {**QWEN_IMAGES, "deepstack_visual_indexes": [0]},
    },
    "llama4": {
        "text_config": texts("llama4_text", num_local_experts=2, intermediate_size_mlp=64, attention_chunk_size=64),
        "vision_config": {**IMAGES, **LLAMA4_IMAGES},
    },
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
PADDED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LINEAR,
    "qwen3_next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "mamba2": {"state_size": 4, "head_dim": 8, "num_heads": 8, "n_groups": 2},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4, "layer_types": MIXED},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon": {"num_kv_heads": 2},
    "phimoe": {"sliding_window": 4, "num_local_experts": 4},
    "llama4_text": {
        "head_dim": 8,
        "attention_chunk_size": 4,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
    },
    "stablelm": {},
    "nemotron": {},
}
"""Families that support no packs."""
LONGEST = 32
PROMPTS = [np.arange(3, 8), np.arange(3, 8), np.arange(20, 29), np.array([40, 7, 11])]
RESPONSES = [np.arange(30, 36), np.array([9, 9, 2, 50]), np.arange(45, 52), np.array([5])]


def opened(folder: Path, family: str) -> Any:
    """Make a tiny model of the family, with biases and norms that are not trivial."""
    import torch
    from transformers import CONFIG_MAPPING

    from asyncflow.models.folder import model_class

    sizes = WITH_IMAGES.get(family) or {
        name: value
        for name, value in {**SIZES, **{**FAMILIES, **PADDED}[family]}.items()
        if name == "sliding_window" or value is not None
    }
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family.partition(" ")[0]](**sizes)
    model = model_class(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def decoded(engine: Any, prompts: list[Any], responses: list[Any], *, slots: int) -> list[list[Any]]:
    """Return the logits of every token of each response, from one batch."""
    import torch

    with torch.inference_mode():
        cache = engine.cache(slots=slots, max_length=LONGEST)
        found = []
        for slot, prompt in enumerate(prompts):
            prefix = engine.prefill(prompt.tolist())
            cache.begin(slot, prefix)
            found.append([prefix.logits])
        for place in range(max(map(len, responses)) - 1):
            cache.open()
            tokens = [int(r[place]) if place < len(r) else 3 for r in responses] + [0] * (slots - len(responses))
            logits = engine.decode(cache, torch.tensor(tokens)).float()
            cache.close(torch.arange(len(responses)))
            for slot, response in enumerate(responses):
                if place + 1 < len(response):
                    found[slot].append(logits[slot])
    return found


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_IMAGES])
def test_engine_and_trainer_agree_and_batches_do_not_matter(tmp_path: Path, family: str) -> None:
    import torch

    from asyncflow.models.folder import named_weights
    from asyncflow.rollout.engines.model import CausalModel
    from asyncflow.training.packing import pack_samples
    from asyncflow.training.torch.model import LogprobModel, open_model

    plain = opened(tmp_path, family)
    check_packs(json.loads((tmp_path / "config.json").read_text()), longest=LONGEST, where="")
    trained = open_model(tmp_path, weights=True, device=torch.device("cpu"), longest=LONGEST)
    engine = CausalModel(tmp_path, dtype="float32", longest=LONGEST)
    with torch.inference_mode():
        engine.load({name: tensor.detach().numpy() for name, tensor in named_weights(trained)})
    together = decoded(engine, PROMPTS, RESPONSES, slots=4)
    (alone,) = decoded(engine, PROMPTS[:1], RESPONSES[:1], slots=4)
    assert all(torch.equal(a, b) for a, b in zip(alone, together[0], strict=True))
    (pack,) = pack_samples(PROMPTS, RESPONSES, [0, 0, 1, 2], layout="shared-prompt", budget=99)
    with torch.no_grad():
        logprobs, _ = LogprobModel(trained, temperature=1.0, compute=torch.float32, rows=5)(pack, entropy=False)
        for sample, offset, mine in zip(pack.samples.tolist(), pack.offsets.tolist(), logprobs.tolist(), strict=True):
            target = int(RESPONSES[sample][offset])
            ids = torch.tensor(np.r_[PROMPTS[sample], RESPONSES[sample][:offset]])[None]
            exact = float(plain(ids).logits[0, -1].float().log_softmax(-1)[target])
            assert abs(mine - exact) < 2e-5
            assert abs(float(together[sample][offset].log_softmax(-1)[target]) - exact) < 2e-5


@pytest.mark.parametrize("family", PADDED)
def test_a_model_without_packs_is_trained_in_padded_rows(tmp_path: Path, family: str) -> None:
    import torch

    from asyncflow.training.packing import pack_samples
    from asyncflow.training.torch.model import LogprobModel, open_model

    plain = opened(tmp_path, family)
    with pytest.raises(NotYetError):
        check_packs(json.loads((tmp_path / "config.json").read_text()), longest=LONGEST, where="")
    model = open_model(tmp_path, weights=True, device=torch.device("cpu"), longest=LONGEST)
    trained = LogprobModel(model, temperature=1.0, compute=torch.float32, rows=5)
    packs = pack_samples(PROMPTS, RESPONSES, [0, 0, 1, 2], layout="separate", budget=30, padded=trained.padded)
    assert [pack.table().places.shape for pack in packs] == [(3, 10), (1, 15)]
    for pack in packs:
        logprobs, _ = trained(pack, entropy=False)
        exact = []
        for sample, offset in zip(pack.samples.tolist(), pack.offsets.tolist(), strict=True):
            ids = torch.tensor(np.r_[PROMPTS[sample], RESPONSES[sample][:offset]])[None]
            exact.append(plain(ids).logits[0, -1].float().log_softmax(-1)[int(RESPONSES[sample][offset])])
        torch.testing.assert_close(logprobs, torch.stack(exact), atol=2e-5, rtol=0)
        logprobs.sum().backward()
        torch.stack(exact).sum().backward()
    for name, parameter in model.named_parameters():
        of_rows, alone = parameter.grad, plain.get_parameter(name).grad
        assert (of_rows is None) == (alone is None), name
        if of_rows is not None:
            torch.testing.assert_close(of_rows, alone, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_parameters_of_a_model_of_texts_are_trained(tmp_path: Path, family: str) -> None:
    from asyncflow.training.torch.model import open_model

    opened(tmp_path, family)
    assert all(each.requires_grad for each in open_model(tmp_path, weights=False, device=None).parameters())


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_only_the_decoder_of_a_model_with_images_is_trained_or_adapted(tmp_path: Path, family: str) -> None:
    import torch

    from asyncflow.api.workers import LoraSpec
    from asyncflow.training.packing import pack_samples
    from asyncflow.training.torch.lora import add_adapters
    from asyncflow.training.torch.model import LogprobModel, open_model

    opened(tmp_path, family)
    model = open_model(tmp_path, weights=False, device=None, longest=LONGEST)
    decoder = ("model.language_model", "language_model.model", "lm_head", "language_model.lm_head")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith(decoder)}
    (pack,) = pack_samples(PROMPTS, RESPONSES, [0, 0, 1, 2], layout="shared-prompt", budget=99)
    logprobs, _ = LogprobModel(model, temperature=1.0, compute=torch.float32, rows=99)(pack, entropy=False)
    logprobs.sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained
    add_adapters(model, LoraSpec())
    adapted = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert adapted
    assert all(name.startswith(decoder) for name in adapted)


def test_a_model_that_generates_no_text_is_refused() -> None:
    from transformers import ViTConfig

    from asyncflow.models.folder import model_class

    with pytest.raises(ManifestError, match="no model that generates text for model type 'vit'"):
        model_class(ViTConfig())


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_moe", "mixtral", "llama", *WITH_IMAGES])
def test_exports_have_the_names_that_the_models_files_have(tmp_path: Path, family: str) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig

    from asyncflow.models.folder import export_folder, model_class, named_weights

    plain = opened(tmp_path / "source", family)
    export_folder(dict(named_weights(plain)), tmp_path / "source", tmp_path / "export")
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "export"))
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[name], written[name]) for name in stored)
    again = model_class(AutoConfig.from_pretrained(tmp_path / "export")).from_pretrained(tmp_path / "export")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, plain(ids).logits)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "bert"}, "only see earlier ones"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "only see earlier ones"),
    ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    ({"model_type": "x", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope type 'dynamic'"),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 16},
        "rope type 'longrope'",
    ),
    ({"model_type": "x", "expert_capacity": 64}, "capacity"),
    ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "quantized"),
]
NO_PACKS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "bloom"}, "cannot replace its attention"),
    ({"model_type": "mamba"}, "carry a state"),
    ({"model_type": "qwen3_next"}, "carry a state"),
    ({"model_type": "gpt_oss"}, "sinks"),
    ({"model_type": "stablelm"}, "do not pass their arguments on"),
    ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "capped"),
    ({"model_type": "phimoe", "sliding_window": 31}, "do not pass sliding_window 31 on"),
    ({"model_type": "x", "layer_types": ["sliding_attention"]}, "no sliding_window"),
    ({"model_type": "llama4_text", "attention_chunk_size": 31}, "attention_chunk_size 31 is shorter"),
    ({"model_type": "x", "layer_types": ["chunked_attention"]}, "attention_chunk_size None"),
    ({"model_type": "lfm", "layer_types": ["conv", "full_attention"]}, "layers of type 'conv'"),
    ({"text_config": {"model_type": "x", "attention_chunk_size": 4}}, "attention_chunk_size 4"),
    ({"model_type": "x", "alibi": True}, "ALiBi"),
]


@pytest.mark.parametrize(("config", "words"), [*REFUSED, *NO_PACKS])
def test_what_a_configuration_tells_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(NotYetError, match=words) as refused:
        check_packs(config, longest=LONGEST, where="model")
    assert refused.value.where == "model"


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_cannot_be_trained_in_rows_of_its_own_either_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(NotYetError, match=words):
        check_model(config, longest=LONGEST, where="model")


@pytest.mark.parametrize(("config", "_words"), NO_PACKS)
def test_what_can_be_trained_in_rows_of_its_own_is_taken(config: dict[str, Any], _words: str) -> None:
    check_model(config, longest=LONGEST, where="model")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "phimoe", "sliding_window": 4096},
        {"model_type": "qwen2_moe", "sliding_window": 16, "use_sliding_window": False},
        {"model_type": "llama4_text", "attention_chunk_size": 32},
        {"model_type": "x", "layer_types": ["full_attention", "full_attention"], "attention_chunk_size": 8},
        {"model_type": "phi3", "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
        {"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}},
    ],
)
def test_what_makes_no_difference_within_the_longest_sequence_is_taken(config: dict[str, Any]) -> None:
    check_packs(config, longest=LONGEST, where="")


@pytest.mark.parametrize("family", ["stablelm", "nemotron", "bloom", "mamba2", "falcon"])
def test_what_only_the_model_tells_is_refused_before_anything_is_trained(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from asyncflow.training.torch import model as torch_model

    monkeypatch.setattr(torch_model, "no_packs", lambda *_args, **_more: [])
    opened(tmp_path, family)

    def look_at_it() -> None:
        model = torch_model.LogprobModel(
            torch_model.open_model(tmp_path, weights=True, device=torch.device("cpu")),
            temperature=1.0,
            compute=torch.float32,
            rows=9,
        )
        model.evaluate(torch_model.smallest_pack())

    with pytest.raises(ManifestError, match=r"cannot be trained in packs|no model can be opened"):
        look_at_it()
