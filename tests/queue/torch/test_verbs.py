"""AsyncFlow's verbs and the streaming loader on a queue that stands alone."""

import asyncio
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import asyncflow  # noqa: E402
from asyncflow.errors import DeadlineExceeded, PeerLost, Refused  # noqa: E402

ROOT = Path(__file__).parents[3]
OWN = ROOT / "examples" / "own"


def test_rows_go_from_prompts_to_experience_to_the_learner(served):
    with asyncflow.init_engines(served.address, partition="chat") as engines:
        assert engines.job is None
        engines.put_prompts_data(["one", "two", "three"], last=True)
        data, index = engines.get_experience_data("actor", ["prompts"], 2)
        assert data["prompts"] == ["one", "two"]
        assert engines.put_experience_data({"length": [3, 3]}, index) == [True, True]
        data, index = engines.get_experience_data("actor", ["prompts"], 2)
        assert engines.put_experience_data({"length": [5]}, index) == [True]
        assert engines.get_experience_data("actor", ["prompts"], 2) is None
        data, index = engines.get_experience_data("learner", ["prompts", "length"], 8)
        assert data["prompts"] == ["one", "two", "three"]
        assert data["length"].tolist() == [3, 3, 5]
        assert all(engines.put_experience_data({}, index))


def test_experience_may_be_put_by_whoever_made_it(served):
    with asyncflow.init_engines(served.address, partition="own") as engines:
        engines.put_experience_data(
            {"ids": [torch.tensor([1, 2]), torch.tensor([3])], "reward": torch.tensor([0.5, 1.0])}
        )
        data, _ = engines.get_experience_data("learner", ["ids", "reward"], 8)
        assert [ids.tolist() for ids in data["ids"]] == [[1, 2], [3]]
        assert data["reward"].tolist() == [0.5, 1.0]


def test_what_was_claimed_and_not_put_goes_to_another(served):
    with asyncflow.init_engines(served.address, partition="again") as first:
        first.put_prompts_data(["one"])
        assert first.get_experience_data("actor", ["prompts"], 1).data == {"prompts": ["one"]}
    with asyncflow.init_engines(served.address, partition="again") as second:
        assert second.get_experience_data("actor", ["prompts"], 1, timeout=30).data == {"prompts": ["one"]}


def test_rows_of_an_interrupted_call_go_to_the_next(served, monkeypatch):
    with asyncflow.init_engines(served.address, partition="interrupted") as engines:
        engines.put_prompts_data(["one"])

        async def interrupted(*_, **__):
            raise asyncio.CancelledError

        with monkeypatch.context() as patch:
            patch.setattr(engines._consumer().client, "fetch", interrupted)
            with pytest.raises(PeerLost):
                engines.get_experience_data("actor", ["prompts"], 1)
        assert engines.get_experience_data("actor", ["prompts"], 1, timeout=5).data == {"prompts": ["one"]}


def test_a_forked_process_has_a_client_of_its_own(served):
    with asyncflow.init_engines(served.address, partition="forked") as engines:
        engines.put_prompts_data(["one"])
        child = os.fork()
        if not child:
            status = 1
            try:
                engines.put_prompts_data(["two"])
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert engines.get_experience_data("actor", ["prompts"], 2).data == {"prompts": ["one", "two"]}


def test_a_wait_ends_at_its_deadline_and_says_for_whom(served):
    with asyncflow.init_engines(served.address, partition="late") as engines:
        engines.put_prompts_data(["one"])
        with pytest.raises(DeadlineExceeded, match="learner within 0"):
            engines.get_experience_data("learner", ["reward"], 1, timeout=0.2)


@pytest.mark.parametrize("used", [False, True])
def test_a_session_that_was_closed_says_so_whether_it_was_used_or_not(served, used):
    engines = asyncflow.init_engines(served.address, partition="closed")
    if used:
        engines.put_prompts_data(["one"])
    for _ in range(2):
        engines.close()
        with pytest.raises(Refused, match=r"session was closed.*Call init_engines again"):
            engines.put_prompts_data(["two"])


def test_what_a_queue_alone_cannot_do_is_refused(served):
    with asyncflow.init_engines(served.address) as engines:
        with pytest.raises(Refused, match="no rollouts"):
            engines.weight_sync_notify({"w": torch.zeros(1)})
        with pytest.raises(Refused, match="experience_columns"):
            engines.get_experience_data("actor")
        with pytest.raises(Refused, match="at least 1"):
            engines.create_stream_data_loader("actor", ["prompts"], 0)


def test_the_loader_pads_to_a_multiple_and_gives_the_lengths(served):
    with asyncflow.init_engines(served.address, partition="padded") as engines:
        engines.put_prompts_data({"ids": [torch.arange(1, 4), torch.arange(1, 2)]}, last=True)
        loader = engines.create_stream_data_loader("actor", ["ids"], 2, pad_to_multiple_of=4)
        ((data, index),) = loader
        assert data["ids"].tolist() == [[1, 2, 3, 0], [1, 0, 0, 0]]
        assert data["ids_length"].tolist() == [3, 1]
        assert loader.put({"answer": [1, 2]}, index) == [True, True]


def test_the_loader_gives_lists_to_an_engine_that_takes_lists(served):
    with asyncflow.init_engines(served.address, partition="lists") as engines:
        engines.put_prompts_data({"ids": [torch.arange(3), torch.arange(2)]}, last=True)
        with asyncflow.create_stream_data_loader(
            engines.queue, "actor", ["ids"], 2, use_vllm=True, partition="lists"
        ) as loader:
            ((data, index),) = loader
            assert data == {"ids": [[0, 1, 2], [0, 1]]}
            assert all(engines.put_experience_data({"answer": [1, 2]}, index))


def test_the_actor_of_the_page_runs_as_it_stands_there(served):
    page = (ROOT / "docs" / "guide" / "python.md").read_text()
    (code,) = (block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if '"actor"' in block)
    with asyncflow.init_engines(served.address) as engines:
        engines.put_prompts_data({"state": torch.arange(40)}, last=True)
        exec(
            code.replace("tcp://127.0.0.1:5571", served.address), {"asyncflow": asyncflow, "act": lambda state: -state}
        )
        data, _ = engines.get_experience_data("learner", ["state", "action"], 64)
    assert sorted(data["action"].tolist()) == list(range(-39, 1))


@pytest.mark.process
def test_an_actor_and_a_learner_of_somebody_else(served):
    script = OWN / "actor_learner.py"
    with subprocess.Popen([sys.executable, str(script), "actor", served.address]) as actor:
        right = runpy.run_path(str(script))["learn"](served.address)
        assert actor.wait(60) == 0
    assert right > 0.8
