"""The shape of a model, read from its config.json: parameters, bytes of a token's cache, operations per token.

Invariant: a shape describes decoders with grouped or latent attention and gated layers, dense or with experts; its
parameter counts of the published models are accurate within 1 % (``tests/planner``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from asyncflow.errors import ManifestError

BYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
"""Bytes of one number of each dtype."""

_TIED: Final = frozenset(
    [
        "cohere",
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "lfm2",
        "lfm2_moe",
        "smollm3",
        "starcoder2",
        "vaultgemma",
    ]
)
"""Model types whose embeddings are tied if config.json does not say so, as in transformers."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a model.

    attention: parameters of the attention of one layer; cached: numbers that one layer caches per token (2 x KV heads x
    head size, or the latent); mixed: width over which attention mixes tokens (heads x head size). mlp: parameters of a
    dense layer's gated part; dense: number of dense layers; expert: parameters of one expert; experts: number of
    experts in a layer from which the router selects; active: number that it selects per token; shared: hidden units
    of the experts that every token uses in addition, which are computed as one.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    attention: int
    cached: int
    mixed: int
    mlp: int
    dense: int
    expert: int = 0
    experts: int = 0
    active: int = 0
    shared: int = 0

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab * self.hidden

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.layers - self.dense

    @property
    def expert_hidden(self) -> int:
        """Hidden units of one expert, 0 without experts. The gated part of an expert has three matrices."""
        return self.expert // (3 * self.hidden)

    @property
    def _blocks(self) -> int:
        """Parameters without embeddings and without the experts that a router selects."""
        blocks = self.layers * (self.attention + 2 * self.hidden) + self.hidden + self.dense * self.mlp
        return blocks + self.expert_layers * 3 * self.hidden * self.shared

    @property
    def common(self) -> int:
        """Parameters that every token uses, and embeddings: all parameters except ``routed``."""
        return self._blocks + self.embedding * (1 if self.tied else 2)

    @property
    def routed(self) -> int:
        """Parameters of the experts that a router selects, which expert parallelism divides."""
        return self.expert_layers * self.experts * self.expert

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.common + self.routed

    @property
    def common_read(self) -> int:
        """Parameters that every step reads: the common ones without the input embedding."""
        return self._blocks + self.embedding

    @property
    def used(self) -> int:
        """Parameters with which one token is multiplied: its selected experts, without the input embedding."""
        return self.common_read + self.expert_layers * self.active * self.expert

    def routed_read(self, tokens: float, *, devices: int = 1) -> float:
        """Return the experts' parameters that a step over ``tokens`` tokens reads on one of the experts' devices.

        With uniform routing an expert is unused by n tokens with probability (1 - active / experts) ** n. At least one
        expert of each layer is counted: a device that is used reads at least one, and the other devices wait for it.
        """
        if not self.experts:
            return 0.0
        idle = math.pow(1 - self.active / self.experts, tokens)
        return self.expert_layers * self.expert * max(1.0, self.experts / devices * (1 - idle))

    def adapters(self, rank: int) -> int:
        """Return the parameters of adapters of all linear layers; experts that a router selects have none.

        Those of latent attention are counted as if it were grouped.
        """
        attention = 2 * (self.hidden + self.mixed) + 2 * self.hidden + self.cached
        dense = 3 * self.hidden + self.mlp // self.hidden
        shared = 3 * (self.hidden + self.shared) if self.shared else 0
        return rank * (self.layers * attention + self.dense * dense + self.expert_layers * shared)

    def cache(self, *, dtype: str) -> int:
        """Return the bytes of the keys and values of one token."""
        return self.layers * self.cached * BYTES[dtype]

    def forward(self, *, context: float) -> float:
        """Return the operations of one token's forward pass that attends to ``context`` previous tokens.

        2 per used parameter, and 4 x layers x width per attended token (Narayanan et al. 2021, §5.1).
        """
        return 2.0 * self.used + 4.0 * self.layers * self.mixed * context


def shape_of(config: Mapping[str, Any], *, name: str) -> Shape:
    """Return the shape that a Hugging Face config.json describes. Raises ManifestError if a size is missing."""
    config = {**config, **config.get("text_config", {})}
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        layers, vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
        intermediate = int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(
            f"config.json of {name} has no size {error}",
            where="spec.model.source",
            hint="The planner supports decoders in Hugging Face's format: hidden_size, num_hidden_layers, ...",
        ) from None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or hidden // heads)
    if "kv_lora_rank" in config:
        attention, cached, mixed = _latent(config, hidden=hidden, heads=heads)
        kv_heads = 1  # all heads read the same latent, which is replicated on every device
    else:
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        cached, mixed = 2 * kv_heads * head, heads * head
    experts = int(config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0)
    expert = int(config.get("moe_intermediate_size") or intermediate)
    shared = config.get("shared_expert_intermediate_size") or expert * int(config.get("n_shared_experts") or 0)
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED)),
        attention=attention,
        cached=cached,
        mixed=mixed,
        mlp=3 * hidden * intermediate,
        dense=int(config.get("first_k_dense_replace", 0)) if experts else layers,
        expert=3 * hidden * expert if experts else 0,
        experts=experts,
        active=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        shared=int(shared) if experts else 0,
    )


def _latent(config: Mapping[str, Any], *, hidden: int, heads: int) -> tuple[int, int, int]:
    """Return parameters, cached numbers and width of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    plain, value = int(config["qk_nope_head_dim"]), int(config["v_head_dim"])
    query = config.get("q_lora_rank")
    queries = heads * (plain + rope)
    attention = hidden * int(query) + int(query) * queries if query else hidden * queries
    attention += hidden * (rank + rope) + rank * heads * (plain + value) + heads * value * hidden
    return attention, rank + rope, heads * (plain + rope)


def _qwen(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            **more,
        }
    )


_7B = _qwen(28, 3584, 18944, 28, 4, 152_064)
_32B = _qwen(64, 5120, 27648, 40, 8, 152_064)
_V3 = _qwen(
    61,
    7168,
    18432,
    128,
    128,
    129_280,
    first_k_dense_replace=3,
    kv_lora_rank=512,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)

PUBLISHED_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Qwen2.5-7B": _7B,
        "Qwen2.5-7B-Instruct": _7B,
        "Qwen2.5-Math-7B": _7B,
        "DeepSeek-R1-Distill-Qwen-7B": _7B,
        "Qwen2.5-32B": _32B,
        "Qwen2.5-32B-Instruct": _32B,
        "DeepSeek-R1-Distill-Qwen-32B": _32B,
        "Qwen3-0.6B": _qwen(28, 1024, 3072, 16, 8, 151_936, head_dim=128, tie_word_embeddings=True),
        "Qwen3-1.7B": _qwen(28, 2048, 6144, 16, 8, 151_936, head_dim=128, tie_word_embeddings=True),
        "Qwen3-4B": _qwen(36, 2560, 9728, 32, 8, 151_936, head_dim=128, tie_word_embeddings=True),
        "Qwen3-8B": _qwen(36, 4096, 12288, 32, 8, 151_936, head_dim=128),
        "Qwen3-30B-A3B": _qwen(
            48,
            2048,
            6144,
            32,
            4,
            151_936,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        "DeepSeek-R1": _V3,
        "DeepSeek-V3": _V3,
        "SmolLM2-135M": _qwen(30, 576, 1536, 9, 3, 49_152, tie_word_embeddings=True),
    }
)
"""Configs of models of published set-ups, by the last part of their name, for users who have no copy of the model."""
