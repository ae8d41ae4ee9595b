"""Tests of vLLM's worker beside the engine: prompts that it counts as read, and swaps, with a runner in its place."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asyncflow import clock
from asyncflow.rollout.engines.vllm.worker import Prefills, WorkerExtension

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Runner:
    """Computes a step of any size in one second of ``now``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.given: list[tuple[object, ...]] = []
        monkeypatch.setattr(clock, "now", lambda: self.now)

    def execute_model(self, scheduled: object, *more: object) -> str:
        self.given.append((scheduled, *more))
        self.now += 1.0
        return f"step {len(self.given)}"


def step(*, new: int = 0, drafts: dict[str, list[int]] | None = None, **counts: int) -> SimpleNamespace:
    """A step as vLLM's scheduler tells of it: how many tokens of which request are computed."""
    return SimpleNamespace(
        scheduled_new_reqs=[object()] * new,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
    )


@pytest.mark.parametrize(
    ("scheduled", "reads"),
    [
        (step(new=1, a=7), True),
        (step(new=1, a=1, b=1), True),  # all but the last token of the prompt is in the prefix cache
        (step(a=1, b=40), True),  # a part of a long prompt, or a sequence that is read again after a swap
        (step(a=1, b=1), False),
        (step(a=4, b=1, drafts={"a": [1, 2, 3]}), False),  # drafts are verified
        (step(a=4, b=9, drafts={"a": [1, 2, 3]}), True),
        (step(), False),
    ],
)
def test_a_step_reads_where_it_computes_more_than_the_next_token(monkeypatch, scheduled, reads) -> None:
    runner = Runner(monkeypatch)
    prefills = Prefills(runner, CPU)
    last = step(new=1, z=2)
    assert [runner.execute_model(each, "tensors") for each in (scheduled, last)] == ["step 1", "step 2"]
    assert runner.given == [(scheduled, "tensors"), (last, "tensors")]
    whole = [(0.0, 2.0)] if reads else [(1.0, 2.0)]
    assert prefills.take() == whole
    assert prefills.take() == []


def test_steps_are_one_time_only_where_none_that_only_makes_tokens_and_no_pause_is_between_them(monkeypatch) -> None:
    runner = Runner(monkeypatch)
    prefills = Prefills(runner, CPU)
    for scheduled in (step(new=1, a=9), step(a=5), step(a=1), step(a=1, b=6)):
        runner.execute_model(scheduled)
    runner.now = 10.0
    runner.execute_model(step(new=1, c=3))
    assert prefills.take() == [(0.0, 2.0), (3.0, 4.0), (10.0, 11.0)]


def test_what_nobody_asks_for_is_not_kept_for_ever(monkeypatch) -> None:
    runner = Runner(monkeypatch)
    prefills = Prefills(runner, CPU)
    for _ in range(5000):
        runner.execute_model(step(new=1, a=2))
        runner.execute_model(step(a=1))
    found = prefills.take()
    assert len(found) < 5000
    assert found[-1] == (9998.0, 9999.0)


def test_a_device_says_itself_when_it_begins_and_ends_to_read(monkeypatch) -> None:
    reached = [threading.Event(), threading.Event()]
    events = iter(reached)
    recorded: list[threading.Event] = []

    class Event:
        def __init__(self, device: torch.device, *, blocking: bool) -> None:
            assert (device, blocking) == (CUDA, True)
            self._reached = next(events)

        def record(self) -> None:
            recorded.append(self._reached)

        def synchronize(self) -> None:
            assert self._reached.wait(10)

    monkeypatch.setattr(torch, "Event", Event)
    runner = Runner(monkeypatch)
    monkeypatch.setattr(clock, "now", iter((5.0, 8.0)).__next__)
    prefills = Prefills(runner, CUDA)
    assert runner.execute_model(step(new=1, a=9)) == "step 1"
    assert recorded == reached
    reached[0].set()
    assert prefills.take() == [], "the device computes it, and has not ended"
    reached[1].set()
    found, deadline = prefills.take(), time.monotonic() + 10
    while not found and time.monotonic() < deadline:
        found = prefills.take()
    assert found == [(5.0, 8.0)]


def test_a_swap_gives_memory_back_by_the_devices_own_module(monkeypatch) -> None:
    """``torch.accelerator`` raises that for an NPU of torch_npu 2.10."""
    done: list[object] = []

    def refuse() -> None:
        raise RuntimeError("Allocator for npu is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "empty_cache", refuse)
    monkeypatch.setattr(torch.accelerator, "synchronize", done.append)
    module = SimpleNamespace(empty_cache=lambda: done.append("emptied"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    worker = WorkerExtension()
    worker.device = CUDA
    worker.model_runner = SimpleNamespace(
        model=nn.Module(),
        requests={"a": SimpleNamespace(output_token_ids=[7, 7])},
        reload_weights=lambda weights_iterator: done.append(list(weights_iterator)),
    )
    weight = torch.zeros(1)
    worker._asyncflow_staging = SimpleNamespace(tensors={"w": weight})  # type: ignore[assignment]
    assert worker.asyncflow_swap() == {"tokens": {"a": 2}}
    assert done == [[("w", weight)], CUDA, "emptied"]
