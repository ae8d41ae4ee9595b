"""No registered scorer and no data set runs what a model says, and what runs all the same finds nothing."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import pytest
from hostile import CANARY, UNREACHABLE, VARIABLE, answers
from scoring_one import one

from asyncflow.data.generated import make_dataset
from asyncflow.errors import ManifestError
from asyncflow.rewards.pool import PoolLimits, RewardPool
from asyncflow.rewards.process import Scorer
from asyncflow.rewards.wire import Example, RewardResult

HERE = Path(__file__).parent


@dataclass
class Place:
    """A folder with a secret file, a folder for marks, and sockets that count who connects."""

    folder: Path
    listeners: list[socket.socket]

    @property
    def port(self) -> int:
        port: int = self.listeners[0].getsockname()[1]
        return port

    @property
    def marks(self) -> set[str]:
        return {path.name for path in (self.folder / "marks").iterdir()}

    def connections(self) -> int:
        count = 0
        for listener in self.listeners:
            listener.setblocking(False)
            try:
                listener.accept()
            except BlockingIOError:
                continue
            count += 1
        return count


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    (tmp_path / "marks").mkdir()
    (tmp_path / "canary").write_text(CANARY)
    monkeypatch.setenv(VARIABLE, CANARY)
    tcp = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(tmp_path / "socket"))
    local.listen()
    with tcp, local:
        yield Place(tmp_path, [tcp, local])


def score_without_sandbox(place: Place, scorer: str) -> dict[str, object]:
    command = [sys.executable, str(HERE / "hostile.py"), str(place.folder), str(place.port), scorer]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, VARIABLE: CANARY})
    rewards: dict[str, object] = json.loads((place.folder / "rewards.json").read_text())
    return rewards


@pytest.mark.parametrize("scorer", ["gym", "math_verify", "task"])
def test_no_scorer_and_no_data_set_runs_an_answer(place: Place, scorer: str) -> None:
    rewards = score_without_sandbox(place, scorer)
    assert len(answers(place.folder, port=1)) >= 30
    assert place.marks == set()
    assert place.connections() == 0
    assert CANARY not in json.dumps(rewards)
    assert {kind for kind, reward in rewards.items() if reward == 1.0} == set(), "none of these answers is right"
    refused = {kind: reward for kind, reward in rewards.items() if "Permission" in str(reward)}
    assert refused == {}, "a checker of this version of reasoning-gym runs answers: give it a parser"
    failed = {kind: reward for kind, reward in rewards.items() if not isinstance(reward, float) or isnan(reward)}
    assert failed == {}, "a wrong answer is no broken reward"


def test_these_answers_do_harm_where_they_are_run(place: Place) -> None:
    rewards = score_without_sandbox(place, "hostile:run_it")
    assert place.marks >= {"open", "import", "exec", "f-string", "subclasses", "subprocess"}
    assert all(CANARY in str(rewards[f"hostile:run_it: read {what}"]) for what in ("a file", "a variable"))
    assert rewards["hostile:run_it: yaml"] == 1.0, "a scorer that runs answers lets them forge those of later samples"
    assert place.connections() == 2


def test_the_set_that_is_left_out_cannot_be_had(place: Place) -> None:
    with pytest.raises(ManifestError, match="refuses the config"):
        make_dataset(UNREACHABLE, {"datasets": [{"name": "countdown"}]}, where="data.train")


async def test_a_power_that_takes_for_ever_costs_its_own_sample_only(tmp_path: Path) -> None:
    pool = RewardPool(Scorer(function="math_verify", workdir=tmp_path), PoolLimits(timeout_s=5.0))
    await pool.start()
    heavy = answers(tmp_path, port=1)["latex power"]
    results = await asyncio.gather(
        *(one(pool, Example(prompt="", response=text, answer="31")) for text in (heavy, "$31$", "so 31"))
    )
    await pool.close()
    assert results[0].value == 0.0
    assert [result.value for result in results[1:]] == [1.0, 1.0]


async def test_what_is_run_all_the_same_finds_nothing_and_harms_nobody(place: Place) -> None:
    """A scorer that runs every answer, in its sandbox, between samples that are scored as they should be."""
    pool = RewardPool(Scorer(function="hostile:run_it", workdir=HERE), PoolLimits(timeout_s=2.0))
    await pool.start()
    right = Example(prompt="", response="7")
    said: dict[str, RewardResult] = {}
    for kind, answer in answers(place.folder, port=place.port).items():
        said[kind], neighbour = await asyncio.gather(one(pool, Example(prompt="", response=answer)), one(pool, right))
        assert (neighbour.value, neighbour.failure) == (1.0, ""), kind
        assert CANARY not in said[kind].detail, kind
        assert (await one(pool, right)).value == 1.0, kind
    await pool.close()
    assert place.marks == set()
    assert place.connections() == 0
    for kind in ("open", "read a file", "read its parent", "connect", "connect locally", "fork", "signal its parent"):
        assert "PermissionError" in said[kind].detail, kind
    assert "KeyError: 'ASYNCFLOW_TEST_CANARY'" in said["read a variable"].detail
    assert said["forge"].failure == "died"
    assert "its nonce belongs to no open question" in said["forge"].detail
    assert said["power"].failure == "timeout"
    assert "MemoryError" in said["repeat"].detail
