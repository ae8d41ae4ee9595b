"""Whole jobs whose responses share their prompts: what is counted, how even the ranks are, and the same gradient."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from one_run import finish, start

from asyncflow.models.tiny import write_config
from asyncflow.queue.ledger.audit import audit_ledgers

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PROMPT, RESPONSE, GROUP = 100, 239, 16
"""Tokens of a prompt and of a response, responses of a prompt: table 3 of the Periodic Asynchrony paper."""
PUBLISHED = 0.7237
RANKS = 2
TRI_MODEL = [
    "schedule.mode=periodic",
    "algorithm.old=lagged",
    "algorithm.kl={coefficient: 0.05, estimator: k3}",
]
"""With these, the witness also says the gradient of separate models."""
LAGGED = [
    *TRI_MODEL,
    "algorithm.clip={low: 0.02, high: 0.03}",
    "algorithm.learningRate=0.003",
    "algorithm.groupSize=4",
    "sampling.maxTokens=24",
    "trainer.backend.tokensPerMicroBatch=160",
]
HERE = Path(__file__).parent
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
    """A step. metrics: as the trainer reported them; loads: packed tokens of each rank; gradients: in float64, where
    one rank made them, that of the run and that of separate models."""

    metrics: dict[str, Any]
    loads: list[int]
    gradients: dict[str, NDArray[np.float64]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts of 100 bytes (a byte is a token), a reward, and the backend as a package."""
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
    for module in (HERE / "gradient_witness.py", HERE.parent / "training" / "tri_model_reference.py"):
        shutil.copy(module, package)
    return folder


def run(place: Path, *settings: str, groups: int, ranks: int = 1, sigma: float = 0.0, steps: int = 1) -> list[Seen]:
    """Run some steps, and say what the trainer did in each."""
    name = f"{groups}-{sigma}-{steps}"
    out, witness = place / name, place / f"witness-{name}"
    witness.mkdir()
    manifest = {
        "apiVersion": "asyncflow.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "shared-prompts"},
        "spec": {
            "model": {"source": "model"},
            "data": {"train": {"source": "jsonl://prompts.jsonl", "config": {"split": "whole"}}},
            "reward": {"function": "mine:score"},
            "algorithm": {"groupSize": GROUP, "promptsPerStep": groups, "steps": steps, "learningRate": 1e-4},
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
                "backend": {"name": "gradient_witness", "packing": "shared-prompt", "tokensPerMicroBatch": 8192},
            },
            "transferQueue": {"storageUnits": 1, "bytesPerUnit": "64Mi"},
        },
    }
    file = place / f"{name}.yaml"
    file.write_text(json.dumps(manifest))
    paths = os.pathsep.join(filter(None, [str(place / "package"), os.environ.get("PYTHONPATH", "")]))
    finish(start(str(file), out, [*settings], env={"PYTHONPATH": paths, "WITNESS": str(witness)}), within_s=200)
    audit = audit_ledgers(out / "ledger")
    assert audit.ok, audit.problems
    seen = []
    for step, line in enumerate(map(json.loads, (out / "metrics.jsonl").read_text().splitlines()), start=1):
        files = [dict(np.load(witness / f"step-{step}-rank-{rank}.npz")) for rank in range(ranks)]
        loads = [int(file.pop("tokens").sum()) for file in files]
        assert sum(loads) == line["packed_tokens"]
        assert line["silent_samples"] == 0
        seen.append(Seen(line, loads, files[0]))
    assert [each.metrics["step"] for each in seen] == [*range(1, steps + 1)]
    return seen


def test_shared_prompts_count_once_and_give_the_same_gradient_in_a_run(place: Path) -> None:
    (shared,) = run(place, *TRI_MODEL, groups=2)
    separate = 2 * GROUP * (PROMPT + RESPONSE - 1)
    assert shared.metrics["packed_tokens"] / separate == pytest.approx(PUBLISHED, abs=0.002)
    assert difference(shared.gradients["gradient"], shared.gradients["separate"]) <= 1e-12


def test_each_step_of_a_run_has_the_gradient_of_three_separate_models(place: Path) -> None:
    """The policy, the reference and the old policy of one step behind, in micro-batches of less than a group."""
    seen = run(place, *LAGGED, groups=3, steps=4)
    for step, each in enumerate(seen, start=1):
        assert len(each.gradients) == 2
        assert difference(each.gradients["gradient"], each.gradients["separate"]) <= 1e-12, step
        assert each.metrics["staleness_start_max"] == 0
        if step > 1:
            assert each.metrics["ratio_max"] > 1
            assert each.metrics["clip_low"] + each.metrics["clip_high"] > 0
            assert each.metrics["kl"] > 0


def difference(found: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    norm = np.linalg.norm(expected)
    assert norm > 0
    return float(np.linalg.norm(found - expected) / norm)


@pytest.mark.slow
def test_ranks_are_even_and_the_saving_is_kept_with_responses_of_any_length(place: Path) -> None:
    groups = 4 * RANKS
    (seen,) = run(place, groups=groups, ranks=RANKS, sigma=0.8)
    samples, packed = seen.metrics["samples"], seen.metrics["packed_tokens"]
    inputs = seen.metrics["response_tokens"] - samples
    kept = samples * PROMPT - (packed - inputs)
    assert kept >= 0.9 * groups * (GROUP - 1) * PROMPT
    assert max(seen.loads) <= 1.05 * sum(seen.loads) / RANKS
