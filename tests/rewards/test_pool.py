"""The pool against real processes: a stuck, dying or lying reward function delays and harms only its own sample."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from scoring_one import one

from asyncflow.errors import ManifestError
from asyncflow.rewards.pool import PoolLimits, RewardPool
from asyncflow.rewards.process import Scorer
from asyncflow.rewards.wire import FAILURES, Example

FUNCTION = """
    import numbers, os, sys, time

    class Odd(float):
        def __float__(self):
            raise LookupError("no float")

    @numbers.Real.register
    class Named:
        pass

    def score(*, response, prompt, answer, meta):
        print("anything", flush=True)
        match response:
            case "stuck":
                while True:
                    pass
            case "exit":
                os._exit(3)
            case "raise":
                raise KeyError("no such thing")
            case "text":
                return "1.0"
            case "nan":
                return float("nan")
            case "huge":
                return 10**400
            case "pid":
                return os.getpid()
            case "stdin":
                return float(len(sys.stdin.read()))
            case "imports":
                return float("torch" in sys.modules or "asyncio" in sys.modules)
            case "none":
                return None
            case "dict":
                return {"score": 1.0}
            case "coroutine":
                async def later():
                    return 1.0
                return later()
            case "odd float":
                return Odd()
            case "named a number":
                return Named()
            case "no text":
                raise ValueError("\\ud800")
            case "leave":
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        time.sleep(30)
                    os._exit(0)
                while True:
                    time.sleep(60)
            case "leave and end":
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(30)
                    os._exit(0)
                os._exit(0)
            case "fork":
                child = os.fork()
                while True:
                    time.sleep(60)
        return 1.0 if response == answer else 0.25

    broken = 3

    def positional(completions, response, prompt, answer, meta):
        return 1.0
"""


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "myreward.py").write_text(textwrap.dedent(FUNCTION))
    (tmp_path / "unreadable.py").write_text("raise ValueError('\\ud800')")
    return tmp_path


@pytest.fixture
async def pool(workdir: Path):
    pool = RewardPool(Scorer(function="myreward:score", workdir=workdir), PoolLimits(timeout_s=20.0))
    await pool.start()
    yield pool
    await pool.close()
    assert pool.workers == 0


def example(response: str, answer: object = None) -> Example:
    return Example(prompt="p", response=response, answer=answer)


async def test_a_user_function_scores_and_may_print_and_sees_no_input(pool: RewardPool) -> None:
    assert (await one(pool, example(" 42 ", "42"))).value == 1.0
    assert (await one(pool, example("41", "42"))).value == 0.25
    assert (await one(pool, example("stdin"))).value == 0.0
    assert (await one(pool, example("imports"))).value == 0.0
    assert pool.scored == 4
    assert pool.failed == dict.fromkeys(FAILURES, 0)


@pytest.mark.parametrize(
    ("response", "failure", "detail"),
    [
        ("raise", "raised", "KeyError: 'no such thing'"),
        ("text", "invalid", "returned a str"),
        ("none", "invalid", "returned a NoneType"),
        ("dict", "invalid", "returned a dict"),
        ("coroutine", "invalid", "returned a coroutine"),
        ("odd float", "raised", "LookupError: no float"),
        ("named a number", "raised", "Named"),
        ("no text", "raised", "ValueError: ?"),
        ("nan", "invalid", "returned nan"),
        ("huge", "invalid", "returned inf"),
    ],
)
async def test_what_is_no_reward_is_a_failure_of_its_own(
    pool: RewardPool, response: str, failure: str, detail: str
) -> None:
    before = (await one(pool, example("pid"))).value
    result = await one(pool, example(response))
    assert (result.value, result.failure) == (0.0, failure)
    assert detail in result.detail
    assert pool.failed[failure] == 1
    assert (await one(pool, example("pid"))).value == before


async def test_an_example_that_cannot_be_sent_is_flagged(pool: RewardPool) -> None:
    result = await one(pool, Example(prompt="p", response="r", answer=object()))
    assert (result.failure, result.value) == ("raised", 0.0)
    assert (await one(pool, example("x", "x"))).value == 1.0


async def test_a_process_that_dies_is_replaced(pool: RewardPool) -> None:
    result = await one(pool, example("exit"))
    assert (result.value, result.failure) == (0.0, "died")
    assert "exit status 3" in result.detail
    assert pool.failed["died"] == 1
    assert (await one(pool, example("x", "x"))).value == 1.0


async def test_a_process_killed_while_idle_harms_nobody(pool: RewardPool) -> None:
    pid = int((await one(pool, example("pid"))).value)
    os.kill(pid, signal.SIGKILL)
    assert (await one(pool, example("x", "x"))).value == 1.0


async def test_a_stuck_sample_delays_only_itself(workdir: Path) -> None:
    pool = RewardPool(Scorer(function="myreward:score", workdir=workdir), PoolLimits(timeout_s=15.0, max_workers=3))
    await pool.start()
    stuck = [asyncio.create_task(one(pool, example("stuck"))) for _ in range(2)]
    await asyncio.sleep(0)
    rest = await asyncio.gather(*(one(pool, example("x", "x")) for _ in range(20)))
    assert [result.value for result in rest] == [1.0] * 20
    assert not any(task.done() for task in stuck)
    assert pool.workers == 3
    await pool.close()
    assert [(await task).failure for task in stuck] == ["died", "died"]


async def test_a_stuck_sample_is_killed_at_its_deadline_with_all_that_it_started(workdir: Path) -> None:
    pool = RewardPool(Scorer(function="myreward:score", workdir=workdir, processes=4), PoolLimits(timeout_s=1.0))
    await pool.start()
    pid = int((await one(pool, example("pid"))).value)
    result = await one(pool, example("fork"))
    assert (result.value, result.failure) == (0.0, "timeout")
    assert result.detail == "a call took longer than reward.timeoutSeconds, 1 s"
    left = [process for process in psutil.process_iter() if _in_group(process, pid)]
    assert (await one(pool, example("x", "x"))).value == 1.0
    await pool.close()
    assert left == [], "no zombie either"


@pytest.mark.parametrize("response", ["leave", "leave and end"])
async def test_who_leaves_the_group_does_not_outstay_the_deadline(workdir: Path, response: str) -> None:
    pool = RewardPool(Scorer(function="myreward:score", workdir=workdir, processes=4), PoolLimits(timeout_s=1.0))
    await pool.start()
    before = {process.pid for process in psutil.process_iter()}
    async with asyncio.timeout(15):
        result = await one(pool, example(response))
    assert result.failure in ("timeout", "died")
    async with asyncio.timeout(15):
        assert (await one(pool, example("x", "x"))).value == 1.0
        await pool.close()
    left = [process for process in psutil.process_iter(["cwd", "status"]) if process.pid not in before]
    left = [p for p in left if p.info["cwd"] == str(workdir) and p.info["status"] != psutil.STATUS_ZOMBIE]
    assert left == [], "it is found, in whatever session it is"


def _in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except ProcessLookupError:
        return False


async def test_a_cancelled_score_leaves_no_late_answer(pool: RewardPool) -> None:
    task = asyncio.create_task(one(pool, example("stuck")))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await one(pool, example("x", "x"))).value == 1.0


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("myreward:absent", "no function 'absent'"),
        ("myreward:broken", "no function 'broken'"),
        ("myreward:positional", "has the parameter 'completions', which is none of"),
        ("absent_module:score", "No module named"),
        ("unreadable:score", r"ValueError: \?"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_refused_at_the_start(workdir: Path, function: str, why: str) -> None:
    pool = RewardPool(Scorer(function=function, workdir=workdir))
    with pytest.raises(ManifestError, match=rf"reward\.function: .*{why}"):
        await pool.start()
    await pool.close()


async def test_a_process_that_cannot_be_started_again_fails_only_its_sample(workdir: Path) -> None:
    pool = RewardPool(Scorer(function="myreward:score", workdir=workdir), PoolLimits(max_workers=1))
    await pool.start()
    away = await asyncio.to_thread(workdir.rename, workdir.with_name("elsewhere"))
    score = await asyncio.wait_for(one(pool, example("exit")), 30)
    assert score.failure == "died"
    assert "cannot be started" in score.detail
    await asyncio.to_thread(away.rename, workdir)
    score = await asyncio.wait_for(one(pool, example("x", "x")), 30)
    await pool.close()
    assert (score.value, score.detail) == (1.0, "")


@pytest.mark.parametrize("response", ["idle", "stuck"])
def test_reward_processes_die_with_a_killed_parent(workdir: Path, response: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), response]
    parent = subprocess.Popen(command, cwd=workdir, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the reward process outlives its parent"
        time.sleep(0.02)


PARENT = """
    import asyncio, pathlib, sys
    from asyncflow.rewards.pool import PoolLimits, RewardPool
    from asyncflow.rewards.process import Scorer
    from asyncflow.rewards.wire import Example

    async def main():
        pool = RewardPool(Scorer(function="myreward:score", workdir=pathlib.Path.cwd()), PoolLimits(timeout_s=60))
        await pool.start()
        [pid] = await pool.score([Example(prompt="", response="pid")])
        stuck = asyncio.create_task(pool.score([Example(prompt="", response=sys.argv[1])]))
        await asyncio.sleep(0.2)
        print(int(pid.value), flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
"""
