"""Shapes of models: counts that their publishers state, from the sizes of a config.json."""

import json

import pytest

from asyncflow.errors import ManifestError
from asyncflow.models.source import materialize_config
from asyncflow.planner.shapes import PUBLISHED_CONFIGS, shape_of

BILLIONS = {
    "Qwen2.5-7B": 7.62,
    "Qwen2.5-32B": 32.8,
    "Qwen3-0.6B": 0.596,
    "Qwen3-4B": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-30B-A3B": 30.5,
    "DeepSeek-R1": 671.0,
    "SmolLM2-135M": 0.135,
}


def published(name: str):
    return shape_of(PUBLISHED_CONFIGS[name], name=name)


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_are_those_that_are_published(name: str) -> None:
    assert published(name).parameters == pytest.approx(1e9 * BILLIONS[name], rel=0.01)


def test_embeddings_of_a_model_type_are_tied_if_its_config_does_not_say_otherwise() -> None:
    gemma = {"num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4}
    gemma |= {"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262_144, "model_type": "gemma3_text"}
    assert shape_of(gemma, name="gemma-3-1b").parameters == pytest.approx(1.0e9, rel=0.01)
    assert shape_of({**gemma, "model_type": "gemma2"}, name="gemma-2").tied
    assert not shape_of({**gemma, "tie_word_embeddings": False}, name="other").tied


def test_a_token_uses_the_experts_that_it_is_routed_to() -> None:
    assert published("Qwen3-30B-A3B").used == pytest.approx(3.0e9, rel=0.02)
    assert published("DeepSeek-R1").used == pytest.approx(36.6e9, rel=0.02)  # 37 B with the input embedding


def test_the_shared_expert_of_a_model_may_be_of_another_size_than_the_others() -> None:
    sizes = {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
    sizes |= {"vocab_size": 151_936, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    shape = shape_of({**sizes, "shared_expert_intermediate_size": 5632}, name="Qwen1.5-MoE-A2.7B")
    assert shape.parameters == pytest.approx(14.3e9, rel=0.01)
    assert shape.used + shape.embedding == pytest.approx(2.69e9, rel=0.01)
    without = shape_of(sizes, name="other")
    assert shape.parameters - without.parameters == shape.used - without.used == 24 * 3 * 2048 * 5632
    assert shape.adapters(1) - without.adapters(1) == 24 * 3 * (2048 + 5632)


def test_a_step_of_many_tokens_reads_all_experts_and_one_of_one_its_own() -> None:
    shape = published("Qwen3-30B-A3B")
    assert shape.common_read + shape.routed_read(1) == pytest.approx(shape.used)
    assert shape.routed_read(10_000) == pytest.approx(shape.routed)
    assert shape.routed_read(10_000, devices=32) == pytest.approx(shape.routed / 32)
    assert shape.routed_read(1, devices=32) == shape.routed / 128  # one expert of each layer, and the others wait
    dense = published("Qwen2.5-7B")
    assert (dense.common_read, dense.routed_read(64)) == (dense.used, 0)


def test_cache_of_a_token() -> None:
    assert published("Qwen3-0.6B").cache(dtype="bfloat16") == 28 * 2 * 8 * 128 * 2
    assert published("DeepSeek-R1").cache(dtype="bfloat16") == 61 * (512 + 64) * 2  # the latent, whatever the heads


def test_the_tiny_model_has_as_many_parameters_as_its_config_says(tmp_path) -> None:
    config = json.loads((materialize_config("tiny://reverse-digits", tmp_path) / "config.json").read_text())
    shape = shape_of(config, name="tiny")
    per_layer = 64 * 32 * (4 * 2 + 2 * 2) + 3 * 64 * 128 + 2 * 64
    assert shape.parameters == 2 * per_layer + 64 + 2 * config["vocab_size"] * 64


def test_a_config_without_sizes_is_refused() -> None:
    with pytest.raises(ManifestError, match="has no size 'num_attention_heads'"):
        shape_of({"hidden_size": 64}, name="other")
