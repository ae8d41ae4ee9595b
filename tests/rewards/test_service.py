"""Rewards from a process of their own over a Unix socket: the container of a rollout's pod that holds no Secret."""

import asyncio
import math
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from scoring_one import one

from asyncflow.api.load import load_reward
from asyncflow.api.names import REWARD_SOCKET_ENV
from asyncflow.errors import DeadlineExceeded, ManifestError
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.service import Greeting, RewardClient, RewardServer, ScoreReply, open_rewards
from asyncflow.rewards.wire import LENGTH, MAX_FRAME, Example, RewardResult, frame

REWARD = """
    function: "%s"
    timeoutSeconds: 5
"""
FUNCTION = """
    import time

    def score(*, response, prompt, answer, meta):
        if response == "slow":
            time.sleep(2)
        if response == "raise":
            raise KeyError(prompt)
        return float(response == answer)

    def among(*, responses, prompt):
        return [{"reward": rank, "details": {"of": len(responses)}} for rank in range(len(responses))]
"""
SUM = """
    timeoutSeconds: 5
    components:
    - {name: right, function: "mine:score"}
    - {name: among, function: "mine:among", weight: 0.5}
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "socket"
        (folder / "mine.py").write_text(textwrap.dedent(FUNCTION))

    def client(self, *, start_timeout_s: float = 20.0, silence_s: float = 20.0) -> RewardClient:
        return RewardClient(self.socket, start_timeout_s=start_timeout_s, silence_s=silence_s)

    @contextmanager
    def server(self, function: str = "mine:score", *, said: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
        reward = self.folder / "reward.yaml"
        reward.write_text(textwrap.dedent(said or REWARD % function))
        command = [sys.executable, "-m", "asyncflow", "rewards", "--reward", str(reward), "--socket", str(self.socket)]
        process = subprocess.Popen(command)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def example(response: str, answer: str = "") -> Example:
    return Example(prompt="p", response=response, answer=answer)


async def test_samples_are_scored_there_side_by_side(place: Place) -> None:
    with place.server() as process:
        client = place.client()
        await client.start()
        assert stat.S_IMODE(place.socket.stat().st_mode) == 0o600
        results = await asyncio.gather(*(one(client, example(str(n), str(n % 2))) for n in range(6)))
        assert [result.value for result in results] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        raised = await one(client, example("raise"))
        assert raised.failure == "raised"
        assert "KeyError: 'p'" in raised.detail
        assert (await one(client, Example(prompt="", response="", answer=object()))).failure == "raised"
        await client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert not place.socket.exists()


async def test_a_sum_over_groups_is_scored_there_and_comes_with_its_parts(place: Place) -> None:
    with place.server(said=SUM):
        client = place.client()
        await client.start()
        assert client.by_group
        first, second = await client.score([example("7", "7"), example("8", "7")])
        await client.close()
    assert (first.value, first.components) == (1.0, {"right": 1.0, "among": 0.0})
    assert (second.value, second.components) == (0.5, {"right": 0.0, "among": 1.0})
    assert second.details == b'{"among":{"of":2}}'


async def test_a_sample_outlives_the_process_that_scores_it_once(place: Place) -> None:
    client = place.client()
    with place.server() as process:
        await client.start()
        pending = asyncio.create_task(one(client, example("slow", "slow")))
        await asyncio.sleep(0.5)
        process.kill()
        process.wait()
    with place.server():
        assert (await pending).value == 1.0
        await client.close()


async def test_a_sample_whose_process_dies_twice_has_failed(place: Place) -> None:
    client = place.client()
    pending = asyncio.create_task(one(client, example("slow")))
    for _ in range(2):
        with place.server():
            while client._connection is None or client._connection.over:
                await asyncio.sleep(0.05)
        while not client._connection.over:
            await asyncio.sleep(0.05)
    result = await pending
    assert (result.failure, result.value) == ("died", 0.0)
    assert "has closed the connection" in result.detail
    await client.close()


async def test_a_server_that_hangs_is_given_up(place: Place) -> None:
    with place.server() as process:
        await place.client().start()
        client = place.client(silence_s=1.0, start_timeout_s=2.0)
        await client.start()
        process.send_signal(signal.SIGSTOP)
        result = await one(client, example("1", "1"))
        assert result.failure == "died"
        assert "no reward server answered" in result.detail, "the second try finds nobody either"
        process.send_signal(signal.SIGCONT)
        assert (await one(client, example("1", "1"))).value == 1.0
        await client.close()


async def test_a_function_that_cannot_be_loaded_is_refused_by_its_name(place: Place) -> None:
    with place.server("mine:absent"):
        client = place.client()
        with pytest.raises(ManifestError, match=r"reward\.function: 'mine:absent' cannot be loaded"):
            await client.start()
        await client.close()


async def test_where_nobody_listens_it_says_whose_log_tells_why(place: Place) -> None:
    client = place.client(start_timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match="container rewards"):
        await client.start()
    waiting = asyncio.gather(*(one(client, example(str(n))) for n in range(50)))
    results = await asyncio.wait_for(waiting, 10)
    assert {result.failure for result in results} == {"died"}, "all of them wait at the same time"


@pytest.mark.parametrize(
    "frames",
    [
        (LENGTH.pack(3) + b"abc",),
        (frame(Greeting()), frame(ScoreReply(number=0, results=[]))),
        (frame(Greeting()), frame(ScoreReply(number=0, results=[RewardResult(value=math.nan)]))),
        (frame(Greeting()), LENGTH.pack(3) + b"abc"),
    ],
)
async def test_a_server_that_sends_anything_else_fails_the_sample_only(place: Place, frames: tuple[bytes, ...]) -> None:
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        for each in frames:
            writer.write(each)
            await reader.read(1)
        writer.write_eof()
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(serve, place.socket):
        client = place.client()
        result = await asyncio.wait_for(one(client, example("7", "7")), 10)
        await client.close()
        await asyncio.wait_for(asyncio.gather(*connections), 10)  # the client has closed each of them
    assert (result.failure, result.value) == ("died", 0.0)


def test_a_file_that_is_no_reward_is_refused(place: Place) -> None:
    (place.folder / "reward.yaml").write_text(textwrap.dedent(REWARD % "mine:score") + "timeoutSecond: 5")
    with pytest.raises(ManifestError, match=r"timeoutSecond\b"):
        load_reward(place.folder / "reward.yaml")


def test_a_substrate_chooses_by_a_variable(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "reward.yaml").write_text(textwrap.dedent(REWARD % "mine:score"))
    spec = load_reward(place.folder / "reward.yaml")
    assert isinstance(open_rewards(spec, workdir=place.folder, within_s=1.0), WeightedRewards)
    monkeypatch.setenv(REWARD_SOCKET_ENV, str(place.socket))
    assert isinstance(open_rewards(spec, workdir=place.folder, within_s=1.0), RewardClient)


class Talkative:
    """An environment whose answers are as long as the prompt says. may: set when it may answer "wait"."""

    by_group = False

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def start(self) -> None:
        pass

    async def score(self, examples: Sequence[Example]) -> list[RewardResult]:
        if examples[0].prompt == "wait":
            await self.may.wait()
            return [RewardResult(value=1.0)]
        return [RewardResult(value=0.0, text="x" * int(example.prompt)) for example in examples]

    async def close(self) -> None:
        pass


async def test_a_reply_that_is_too_large_fails_its_call_and_no_other(tmp_path: Path) -> None:
    rewards = Talkative()
    server = RewardServer(rewards, path=tmp_path / "socket")
    await server.start()
    client = RewardClient(tmp_path / "socket", start_timeout_s=20.0, silence_s=20.0)
    await client.start()
    other = asyncio.create_task(client.score([Example(prompt="wait", response="")]))
    results = await client.score([Example(prompt=str(MAX_FRAME // 8), response="")] * 8)
    assert [result.failure for result in results] == ["invalid"] * 8
    assert f"is larger than {MAX_FRAME} bytes" in results[0].detail
    rewards.may.set()
    assert [result.value for result in await other] == [1.0]
    await client.close()
    await server.close()
