"""The tiny model that the project makes itself: config and tokenizer, without torch and without a download.

A Qwen3 architecture with two layers and untied embeddings over the 256 bytes and two special tokens. ``warmup`` makes
its weights.

Invariant: the files are a pure function of this module's text, so that every role may write its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

END = "<|end|>"
PAD = "<|pad|>"

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.06,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
}

_LINEAR = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def write_config(folder: Path) -> None:
    """Write config.json, generation_config.json, tokenizer.json and tokenizer_config.json into ``folder``."""
    tokenizer = byte_tokenizer()
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    _write(folder / "config.json", {**_QWEN3, **ends, "vocab_size": tokenizer.get_vocab_size()})
    _write(folder / "generation_config.json", ends)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": _QWEN3["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )


def linear_layers() -> list[str]:
    """Return the full names of the model's linear layers without the output layer."""
    return [f"model.layers.{number}.{name}" for number in range(_QWEN3["num_hidden_layers"]) for name in _LINEAR]


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with an id for each byte: byte-level BPE without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, END, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END])
    return tokenizer


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
