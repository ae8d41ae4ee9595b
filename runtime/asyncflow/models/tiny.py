"""The tiny model, generated without a download: config, tokenizer, and weights from a supervised warm-up.

It has a Qwen3 architecture with two layers and untied embeddings over the 256 bytes and two special tokens. In the
warm-up it learns a task together with wrong habits, as in pre-training. Only the warm-up needs torch.

Invariants: the files are a pure function of this module, so every role may write its own copy. On one machine the
weights are a pure function of (config, lesson, seed), independent of the caller's thread count and random state, which
the warm-up restores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from asyncflow.data.generated import TinyTask
from asyncflow.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


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


STEPS = 400
BATCH = 32
LEARNING_RATE = 4e-3
RAMP = 20
"""Steps over which the learning rate rises; afterwards it decays by a cosine to FLOOR of its peak."""
FLOOR = 0.05
IGNORED = -100


def warm_up(folder: Path, task: TinyTask, *, seed: int) -> dict[str, torch.Tensor]:
    """Train a new model of the folder's config on ``task`` and return its weights, float32 on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = Tokenizer.load(folder)
    lesson = task.lesson(seed=seed)
    with _isolated(seed):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        for step in range(STEPS):
            ids, targets = _batch(tokenizer, islice(lesson, BATCH))
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * _schedule(step)
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _schedule(step: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return min(1.0, (step + 1) / RAMP) * (FLOOR + (1 - FLOOR) * cosine)


def _batch(tokenizer: Tokenizer, lesson: Iterator[tuple[str, tuple[str, ...]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and the ids to predict from them, both int64 (BATCH, length), padded on the right.

    Only the model's tokens are targets; each of its turns includes its end token.
    """
    import torch

    encoded = [list(_encode(tokenizer, question, turns)) for question, turns in lesson]
    length = max(map(len, encoded))
    rows = [tokens + [(tokenizer.pad_id, False)] * (length - len(tokens)) for tokens in encoded]
    ids = torch.tensor([[token for token, _ in row[:-1]] for row in rows])
    targets = torch.tensor([[token if trained else IGNORED for token, trained in row[1:]] for row in rows])
    return ids, targets


def _encode(tokenizer: Tokenizer, question: str, turns: tuple[str, ...]) -> Iterator[tuple[int, bool]]:
    """Yield the tokens of a question and its response, and whether each is a token of the model."""
    yield from ((token, False) for token in tokenizer.encode(question))
    for number, turn in enumerate(turns):
        is_model_turn = number % 2 == 0
        yield from ((token, is_model_turn) for token in tokenizer.encode(turn))
        if is_model_turn:
            yield tokenizer.eos_ids[0], True


@contextmanager
def _isolated(seed: int) -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
