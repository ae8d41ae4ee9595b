"""A model that no job trains, published and followed by processes of their own, seen in what a vLLM answers."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncflow.models.folder import whole_folder
from asyncflow.models.tiny import write_config
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.telemetry.span_file import read_recording

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

WITHIN_S = 180.0


def write(folder: Path, says: str) -> None:
    """Write a model with the tiny one's config that says one character, whatever it is asked.

    What its layers add is 0, so the hidden state of each token is that of its embedding, the same for all.
    """
    with whole_folder(folder, replace=True) as made:
        write_config(made)
        config = json.loads((made / "config.json").read_text())
        (token,) = Tokenizer.load(made).encode(says)
        save_file(constant(config, token), made / "model.safetensors")


def constant(config: dict[str, int], token: int) -> dict[str, np.ndarray]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    zeros = {name: np.zeros(tuple(tensor.shape), np.float32) for name, tensor in model.state_dict().items()}
    for name, array in zeros.items():
        if "norm" in name or "embed_tokens" in name:
            array[...] = 1.0
    zeros["lm_head.weight"][token] = 1.0
    return zeros


@pytest.fixture
def begun() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def said(log: Path, words: str, process: subprocess.Popen[bytes]) -> str:
    """Wait until a process has written something, and return what followed it in that line."""
    deadline = time.monotonic() + WITHIN_S
    while (found := re.search(rf"{words}(.*)", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found[1]


def answer(url: str) -> str:
    asked = {"model": "asyncflow", "prompt": "1+2=", "max_tokens": 3, "temperature": 0}
    with urllib.request.urlopen(f"{url}/models", timeout=30) as listed:
        asked["model"] = json.load(listed)["data"][0]["id"]
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=(VLLM, pytest.mark.slow))])
def test_an_engine_that_follows_has_the_newest_weights(
    tmp_path: Path, begun: list[subprocess.Popen[bytes]], engine: str
) -> None:
    """To start a vLLM takes 21 s of a core; tests/rollout/test_engine_vllm.py has the same with one that is there."""
    model, folder = tmp_path / "export", tmp_path / "run"
    write(model, "7")

    def begin(name: str, *words: str) -> tuple[Path, subprocess.Popen[bytes]]:
        log = tmp_path / f"{name}.log"
        command = [sys.executable, "-m", "asyncflow", *words]
        with log.open("wb") as out:
            begun.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        return log, begun[-1]

    settings = ["--set", f"follower={{engine: {{name: {engine}, slots: 2}}, maxLength: 32}}"]
    published = begin("publish", "publish", str(model), "--watch", "--port", "0", "--output", str(folder), *settings)
    said(published[0], "serving θ_0 at ", published[1])
    followed = begin("follow", "follow", str(folder))
    said(followed[0], "swapped to θ0", followed[1])
    url = said(followed[0], "serves ", followed[1]) if engine == "vllm" else ""
    assert url or said(followed[0], "this engine has no inference service", followed[1])
    assert not url or answer(url) == "777"
    write(model, "3")
    said(followed[0], "swapped to θ1", followed[1])
    assert not url or answer(url) == "333"
    for role, done in {"publisher": {"publish"}, "follower": {"receive", "stage", "swap"}}.items():
        recording = read_recording(next(tmp_path.rglob(f"{role}-0-0.spans")))
        assert recording is not None
        assert {span.kind for span in recording.track.background} >= done
    published[1].terminate()
    assert published[1].wait(30) == 128 + 15
    assert followed[1].poll() is None, "it goes on to serve the last version"
    assert not url or answer(url) == "333"
