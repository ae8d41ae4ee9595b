"""Small jobs and problems for the tests of the planner."""

import io
import random

import msgspec

from asyncflow.api import RLJob, load_job
from asyncflow.planner.devices import DEVICES
from asyncflow.planner.search import SplitProblem
from asyncflow.planner.shapes import PUBLISHED_CONFIGS, shape_of
from asyncflow.planner.work import work_of
from asyncflow.rollout.lengths import Lengths

MANIFEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: small}
spec:
  model: {source: "pvc://models/Qwen3-0.6B"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  algorithm: {groupSize: 4, promptsPerStep: 8, steps: 10}
  sampling: {maxTokens: 512, maxPromptTokens: 256}
  rollout: {engine: {name: vllm, slots: 64, dtype: bfloat16}, accelerator: {profile: nvidia, count: 1}}
  trainer: {backend: {name: torch, precision: bf16}, accelerator: {profile: nvidia, count: 1}}
  transferQueue: {storageUnits: 1, bytesPerUnit: 1Gi}
"""
SCHEDULES = (
    "{mode: sync}",
    "{mode: periodic}",
    "{mode: async, update: delayed, swapAt: quota}",
    "{mode: async, swapAt: sequence, maxStaleness: 2}",
    "{mode: async, swapAt: token, maxStaleness: 2}",
    "{mode: async, swapAt: token, update: staggered, maxStaleness: 1}",
)


def job_of(*overrides: str) -> RLJob:
    """Return the small job with some values changed."""
    return load_job(io.StringIO(MANIFEST), overrides)


def problem_of(*overrides: str, model: str = "Qwen3-0.6B", device: str = "h100", devices: int = 8) -> SplitProblem:
    """Return the problem of the small job with a published model."""
    shape = shape_of(PUBLISHED_CONFIGS[model], name=model)
    return SplitProblem(shape=shape, device=DEVICES[device], work=work_of(job_of(*overrides).spec), devices=devices)


def random_problem(number: int, *, mixture: bool = False) -> tuple[RLJob, SplitProblem]:
    """Return a job and a problem of 4 to 8 devices that is small enough to simulate each of its splits.

    mixture: of a model with experts, which engine and trainer divide, in more ways: of 4 or 5 devices.
    """
    draw = random.Random(number)
    wide = "rollout.engine.options.args.enable_expert_parallel=true"
    job = job_of(
        f"algorithm.groupSize={draw.choice((2, 4))}",
        f"algorithm.promptsPerStep={draw.choice((4, 8, 12))}",
        f"schedule={SCHEDULES[number % len(SCHEDULES)]}",
        f"rollout.engine.slots={draw.choice((4, 16, 64))}",
        f"trainer.backend.name={draw.choice(('torch', 'mindspeed'))}",
        *((wide, "trainer.backend.name=mindspeed") if mixture else ()),
    )
    lengths = Lengths(tokens=draw.choice((60, 200)), sigma=draw.choice((0.0, 0.5, 1.0)))
    config = {
        "num_hidden_layers": draw.choice((8, 28, 48)),
        "hidden_size": draw.choice((1024, 4096)),
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
    }
    device = msgspec.structs.replace(
        DEVICES[draw.choice(("h100", "a100", "h20", "910b"))],
        node=draw.choice((2, 4, 8)),
        token_s=draw.choice((1e-4, 2e-3)),
        train=draw.choice((0.05, 0.3, 0.6)),
    )
    devices = draw.choice((4, 5, 6, 7, 8))
    if mixture:
        experts = draw.choice((4, 8))
        config |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 12288 // experts}
        config |= {"first_k_dense_replace": draw.choice((0, 1)), "n_shared_experts": draw.choice((0, 1))}
        devices = min(devices, 5)
    problem = SplitProblem(
        shape=shape_of(config, name="random"),
        device=device,
        work=work_of(job.spec, lengths=lengths),
        devices=devices,
    )
    return job, problem
