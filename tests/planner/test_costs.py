"""Costs in closed form, compared with what was measured and published, and their behaviour as sizes change."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_problems import job_of

from asyncflow.planner.costs import (
    EngineLayout,
    TrainerLayout,
    all_reduce_s,
    decoding,
    pull_s,
    swap_s,
    training,
    training_memory,
)
from asyncflow.planner.devices import DEVICES
from asyncflow.planner.shapes import PUBLISHED_CONFIGS, shape_of
from asyncflow.planner.work import work_of

ONE = EngineLayout(tp=1)
H100 = DEVICES["h100"]
SMALL = shape_of(PUBLISHED_CONFIGS["Qwen3-0.6B"], name="Qwen3-0.6B")
LARGE = shape_of(PUBLISHED_CONFIGS["Qwen2.5-32B"], name="Qwen2.5-32B")
WORK = work_of(job_of().spec)
MEGATRON = msgspec.structs.replace(WORK, megatron=True)


@pytest.mark.parametrize(("running", "tokens", "measured"), [(1, 128, 390), (64, 256, 13_400), (512, 512, 24_100)])
def test_decoding_is_as_fast_as_vllm_was_on_an_h100(running: int, tokens: int, measured: float) -> None:
    step = decoding(SMALL, H100, ONE, running=running, context=64 + tokens / 2, dtype="bfloat16")
    assert running / step.seconds == pytest.approx(measured, rel=0.15)


def test_a_swap_is_as_fast_as_it_was_on_an_h100() -> None:
    assert swap_s(SMALL, H100, WORK, ONE) == pytest.approx(0.023, rel=0.1)


def test_training_is_as_fast_as_it_was_on_an_h100() -> None:
    documents = msgspec.structs.replace(WORK, prompt=256.0, pack=16_384)
    cost = training(SMALL, H100, documents, TrainerLayout(dp=1))
    assert documents.trained / cost.compute_s == pytest.approx(56_507, rel=0.25)  # compiled, docs/internals/gpu.md


@given(devices=st.integers(2, 64), size=st.floats(1e3, 1e9))
def test_an_all_reduce_takes_at_least_its_bytes(devices: int, size: float) -> None:
    took = all_reduce_s(size, devices=devices, device=H100)
    assert took >= size / H100.between(devices)
    assert took <= all_reduce_s(2 * size, devices=devices, device=H100)
    assert all_reduce_s(size, devices=1, device=H100) == 0


@given(running=st.integers(1, 512), tp=st.sampled_from((1, 2, 4)))
def test_more_sequences_take_longer_each_and_less_together(running: int, tp: int) -> None:
    one, two = (
        decoding(LARGE, H100, EngineLayout(tp=tp), running=count, context=1000, dtype="bfloat16").seconds
        for count in (running, 2 * running)
    )
    assert one < two < 2 * one


@given(dp=st.integers(1, 64), tp=st.sampled_from((1, 2, 4, 8)), pp=st.sampled_from((1, 2, 4)))
def test_more_replicas_need_no_more_memory_and_compute_in_proportion(dp: int, tp: int, pp: int) -> None:
    for work in (WORK, MEGATRON):
        one, two = (TrainerLayout(dp=each, tp=tp, pp=pp) for each in (dp + 1, 2 * (dp + 1)))
        assert training_memory(LARGE, work, two).states <= training_memory(LARGE, work, one).states
        computed = training(LARGE, H100, work, one).compute_s
        assert training(LARGE, H100, work, two).compute_s == pytest.approx(computed / 2)


def test_layers_that_are_computed_again_need_less_memory_and_a_third_more_time() -> None:
    kept, again = TrainerLayout(dp=8), TrainerLayout(dp=8, recompute=True)
    assert training_memory(LARGE, WORK, again).activations < training_memory(LARGE, WORK, kept).activations / 5
    costs = training(LARGE, H100, WORK, kept), training(LARGE, H100, WORK, again)
    assert costs[1].compute_s == pytest.approx(costs[0].compute_s * 4 / 3)


def test_states_of_a_parameter() -> None:
    alone = training_memory(SMALL, WORK, TrainerLayout(dp=1)).states
    assert alone == 16 * SMALL.parameters  # float32: weights 4, gradients 4, moments 8
    megatron = training_memory(SMALL, MEGATRON, TrainerLayout(dp=1)).states
    assert megatron == 18 * SMALL.parameters  # and a copy of the weights in bf16
    four = training_memory(SMALL, WORK, TrainerLayout(dp=4)).states
    assert four == pytest.approx(4 * SMALL.parameters + 2 * 2 * SMALL.parameters / 28)  # a layer and the next, in bf16
    reference = msgspec.structs.replace(WORK, reference=True)
    assert training_memory(SMALL, reference, TrainerLayout(dp=4)).frozen == SMALL.parameters  # float32, a fourth of it


def test_adapters_are_all_that_is_trained_and_published_beside_a_frozen_model() -> None:
    lora = work_of(job_of("trainer.lora={rank: 8}", "algorithm.kl.coefficient=0.1").spec)
    layout, adapters = TrainerLayout(dp=1), SMALL.adapters(8)
    q, kv, gated = 1024 + 2048, 1024 + 1024, 1024 + 3072
    assert adapters == 28 * 8 * (2 * q + 2 * kv + 3 * gated)
    memory = training_memory(SMALL, lora, layout)
    assert (memory.states, memory.frozen) == (4 * SMALL.parameters + 16 * adapters, 0)
    assert pull_s(SMALL, H100, lora, ONE) == pytest.approx(4 * adapters / (H100.network * H100.wire))
    assert swap_s(SMALL, H100, lora, ONE) == swap_s(SMALL, H100, WORK, ONE)
    whole = msgspec.structs.replace(lora, lora=0)
    saved = training(SMALL, H100, whole, layout).compute_s / training(SMALL, H100, lora, layout).compute_s
    assert saved == pytest.approx(4 / 3), "no gradients of the model's weights, but the reference's pass"


def test_an_update_reads_and_writes_all_states_once() -> None:
    found = training(SMALL, H100, WORK, TrainerLayout(dp=1)).optimizer_s
    assert found == pytest.approx(2 * 16 * SMALL.parameters / (H100.bandwidth * H100.read))


def test_resharding_from_8_to_4_devices_changes_weights_by_8_gb() -> None:
    """MindSpeed RL: Qwen2.5-32B from TP8 to TP4, 64 GB / 4 - 64 GB / 8."""
    eight, four = (LARGE.parameters * 2 / tp for tp in (8, 4))
    assert four - eight == pytest.approx(8e9, rel=0.03)


def test_a_pipeline_waits_less_the_more_micro_batches_there_are() -> None:
    few = msgspec.structs.replace(MEGATRON, pack=8192)
    many = msgspec.structs.replace(MEGATRON, pack=1024)
    layout = TrainerLayout(dp=1, pp=4)
    assert training(LARGE, H100, many, layout).bubble_s < training(LARGE, H100, few, layout).bubble_s


def test_a_pull_is_shared_by_the_devices_of_an_instance() -> None:
    assert pull_s(LARGE, H100, WORK, EngineLayout(tp=8)) == pytest.approx(pull_s(LARGE, H100, WORK, ONE) / 8)
