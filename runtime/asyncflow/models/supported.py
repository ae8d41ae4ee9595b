"""Limits on the models that can be trained and run, told from their configuration and what their attention asks for.

A model can be used where a token's output depends on the earlier tokens of its own sequence alone, by softmax attention
over all of them: then it may stand in a pack beside others, and in a batch with others. What the configuration does not
tell is looked for where the model is opened (``torch.model``), before anything is trained.

Invariant: importing this loads no torch, so that ``asyncflow validate`` refuses what would be refused later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow.errors import ManifestError, NotYetError

ENGINE_DTYPES = ("float32", "bfloat16")
"""Dtypes in which the engine ``transformers`` computes."""

_HINT = "Use a causal model with softmax attention over all earlier tokens"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NO_INTERFACE = _names(
    "bloom codegen cpmant falcon fuyu got_ocr2 gpt-sw3 gpt_neo gpt_neox_japanese gptj mpt openai-gpt trocr xglm"
)
"""Model types whose attention is written into the model, where transformers cannot exchange it."""
_RECURRENT = _names(
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h "
    "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
)
"""Model types with layers that carry a state from token to token."""
_NOT_CAUSAL = _names(
    "bert bert-generation big_bird bigbird_pegasus camembert data2vec-text electra ernie megatron-bert mvp prophetnet "
    "reformer rembert roberta roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
)
"""Model types whose tokens see later ones, or another sequence."""
_SINKS = _names("deepseek_v4 gpt_oss granite_swa granitemoe_swa hy_v4 mimo_v2_flash")
"""Model types whose softmax has a term that belongs to no token."""
_FULL = frozenset({"full_attention"})
_WINDOWS = frozenset({"sliding_attention", "chunked_attention"})
_MORE_THAN_SOFTMAX = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments by which transformers' attention functions are asked for more than softmax attention."""


def check_model(config: Mapping[str, Any], *, longest: int, where: str) -> None:
    """Refuse a model that packs and batches cannot hold. Raises NotYetError.

    config: the content of config.json; longest: most tokens of a sequence, for a window as long as that is none;
    where: the folder.
    """
    config = {**config, **(config.get("text_config") or {})}
    family = config.get("model_type")
    wrong = {
        "its attention cannot be exchanged in transformers": family in _NO_INTERFACE,
        "its layers carry a state from token to token": family in _RECURRENT,
        "its tokens do not only see earlier ones": family in _NOT_CAUSAL or config.get("is_encoder_decoder") is True,
        "its attention has sinks": family in _SINKS,
        "its attention scores are capped": config.get("attn_logit_softcapping") is not None,
        "its attention has ALiBi biases": config.get("alibi") is True,
        "its experts have a capacity, beyond which tokens are dropped": bool(config.get("expert_capacity")),
    }
    reasons = [reason for reason, found in wrong.items() if found]
    reasons += [*_windows(config, longest), *_rope(config, longest)]
    if reasons:
        raise NotYetError(f"model type {family!r}: {'; '.join(reasons)}", where=where, hint=_HINT)


def check_dtype(dtype: str, *, where: str) -> None:
    """Refuse a dtype in which the engine ``transformers`` does not compute. Raises ManifestError."""
    if dtype not in ENGINE_DTYPES:
        raise ManifestError(f"dtype {dtype!r}", where=where, hint=f"Use one of {', '.join(ENGINE_DTYPES)}")


def check_attention(asked: Mapping[str, Any], *, longest: int) -> None:
    """Refuse what a model's layer asks of its attention beyond softmax over all earlier tokens. Raises ManifestError.

    asked: the further arguments of transformers' attention functions; longest: most tokens of a sequence here.
    """
    extra = [name for name in _MORE_THAN_SOFTMAX if asked.get(name) is not None]
    if asked.get("dropout"):
        extra.append("dropout")
    window = asked.get("sliding_window")
    if window is not None and window < longest:
        extra.append(f"sliding_window {window}")
    if extra:
        raise ManifestError(
            f"the model's attention uses {', '.join(extra)}, which is not supported",
            where="spec.model.source",
            hint=_HINT,
        )


def check_length(max_length: int, limit: int, *, where: str) -> None:
    """Refuse sequences that are longer than the model has positions. Raises ManifestError."""
    if max_length > limit:
        raise ManifestError(
            f"the model has {limit} positions, and a sequence may have {max_length} tokens",
            where=where,
            hint="Lower sampling.maxPromptTokens or sampling.maxTokens",
        )


def positions(config: Mapping[str, Any]) -> int | None:
    """Return how many positions the model has, None where its configuration does not say."""
    found = (config.get(name) for name in ("max_position_embeddings", "n_positions", "n_ctx"))
    return next((limit for limit in found if isinstance(limit, int)), None)


def _windows(config: Mapping[str, Any], longest: int) -> list[str]:
    kinds = set(config.get("layer_types") or ())
    reasons = [f"layers of type {kind!r}" for kind in sorted(kinds - _FULL - _WINDOWS)]
    size = config.get("sliding_window", config.get("attention_chunk_size"))
    asked = config.get("use_sliding_window")
    windowed = kinds & _WINDOWS if kinds else asked or (asked is None and size is not None)
    if windowed and (size is None or size < longest):
        reasons.append(f"sliding_window {size} is shorter than a sequence may be ({longest} tokens)")
    return reasons


def _rope(config: Mapping[str, Any], longest: int) -> list[str]:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    usual = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    usual = usual or positions(config) or 0
    if kind == "dynamic" or (kind == "longrope" and longest > usual):
        return [f"rope type {kind!r}: a sequence's positions would depend on the lengths of others"]
    return []
