"""Whole jobs whose responses share their prompts: what is counted, how even the ranks are, and the same gradient."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from one_run import finish, start

from asyncflow.models.tiny import write_config

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PROMPT, RESPONSE, GROUP = 100, 239, 16
"""Tokens of a prompt and of a response, responses of a prompt: table 3 of the Periodic Asynchrony paper."""
PUBLISHED = 0.7237
RANKS = 2
SIZES = {
    "vocab_size": 258,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 512,
}
"""Of a model whose norms compute in the model's own precision; most others round to float32 in between."""
REWARD = """
import zlib

def score(*, response, prompt, answer, meta):
    return float(zlib.crc32(response.encode(errors="replace")) % 2)
"""


class Seen(NamedTuple):
    """packed: tokens of the step as the trainer reported them; loads: of each rank; gradient: in float64."""

    packed: int
    loads: list[int]
    gradient: np.ndarray[Any, Any]
    samples: int


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts of 100 bytes (a byte is a token), a reward, and the back end as a package."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    folder = tmp_path_factory.mktemp("job")
    model, package = folder / "model", folder / "package"
    model.mkdir()
    torch.manual_seed(1)
    write_config(model)
    config = GPT2Config(**SIZES, **json.loads((model / "generation_config.json").read_text()))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    rows = [{"prompt": f"{number:03d} ".ljust(PROMPT, "x"), "answer": "1"} for number in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(REWARD)
    about = package / "gradient_witness-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gradient-witness\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[asyncflow.trainer_backends]\ngradient_witness = gradient_witness:GradientWitness\n"
    )
    (package / "gradient_witness.py").write_text((Path(__file__).parent / "gradient_witness.py").read_text())
    return folder


def run(place: Path, packing: str, *, groups: int, ranks: int, sigma: float = 0.0) -> Seen:
    """Run one step, and say what its trainer did."""
    out, witness = place / f"{packing}-{sigma}", place / f"witness-{packing}-{sigma}"
    witness.mkdir()
    manifest = {
        "apiVersion": "asyncflow.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "shared-prompts"},
        "spec": {
            "model": {"source": "model"},
            "data": {"train": {"source": "jsonl://prompts.jsonl", "config": {"split": "whole"}}},
            "reward": {"function": "mine:score"},
            "algorithm": {"groupSize": GROUP, "promptsPerStep": groups, "steps": 1, "learningRate": 1e-4},
            "sampling": {"maxPromptTokens": PROMPT, "maxTokens": RESPONSE},
            "schedule": {"mode": "sync"},
            "rollout": {
                "engine": {
                    "name": "simulated",
                    "slots": 256,
                    "options": {"sigma": sigma, "tokens": RESPONSE / 3 if sigma else 0},
                }
            },
            "trainer": {
                "replicas": ranks,
                "backend": {"name": "gradient_witness", "packing": packing, "tokensPerMicroBatch": 8192},
            },
            "transferQueue": {"storageUnits": 1, "bytesPerUnit": "64Mi"},
        },
    }
    file = place / f"{packing}-{sigma}.yaml"
    file.write_text(json.dumps(manifest))
    paths = os.pathsep.join(filter(None, [str(place / "package"), os.environ.get("PYTHONPATH", "")]))
    finish(start(str(file), out, [], env={"PYTHONPATH": paths, "WITNESS": str(witness)}), within_s=200)
    (line,) = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    files = [np.load(witness / f"step-1-rank-{rank}.npz") for rank in range(ranks)]
    loads = [int(file["tokens"].sum()) for file in files]
    assert sum(loads) == line["packed_tokens"]
    assert line["silent_samples"] == 0
    return Seen(int(line["packed_tokens"]), loads, sum(file["gradient"] for file in files), line["samples"])


def test_shared_prompts_count_once_and_give_the_same_gradient_in_a_run(place: Path) -> None:
    separate = run(place, "separate", groups=4, ranks=1)
    shared = run(place, "shared-prompt", groups=4, ranks=1)
    assert shared.packed / separate.packed == pytest.approx(PUBLISHED, abs=0.002)
    norm = np.linalg.norm(separate.gradient)
    assert norm > 0
    assert np.linalg.norm(shared.gradient - separate.gradient) <= 1e-12 * norm


@pytest.mark.slow
def test_ranks_are_even_and_the_saving_is_kept_with_responses_of_any_length(place: Path) -> None:
    groups = 4 * RANKS
    seen = run(place, "shared-prompt", groups=groups, ranks=RANKS, sigma=0.8)
    prompts = json.loads((place / "shared-prompt-0.8" / "metrics.jsonl").read_text())
    inputs = prompts["response_tokens"] - seen.samples
    kept = seen.samples * PROMPT - (seen.packed - inputs)
    assert kept >= 0.9 * groups * (GROUP - 1) * PROMPT
    assert max(seen.loads) <= 1.05 * sum(seen.loads) / RANKS
