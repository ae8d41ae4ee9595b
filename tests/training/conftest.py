"""The tiny model of these tests: Qwen3 type, untied, random weights, written as an ordinary folder.

Their shared modules (``train_*.py``) lie beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Whatever says no dtype is float64, as the weights of a backend are that is told so."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
