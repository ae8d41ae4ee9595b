"""Compare the gradient of the trainer's kernels on this machine's device with the same gradient on its CPU.

    python hack/gpu/gradients.py

The device computes in bfloat16 and the CPU in float32; the tests compare the CPU's gradient with that of one padded
batch. The cases are packs of separate samples, packs of samples that share their prompts, compiled layers, gradient
checkpointing, and deterministic kernels, which run twice and must give the same bits. Each case prints one JSON line
with the relative distance of its gradient, and the distance of bfloat16 on the CPU. The exit status is 1 if a distance
is larger than rounding explains.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncflow.identity import SampleKey
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend

VOCABULARY = 2048
CONFIG = Qwen3Config(
    hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
    intermediate_size=512, vocab_size=VOCABULARY, tie_word_embeddings=True,
)  # fmt: skip
WHOLE = 32_768
"""Tokens of a pack that holds all samples."""
FAR = 3.0
"""The largest accepted distance from the float32 gradient, in multiples of bfloat16's distance on the CPU. A gradient
that ignores the prompts has 40.
"""
CASES: dict[str, dict[str, Any]] = {
    "separate": {},
    "shared prompts": {"layout": "shared-prompt"},
    "shared prompts, small packs": {"layout": "shared-prompt", "pack_tokens": 2048},
    "separate, computed again": {"options": {"gradient_checkpointing": True}},
    "separate, compiled": {"options": {"compile": True}},
    "shared prompts, compiled": {"layout": "shared-prompt", "options": {"compile": True}},
    "weights in bfloat16": {"weights": "bfloat16"},
    "separate, deterministic": {"deterministic": True},
    "shared prompts, deterministic": {"layout": "shared-prompt", "deterministic": True},
}


def samples(groups: int = 8, size: int = 8) -> MicroBatch:
    """Return groups whose prompts have 50 to 200 tokens, and responses 1 to 300."""
    rng = np.random.default_rng(0)
    keys = [SampleKey(group, sample) for group in range(groups) for sample in range(size)]
    prompts = [rng.integers(0, VOCABULARY, rng.integers(50, 200)) for _ in range(groups)]
    responses = [rng.integers(0, VOCABULARY, rng.integers(1, 300)) for _ in keys]
    return MicroBatch(
        keys=keys,
        prompts=Jagged.from_rows([prompts[key.serial] for key in keys], "int32"),
        responses=Jagged.from_rows(responses, "int32"),
        logprobs=Jagged.from_rows([rng.normal(-np.log(VOCABULARY), 0.1, len(row)) for row in responses], "float32"),
        versions=Jagged.from_rows([np.zeros(len(row)) for row in responses], "int64"),
        advantages=rng.normal(size=len(keys)).astype(np.float32),
    )


def gradient(folder: Path, device: str, **more: Any) -> torch.Tensor:
    """Return the gradient of one micro-batch, float32[P] on the CPU."""
    settings = BackendSettings(
        optimizer=OptimizerSettings(learning_rate=1e-6, steps=1),
        device=device,
        **{"compute": "bfloat16", "pack_tokens": WHOLE, **more},
    )
    backend = TorchBackend(settings, group=SingleProcess())
    backend.load(folder, checkpoint=None)
    batch = samples()
    for index in np.array_split(np.arange(len(batch)), 1 if settings.pack_tokens == WHOLE else 8):
        backend.micro_batch(batch.take(index.tolist()), version=0)
    return backend._optimizer.gradient.cpu().clone()  # noqa: SLF001


def main() -> int:
    """Compare every case, and print its distance from the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator.type if accelerator else "cpu"
    status = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        torch.manual_seed(0)
        # The weights are exact in bfloat16, so both precisions start from the same numbers.
        AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(folder)
        exact = gradient(folder, "cpu", compute="float32")
        rounding = float((gradient(folder, "cpu") - exact).norm() / exact.norm())
        for name, more in CASES.items():
            found = gradient(folder, device, **more)
            line = {"case": name, "relative": float((found - exact).norm() / exact.norm()), "rounding": rounding}
            met = line["relative"] < FAR * rounding
            if more.get("deterministic"):
                line["same_bits"] = torch.equal(found, gradient(folder, device, **more))
                met = met and line["same_bits"]
            print(json.dumps(line), flush=True)
            status = status if met else 1
    return status


if __name__ == "__main__":
    sys.exit(main())
