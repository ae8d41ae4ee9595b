"""Engines and trainers that fit, and the arithmetic with which others are refused."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_problems import problem_of

from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.planner.costs import EngineLayout, TrainerLayout
from asyncflow.planner.layouts import engine, engines, layouts, refusal_of_engine, refusal_of_trainer, trainers
from asyncflow.planner.search import splits

ONE = EngineLayout(tp=1)


def test_a_replica_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    problem = problem_of(model="Qwen2.5-32B", device="910b")
    assert engine(problem.shape, problem.device, problem.work, ONE) is None
    assert refusal_of_engine(problem.shape, problem.device, problem.work, ONE) == (
        "Qwen2.5-32B in bf16 needs 65.5 GB a replica, a device has 64 GB: use tensor parallel 2"
    )
    assert [each.layout.tp for each in engines(problem.shape, problem.device, problem.work, most=8)] == [2, 4, 8]


def test_a_replica_without_room_for_the_longest_sample_is_refused() -> None:
    problem = problem_of("sampling.maxTokens=65536", model="Qwen3-8B", device="910b")
    long = msgspec.structs.replace(problem.work, longest=400_000)
    assert refusal_of_engine(problem.shape, problem.device, long, ONE) == (
        "Qwen3-8B in bf16 needs 16.4 GB a replica, and the cache of a sample of 400,000 tokens 59 GB, a device has "
        "64 GB, of which 57.6 GB are for tensors: use tensor parallel 2"
    )


def test_heads_are_divided_evenly() -> None:
    problem = problem_of(model="SmolLM2-135M")  # 9 heads
    assert [each.layout.tp for each in engines(problem.shape, problem.device, problem.work, most=8)] == [1]
    assert refusal_of_engine(problem.shape, problem.device, problem.work, EngineLayout(tp=2)) == (
        "9 attention heads of SmolLM2-135M cannot be divided over 2 devices: use tensor parallel 1"
    )


def test_a_model_that_no_node_holds_is_refused() -> None:
    problem = problem_of(model="DeepSeek-R1", device="910b", devices=64)
    with pytest.raises(ManifestError, match="needs 1,342 GB a replica, 8 devices have 512 GB"):
        next(splits(problem))


def test_a_trainer_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    problem = problem_of("trainer.backend.tokensPerMicroBatch=4096", model="Qwen2.5-32B", device="h100", devices=8)
    assert trainers(problem.shape, problem.device, problem.work, devices=4) == []
    why = refusal_of_trainer(problem.shape, problem.device, problem.work, devices=4)
    assert why.startswith("training Qwen2.5-32B on 4 devices (DP4) needs 139 GB on each (133 GB of weights, gradients")
    assert why.endswith("a device has 80 GB, of which 72 GB are for tensors: give the trainer 16 devices")
    with pytest.raises(ManifestError, match=r"at least 1 of 5 devices must generate, and training Qwen2\.5-32B on 4"):
        next(splits(replace(problem, devices=5)))
    with pytest.raises(ManifestError, match=r"training Qwen2\.5-32B on 2 devices \(DP1 TP2\) needs"):
        problem.split(instance=EngineLayout(tp=2), instances=1, layout=TrainerLayout(dp=1, tp=2))


def test_slots_are_what_memory_holds() -> None:
    problem = problem_of("rollout.engine.slots=4096", model="Qwen3-8B", device="910b")
    found = engine(problem.shape, problem.device, problem.work, ONE)
    assert found is not None
    assert found.slots == found.fitting < 4096
    assert found.bytes <= problem.device.memory * problem.device.usable
    narrow = msgspec.structs.replace(problem.work, slots=8)
    fewer = engine(problem.shape, problem.device, narrow, ONE)
    assert fewer is not None
    assert (fewer.slots, fewer.fitting) == (8, found.fitting)
    assert fewer.rate == pytest.approx(8 / fewer.full.seconds)
    assert fewer.recompute_s < fewer.token_s, "what is there already is read at once"


@given(devices=st.integers(1, 64), megatron=st.booleans())
def test_layouts_use_all_devices_and_stay_inside_a_node(devices: int, megatron: bool) -> None:
    problem = problem_of()
    work = msgspec.structs.replace(problem.work, megatron=megatron)
    for layout in layouts(problem.shape, problem.device, work, devices=devices):
        assert layout.devices == devices
        assert layout.tp <= problem.device.node
        assert layout.tp in PROFILES["nvidia"].legal_counts
        assert megatron or layout.tp == layout.pp == 1


@given(devices=st.integers(2, 32))
def test_splits_fit_into_the_devices(devices: int) -> None:
    problem = problem_of(device="a100", devices=devices)
    for split in splits(problem):
        assert split.devices <= devices
        assert devices - split.devices < split.engine.layout.devices or split.instances == problem.work.samples
        assert split.trainer.memory.bytes <= problem.device.memory * problem.device.usable
