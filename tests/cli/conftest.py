from pathlib import Path

import pytest

MANIFEST = """\
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: little}
spec:
  model: {source: "tiny://reverse-digits"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  algorithm: {steps: 4}
  sampling: {maxTokens: 16, maxPromptTokens: 16}
  rollout: {engine: {name: simulated}}
  trainer: {backend: {name: counting}}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    return path
