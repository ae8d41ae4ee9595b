from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def random_weights(folder: Path, *, seed: int, tied_names: bool = False) -> dict[str, np.ndarray]:
    """Weights of the model in ``folder``, wide enough for distributions that are neither flat nor peaked."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    named = model.named_parameters(remove_duplicate=not tied_names)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3, generator=generator)
        return {name: parameter.detach().numpy().copy() for name, parameter in named}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny"))
