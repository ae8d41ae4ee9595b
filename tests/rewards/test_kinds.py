"""Functions over batches and groups and async ones in real processes: each sample has the outcome that is its own."""

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from asyncflow.rewards.pool import PoolLimits, RewardPool
from asyncflow.rewards.process import Scorer
from asyncflow.rewards.wire import Example, Score

FUNCTIONS = """
    import asyncio, os, time

    time.sleep(60.0 if os.path.exists("slow") else 0.0)

    def stumble(response):
        if response == "raise":
            raise KeyError(response)
        if response == "hang":
            time.sleep(60)
        if response == "exit":
            os._exit(3)
        return None if response == "none" else float(len(response))

    def batch(*, responses, prompts):
        values = list(map(stumble, responses))
        return [value if value is None else {"reward": value, "details": {"batch": len(values)}} for value in values]

    def short(*, responses, prompts):
        return list(map(stumble, responses))[1:] if len(responses) > 1 else [1.0]

    def group(*, responses, prompt, lengths):
        values = list(map(stumble, responses))
        return [value if value is None else value / max(filter(None, values)) for value in values]

    inside = 0

    async def later(*, response):
        global inside
        inside += 1
        most = inside
        try:
            for _ in range(100 if response == "long" else 10):
                await asyncio.sleep(0.01)
                most = max(most, inside)
            if response == "never":
                await asyncio.sleep(60)
            if response == "cancel":
                raise asyncio.CancelledError
            value = stumble(response)
            return value if value is None else {"reward": value, "details": {"most": most}}
        finally:
            inside -= 1
"""


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTIONS))
    return tmp_path


@asynccontextmanager
async def pool_of(workdir: Path, function: str, **limits: float) -> AsyncIterator[RewardPool]:
    pool = RewardPool(Scorer(function=f"mine:{function}", workdir=workdir), PoolLimits(max_workers=2, **limits))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
        assert pool.workers == 0


def examples(*responses: str) -> list[Example]:
    return [Example(prompt="p", response=response, length=len(response)) for response in responses]


def outcomes(scores: Sequence[Score]) -> list[float | str]:
    return [score.failure or score.value for score in scores]


async def test_samples_that_come_together_are_scored_in_one_call(workdir: Path) -> None:
    async with pool_of(workdir, "batch", batch=4) as pool:
        scores = await pool.score(examples(*"abcdef"))
        assert outcomes(scores) == [1.0] * 6
        assert [score.details for score in scores] == [b'{"batch":4}'] * 4 + [b'{"batch":2}'] * 2


@pytest.mark.parametrize(
    ("bad", "failure"), [("raise", "raised"), ("hang", "timeout"), ("exit", "died"), ("none", "invalid")]
)
async def test_one_bad_sample_of_a_batch_fails_alone(workdir: Path, bad: str, failure: str) -> None:
    async with pool_of(workdir, "batch", timeout_s=2.0) as pool:
        assert outcomes(await pool.score(examples("a", bad, "ccc", "dd"))) == [1.0, failure, 3.0, 2.0]
        assert (pool.scored, pool.failed[failure]) == (3, 1)


async def test_a_batch_with_too_few_values_is_scored_one_by_one(workdir: Path) -> None:
    async with pool_of(workdir, "short") as pool:
        assert outcomes(await pool.score(examples("a", "b", "c"))) == [1.0] * 3


async def test_a_group_is_seen_whole_and_fails_as_one(workdir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with pool_of(workdir, "group", timeout_s=20.0) as pool:
        assert pool.takes == "group"
        both = await asyncio.gather(pool.score(examples("a", "bb", "none")), pool.score(examples("aaaa", "bb")))
        assert [outcomes(scores) for scores in both] == [[0.5, 1.0, "invalid"], [1.0, 0.5]]
        assert outcomes(await pool.score(examples("a", "raise"))) == ["raised"] * 2
        assert ["(raised)" in record.message for record in caplog.records].count(True) == 1, "each failure is told once"
        assert outcomes(await pool.score(examples("a", "exit"))) == ["died"] * 2


async def test_async_calls_run_side_by_side_each_with_its_own_deadline(workdir: Path) -> None:
    async with pool_of(workdir, "later", timeout_s=5.0) as pool:
        responses = ("long", *["never"] * 3, *"abcdefgh", "raise", "none", "cancel")
        scores = await pool.score(examples(*responses))
        assert outcomes(scores) == [4.0, *["timeout"] * 3, *[1.0] * 8, "raised", "invalid", "raised"]
        assert pool.workers == 1
        assert json.loads(scores[0].details)["most"] > 4, "not only those that end late"
        assert scores[1].detail == "a call took longer than reward.timeoutSeconds, 5 s"


@pytest.mark.parametrize(("bad", "failure"), [("hang", "timeout"), ("exit", "died")])
async def test_an_async_call_that_blocks_or_ends_its_process_takes_no_other_with_it(
    workdir: Path, bad: str, failure: str
) -> None:
    async with pool_of(workdir, "later", timeout_s=8.0) as pool:
        assert outcomes(await pool.score(examples("a", bad, "long", "cc"))) == [1.0, failure, 4.0, 2.0]
        assert outcomes(await pool.score(examples("a"))) == [1.0]


async def test_a_cancelled_async_call_leaves_the_others_alone(workdir: Path) -> None:
    async with pool_of(workdir, "later") as pool:
        given_up, kept = (asyncio.create_task(pool.score(examples(each))) for each in ("never", "long"))
        await asyncio.sleep(0.3)
        given_up.cancel()
        assert outcomes(await kept) == [4.0]
        assert outcomes(await pool.score(examples("a"))) == [1.0]


async def test_samples_that_wait_when_the_pool_closes_have_failed(workdir: Path) -> None:
    async with pool_of(workdir, "batch", timeout_s=30.0, batch=1) as pool:
        waiting = asyncio.create_task(pool.score(examples("hang", "hang", "hang", "a")))
        await asyncio.sleep(0.1)
        await pool.close()
        assert outcomes(await waiting) == ["died"] * 4


async def test_samples_whose_process_is_being_started_when_the_pool_closes_have_failed(workdir: Path) -> None:
    others = set(psutil.Process().children())
    async with pool_of(workdir, "later") as pool:
        (workdir / "slow").touch()
        first = set(psutil.Process().children())
        waiting = asyncio.create_task(pool.score(examples("exit", "long")))
        while len(set(psutil.Process().children()) - first) < 2:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await pool.close()
            assert outcomes(await waiting) == ["died"] * 2
        assert set(psutil.Process().children()) <= others
