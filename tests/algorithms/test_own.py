"""The algorithm of docs/guide/own/algorithm.md, installed as a package of its own, is found, checked and used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from own_algorithm import install

ROOT = Path(__file__).parents[2]
USE = """
import json, sys
import numpy as np, torch
from asyncflow.algorithms.base import algorithm_of
from asyncflow.algorithms.loss import Loss
from asyncflow.commands.preflight import load

manifest = load(sys.argv[1], ["algorithm.name=softclip", "algorithm.options={sharpness: 2.0}"])
loss = Loss(algorithm=algorithm_of(manifest.spec))
logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
advantages = torch.from_numpy(loss.algorithm.advantages(np.array([0.0, 1.0])))
terms = loss.tokens(logprobs, behaviour=torch.tensor([-1.2, -2.0]), advantages=advantages, reference=None, entropy=None)
terms.total.sum().backward()
print(json.dumps({"advantages": advantages.tolist(), "gradient": logprobs.grad.tolist()}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("softclip"))


def run(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@pytest.mark.process
def test_an_installed_algorithm_is_used_by_its_name(installed: Path) -> None:
    done = run(installed, "-c", USE, str(ROOT / "examples" / "quickstart.yaml"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["advantages"] == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    # d/dlp of -A * sigmoid(s (r - 1)) * 4 / s at r = 1 is -A: the plain policy gradient.
    assert found["gradient"][1] == pytest.approx(-(0.5**0.5), rel=1e-5)
    assert 0 < found["gradient"][0] < 0.5**0.5 * 1.23, "further out it fades"


@pytest.mark.process
def test_its_options_are_checked_before_anything_starts(installed: Path) -> None:
    manifest, named = str(ROOT / "examples" / "quickstart.yaml"), ["--set", "algorithm.name=softclip"]
    done = run(installed, "-m", "asyncflow", "validate", manifest, *named, "--set", "algorithm.options={sharpnes: 1}")
    assert done.returncode != 0
    assert "spec.algorithm.options: unknown option sharpnes. Known: sharpness" in done.stderr


@pytest.mark.process
def test_without_its_package_it_is_refused(tmp_path: Path) -> None:
    manifest = str(ROOT / "examples" / "quickstart.yaml")
    done = run(tmp_path, "-m", "asyncflow", "validate", manifest, "--set", "algorithm.name=softclip")
    assert done.returncode != 0
    assert "no installed package offers it in asyncflow.algorithms" in done.stderr
