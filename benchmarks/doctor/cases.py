"""The runs with injected faults, and the healthy runs. Each is a real run of seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
LEARN, PACE = HERE / "learn.yaml", HERE / "pace.yaml"


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A run. finds: the name of the expected finding, "" for none.

    settings: values of ``--set``; slow: syncs of paths that contain this take ``slow_s`` seconds; kills, stops: how
    often rollout-0 is killed, or stopped for ``runs.STOP_S`` seconds; live: whether the doctor queries the driver
    during the run, because the run does not end by itself.
    """

    finds: str
    manifest: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    slow: str = ""
    slow_s: float = 0.0
    kills: int = 0
    stops: int = 0
    live: bool = False


FAULTS: dict[str, Planted] = {
    "reward-of-nothing": Planted(
        finds="constant-reward",
        manifest=LEARN,
        settings={"reward.function": "planted:nothing", "algorithm.steps": "6"},
    ),
    "reward-by-prompt": Planted(
        finds="equal-groups",
        manifest=LEARN,
        settings={"reward.function": "planted:by_prompt", "algorithm.steps": "7"},
    ),
    "drifting-engine": Planted(
        finds="logprob-gap",
        manifest=LEARN,
        settings={"rollout.engine.name": "drifting", "algorithm.steps": "12"},
    ),
    "many-updates": Planted(
        finds="clip-fraction",
        manifest=LEARN,
        settings={
            "reward.function": "planted:dice",
            "algorithm.learningRate": "0.05",
            "algorithm.epochs": "8",
            "algorithm.clip": "{low: 0.05, high: 0.05}",
            "algorithm.steps": "7",
        },
    ),
    "large-steps": Planted(
        finds="kl-runaway",
        manifest=LEARN,
        settings={"reward.function": "planted:dice", "algorithm.learningRate": "0.03", "algorithm.steps": "7"},
    ),
    "short-responses": Planted(
        finds="cut-responses",
        manifest=LEARN,
        settings={"sampling.maxTokens": "3", "algorithm.steps": "6"},
    ),
    "failing-reward": Planted(
        finds="rewards-fail",
        manifest=LEARN,
        settings={"reward.function": "planted:fails_often", "algorithm.steps": "6"},
    ),
    "paused": Planted(
        finds="stalled",
        manifest=PACE,
        settings={"reward.function": "planted:fails"},
        live=True,
    ),
    "few-rollouts": Planted(
        finds="trainer-starved",
        manifest=PACE,
        settings={"rollout.replicas": "1", "rollout.engine.options.token_s": "0.06", "algorithm.steps": "10"},
    ),
    "many-rollouts": Planted(
        finds="rollouts-starved",
        manifest=PACE,
        settings={"rollout.replicas": "3", "trainer.backend.options.sleep_s": "0.5", "algorithm.steps": "12"},
    ),
    "synchronous": Planted(
        finds="taking-turns",
        manifest=PACE,
        settings={
            "schedule": "{mode: sync, update: sync, maxStaleness: 0}",
            "trainer.backend.options.sleep_s": "0.3",
            "algorithm.steps": "12",
        },
    ),
    "stopped-rollout": Planted(
        finds="lease-timeouts",
        manifest=PACE,
        settings={"rollout.leaseSeconds": "0.7", "algorithm.steps": "12"},
        stops=2,
    ),
    "killed-rollouts": Planted(
        finds="lost-processes",
        manifest=PACE,
        settings={"algorithm.steps": "30"},
        kills=2,
    ),
    "full-storage": Planted(
        finds="storage-full",
        manifest=PACE,
        settings={
            "data.maxTaskBytes": "256",
            "transferQueue.bytesPerUnit": "2000Ki",
            "data.eval": '{source: "tiny://reverse-digits", seed: 2, size: 700}',
            "evaluation": "{every: 100, samples: 1}",
            "rollout.engine.options.token_s": "0.005",
            "algorithm.steps": "8",
        },
    ),
    "slow-ledger": Planted(
        finds="slow-ledger",
        manifest=PACE,
        settings={"storage.ledger.sync": "always"},
        slow="/ledger/",
        slow_s=0.1,
    ),
    "slow-checkpoints": Planted(
        finds="checkpoint-stall",
        manifest=PACE,
        settings={"storage.checkpoints.every": "1"},
        slow="/checkpoints/",
        slow_s=0.3,
    ),
    "slow-reward": Planted(
        finds="slow-rewards",
        manifest=PACE,
        settings={"reward.function": "planted:slow", "reward.workers": "{min: 1, max: 1}", "algorithm.steps": "8"},
    ),
    "slow-link": Planted(
        finds="slow-link",
        manifest=PACE,
        settings={
            "weightSync.bandwidth": "1Mi",
            "weightSync.delta": "false",
            "trainer.backend.options.moving": "131072",
            "schedule.swapAt": "sequence",
            "schedule.maxStaleness": "4",
        },
    ),
    "many-evaluations": Planted(
        finds="evaluation-share",
        manifest=PACE,
        settings={
            "data.eval": '{source: "tiny://reverse-digits", seed: 2, size: 32}',
            "evaluation": "{every: 1, samples: 1}",
            "algorithm.steps": "12",
        },
    ),
    "failing-sink": Planted(
        finds="sinks-fail",
        manifest=PACE,
        settings={"telemetry.sinks": "[{kind: failing}]", "algorithm.steps": "12"},
    ),
    "slow-swaps": Planted(
        finds="swap-stall",
        manifest=PACE,
        settings={"rollout.engine.options.load_s": "0.15"},
    ),
    "long-prompts": Planted(
        finds="prompts-skipped",
        manifest=PACE,
        settings={"data.train": '{source: "jsonl://prompts.jsonl"}', "algorithm.steps": "10"},
    ),
}

HEALTHY: dict[str, Planted] = {
    "quickstart": Planted(finds="", manifest=EXAMPLES / "quickstart.yaml"),
    "counting": Planted(
        finds="",
        manifest=EXAMPLES / "counting.yaml",
        settings={"algorithm.steps": "60", "trainer.backend.options.sleep_s": "0.12"},
    ),
    "delayed": Planted(
        finds="",
        manifest=HERE.parent / "delayed_update.yaml",
        settings={"trainer.backend.options.sleep_s": "0.6"},
    ),
}
