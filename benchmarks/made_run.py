"""A generator of synthetic run folders of any length, which uses the writers of real runs: spans, journal, samples."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec

from asyncflow.driver.evaluation import EvaluationResult
from asyncflow.driver.journal import SUMMARY
from asyncflow.driver.progress import RunProgress
from asyncflow.driver.sample_files import SampleText, write_samples
from asyncflow.telemetry.spans import ENDING, FOLDER, Spans

BEGAN = 1_790_000_000.0
JOB = """\
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: %(name)s}
spec:
  model: {source: "tiny://reverse-digits"}
  data: {train: {source: "tiny://reverse-digits"}, eval: {source: "tiny://reverse-digits", seed: 2, size: 512}}
  reward: {function: task}
  algorithm: {name: grpo, steps: %(steps)d}
  sampling: {maxTokens: 16, maxPromptTokens: 16}
  rollout: {replicas: %(rollouts)d, maxReplicas: 64, engine: {name: simulated}}
  trainer: {backend: {name: counting}}
"""
EVALUATED = 25
"""The number of steps between two evaluations."""


class _Clock:
    """A clock that the generator sets."""

    now = BEGAN

    def __call__(self) -> float:
        return self.now


def make_run(
    folder: Path, *, name: str = "made", rollouts: int = 16, seconds: float = 1800.0, step_s: float = 3.6, seed: int = 1
) -> None:
    """Write a run of ``seconds`` in steps of about ``step_s``, in which one rollout is killed and restarted.

    Each rollout has about a dozen spans per step. Each step has a line, and the texts of eight samples.
    """
    chance, steps = random.Random(seed), round(seconds / step_s)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(JOB % {"name": name, "steps": steps, "rollouts": rollouts})
    begins = [BEGAN + 12 + step_s * number for number in range(steps + 1)]
    _write_lines(folder, begins, step_s=step_s, chance=chance)
    _write_driver(folder, begins)
    _write_trainer(folder, begins, step_s=step_s, chance=chance)
    for index in range(rollouts):
        killed = steps // 2 if index == 1 else steps
        _write_rollout(folder, index, 0, begins[: killed + 1], chance=chance, killed=killed < steps)
        if killed < steps - 2:
            _write_rollout(folder, index, 1, begins[killed + 2 :], chance=chance)


def _write_lines(folder: Path, begins: list[float], *, step_s: float, chance: random.Random) -> None:
    steps = len(begins) - 1
    progress = RunProgress(folder, steps, BEGAN)
    progress.note("first dispatch", at=begins[0])
    for step in range(steps + 1):
        done = step / steps
        skill = 0.12 + 0.83 / (1 + math.exp(-9 * (done - 0.4)))
        if step % EVALUATED == 0 or step == steps:
            result = EvaluationResult(
                step=step, prompts=512, accuracy=skill, greedy=min(1.0, skill * 1.04), reward=skill,
                greedy_reward=skill, pass_at={"4": 1 - (1 - skill) ** 4}, sets={},
            )  # fmt: skip
            progress.evaluated(result, at=begins[step] + 0.4 * step_s)
        if step == 0:
            continue
        progress.step(_line(step, begins, skill=skill, step_s=step_s, chance=chance))
        kept = [_sample(step, number, skill, chance) for number in range(8)]
        write_samples(folder, kept, purpose="train", step=step, form="jsonl")
    progress.note("Succeeded", at=begins[-1] + 2.0)
    progress.close()
    summary = {"phase": "Succeeded", "steps": steps, "wall_s": begins[-1] + 2 - BEGAN, "tokens_trained": steps * 30720}
    (folder / SUMMARY).write_bytes(msgspec.json.encode(summary))


def _line(step: int, begins: list[float], *, skill: float, step_s: float, chance: random.Random) -> dict[str, object]:
    """Return the line of a step of a run that learns: the reward rises, the entropy falls, other values are noise."""
    done, noise = step / (len(begins) - 1), chance.gauss(0, 1)
    wait = step_s * chance.uniform(0.05, 0.35)
    worked = step_s - wait
    return {
        "at": begins[step], "started": begins[step - 1], "ended": begins[step], "attempt": 0, "ranks": 1,
        "step": step, "samples": 128, "reward": min(1.0, max(0.0, skill + 0.03 * noise)),
        "tokens": 128 * 240 + round(900 * noise), "response_tokens": 128 * 180 + round(900 * noise),
        "observation_tokens": 0, "staleness_start_max": 1 + (step % 11 == 0), "staleness_start_mean": 1.0,
        "staleness_end_max": 1, "staleness_token_mean": 0.9 + 0.05 * chance.random(),
        "reward_components": {"right": skill, "form": min(1.0, 0.6 + done / 2)},
        "logprob_gap_p99": 4e-3 * (1 + 0.2 * noise), "logprob_gap": 8e-4, "published": True,
        "wall_s": step_s, "wait_s": wait, "compute_s": 0.8 * worked, "optimizer_s": 0.12 * worked,
        "publish_s": 0.05 * worked, "checkpoint_s": 0.0, "busy_s": 0.8 * step_s * step,
        "loss": 0.04 * (1 - done) + 0.004 * noise, "kl": 0.02 * done, "approx_kl": abs(4e-4 * noise),
        "entropy": 1.9 - 1.2 * done + 0.03 * noise, "surprise": 1.8 - 1.2 * done, "ratio": 1.0,
        "ratio_max": 1.3 + 0.1 * chance.random(), "clip_low": 0.004, "clip_high": abs(0.012 * (1 + 0.3 * noise)),
        "clip_dual": 0.0, "grad_norm": abs(0.8 - 0.4 * done + 0.08 * noise),
        "learning_rate": 3e-4 * (1 - 0.5 * done), "skipped": 0.0, "silent_samples": 64 * done,
    }  # fmt: skip


def _sample(step: int, number: int, skill: float, chance: random.Random) -> SampleText:
    digits, right = f"{chance.randrange(100000):05d}", chance.random() < skill
    response = digits[::-1] if right else digits
    return SampleText(
        purpose="train", step=step, serial=16 * (step - 1) + number // 2, sample=number % 2, drawn=number < 6,
        prompt=f"{digits}=", response=f"{response}<|end|>", answer=f'"{digits[::-1]}"', reward=float(right),
        advantage=chance.gauss(0, 1), prompt_tokens=6, response_tokens=6, version_min=max(0, step - 2),
        version_max=max(0, step - 1), finish="stop", details={"right": float(right), "form": 1.0},
    )  # fmt: skip


@contextmanager
def _recorder(folder: Path, role: str, index: int, attempt: int, clock: _Clock) -> Iterator[Spans]:
    path = folder / FOLDER / f"{role}-{index}-{attempt}{ENDING}"
    spans = Spans(path, role=role, index=index, attempt=attempt, began=clock.now, now=clock)
    yield spans
    spans.close()


def _write_driver(folder: Path, begins: list[float]) -> None:
    clock = _Clock()
    with _recorder(folder, "driver", 0, 0, clock) as spans:
        for begin in begins[:-1]:
            clock.now = begin
            spans.enter("dispatch")
            clock.now += 0.02
            spans.enter("idle", waits="admission")
        clock.now = begins[-1] + 2


def _write_trainer(folder: Path, begins: list[float], *, step_s: float, chance: random.Random) -> None:
    clock = _Clock()
    with _recorder(folder, "trainer", 0, 0, clock) as spans:
        for step, begin in enumerate(begins[:-1], start=1):
            clock.now = begin
            spans.enter("idle", waits="claim", step=step)
            clock.now += step_s * chance.uniform(0.05, 0.35)
            left = begins[step] - clock.now
            for _ in range(4):
                spans.enter("forward", step=step)
                clock.now += left * 0.07
                spans.enter("backward", step=step)
                clock.now += left * 0.15
            spans.enter("optimizer", step=step)
            clock.now += left * 0.1
            spans.note("publish", begin=clock.now, end=clock.now + 0.3, version=step)
        clock.now = begins[-1]


def _write_rollout(
    folder: Path, index: int, attempt: int, begins: list[float], *, chance: random.Random, killed: bool = False
) -> None:
    clock = _Clock()
    clock.now = begins[0] - 6 if attempt else BEGAN + 2
    with ExitStack() as closing:
        spans = closing.enter_context(_recorder(folder, "rollout", index, attempt, clock))
        first = round((begins[0] - BEGAN - 12) / (begins[1] - begins[0]))
        for step, (begin, end) in enumerate(pairwise(begins), start=first + 1):
            clock.now = begin
            busy = (end - begin) * chance.uniform(0.72, 0.96)
            spans.enter("swap", step=step, version=step - 1)
            clock.now += 0.05
            for _ in range(5):
                spans.enter("prefill", step=step, version=step - 1)
                clock.now += busy * 0.02
                spans.enter("generate", step=step, version=step - 1)
                clock.now += busy * 0.17
            spans.note("reward", begin=clock.now - 0.2, end=clock.now, step=step)
            spans.enter("idle", waits="claim", step=step)
            spans.note("receive", begin=clock.now, end=clock.now + 0.2, version=step)
        clock.now = begins[-1]
        spans.pulse()
        if killed:
            closing.pop_all()
