"""Mixtures of experts: what a device holds and sends when experts are divided, and how a manifest says so."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_problems import job_of, problem_of

from asyncflow.api.job import RLJobSpec
from asyncflow.api.load import load_job
from asyncflow.errors import ManifestError
from asyncflow.planner.costs import (
    EngineLayout,
    TrainerLayout,
    all_to_all_s,
    decoding,
    prefill_s,
    pull_s,
    swap_s,
    training,
    training_memory,
)
from asyncflow.planner.devices import DEVICES
from asyncflow.planner.layouts import engine, engine_layouts, engines, layouts
from asyncflow.planner.report import settings, unmet
from asyncflow.planner.search import Predicted, SplitProblem, choice, search, split_of, splits
from asyncflow.planner.shapes import PUBLISHED_CONFIGS, shape_of
from asyncflow.planner.simulated import simulator_of
from asyncflow.planner.work import work_of

SETUPS = Path(__file__).parents[2] / "docs" / "guide" / "setups"
WIDE = "rollout.engine.options.args.enable_expert_parallel=true"
MEGATRON = "trainer.backend.name=mindspeed"
NPU = msgspec.structs.replace(DEVICES["910b"], memory=128e9)
R1 = shape_of(PUBLISHED_CONFIGS["DeepSeek-R1"], name="DeepSeek-R1")
QWEN = shape_of(PUBLISHED_CONFIGS["Qwen3-30B-A3B"], name="Qwen3-30B-A3B")
WORK = work_of(job_of(WIDE, MEGATRON, "algorithm.kl.coefficient=0").spec)

ROUTED = 58 * 256 * 3 * 7168 * 2048
"""Parameters of the experts of DeepSeek-R1 that a router chooses from: 653.9 B."""
AT_ONCE = Predicted(step_s=1.0, generation_idle=0.0, training_idle=0.0)
POWERS = st.integers(0, 3).map(lambda power: 1 << power)


def published(*overrides: str) -> tuple[SplitProblem, RLJobSpec]:
    """Return the problem of the paper's 384 NPUs with DeepSeek-R1, and the manifest's spec."""
    said = "rollout.engine.options.args={enable_expert_parallel: true, tensor_parallel_size: 2, data_parallel_size: 32}"
    spec = load_job(SETUPS / "mindspeed-rl-671b.yaml", (said, *overrides)).spec
    return SplitProblem(shape=R1, device=NPU, work=work_of(spec), devices=384), spec


def test_shared_experts_are_common() -> None:
    assert ROUTED == R1.routed == pytest.approx(653.9e9, rel=1e-3)
    assert R1.common == pytest.approx(671e9 - 653.9e9, rel=0.02)
    assert R1.parameters == R1.common + R1.routed


def test_weights_of_deepseek_r1_on_a_device_of_the_paper_s_engine() -> None:
    """TP2 EP64: 17 B / 2 + 654 B / 64, of 2 bytes each."""
    layout = EngineLayout(tp=2, dp=32, ep=64)
    held = R1.common / 2 + ROUTED / 64
    assert layout.weights(R1) == held
    assert 2 * held == pytest.approx(37.5e9, rel=0.01)
    assert str(layout) == "TP2 DP32 EP64"
    work = msgspec.structs.replace(WORK, published="bfloat16")
    assert swap_s(R1, NPU, work, layout) == pytest.approx(2 * held / NPU.host)
    assert pull_s(R1, NPU, work, layout) == pytest.approx(2 * held / (NPU.network * NPU.wire))


def test_memory_of_deepseek_r1_on_a_device_of_the_paper_s_trainer() -> None:
    """TP4 PP6 EP16 on 192 NPUs: experts over 96 with 2 replicas, the rest over 24 with 8.

    A parameter has 2 bytes, its gradient 4, and 12 of moments and float32 weights are divided over the replicas.
    """
    layout = TrainerLayout(dp=8, tp=4, pp=6, ep=16, recompute=True)
    memory = training_memory(R1, WORK, layout)
    assert memory.experts == pytest.approx(ROUTED / 96 * (2 + 4 + 12 / 2))
    assert memory.experts == pytest.approx(81.7e9, rel=1e-3)
    assert memory.states == pytest.approx(memory.experts + R1.common / 24 * (2 + 4 + 12 / 8))
    assert memory.states == pytest.approx(87.0e9, rel=5e-3)
    reference = training_memory(R1, msgspec.structs.replace(WORK, reference=True), layout)
    assert reference.frozen == pytest.approx(2 * (ROUTED / 96 + R1.common / 24))


def test_activations_of_a_layer_with_experts() -> None:
    """15 bytes a hidden unit of attention, and of each of 8 experts 2 x (2 x 2048 + 3 x 768) bytes, for each token."""
    again, kept = (TrainerLayout(dp=4, tp=2, ep=2, recompute=recompute) for recompute in (True, False))
    layer = WORK.pack * (15 * 2048 + 8 * 2 * (2 * 2048 + 3 * 768)) / 2
    inputs = 48 * WORK.pack * 2048 * 2 / 2
    difference = training_memory(QWEN, WORK, kept).activations - training_memory(QWEN, WORK, again).activations
    assert difference == pytest.approx(48 * layer - (inputs + layer))


@given(tp=POWERS, pp=POWERS, dp=POWERS, ep=POWERS)
def test_experts_over_more_devices_need_no_more_memory(tp: int, pp: int, dp: int, ep: int) -> None:
    dp = max(dp, 2 * ep)  # so that twice as many divide a stage's devices
    one, two = (TrainerLayout(dp=dp, tp=tp, pp=pp, ep=each) for each in (max(2, ep), 2 * max(2, ep)))
    memories = [training_memory(QWEN, WORK, layout) for layout in (one, two)]
    assert memories[1].experts < memories[0].experts
    assert memories[1].states - memories[1].experts == pytest.approx(memories[0].states - memories[0].experts)
    costs = [training(QWEN, NPU, WORK, layout) for layout in (one, two)]
    assert costs[0].compute_s == costs[1].compute_s
    assert costs[0].exchange_s < costs[1].exchange_s
    assert training(QWEN, NPU, WORK, msgspec.structs.replace(one, ep=1)).exchange_s == 0


def test_experts_that_are_whole_sum_nothing_unless_shared_ones_are_divided_beside_them() -> None:
    divided, whole = (TrainerLayout(dp=4, tp=2, ep=ep) for ep in (1, 4))
    for shape, share in ((QWEN, 0.5), (R1, 1.0)):
        both = [training(shape, NPU, WORK, layout).reduce_s for layout in (divided, whole)]
        assert both[1] == pytest.approx(share * both[0])


@given(tp=POWERS, dp=POWERS, pp=POWERS, ep=POWERS)
def test_every_parameter_has_its_optimizer_state_once(tp: int, dp: int, pp: int, ep: int) -> None:
    """Without weights and gradients, the devices together hold the moments and float32 weights of one model."""
    layout = TrainerLayout(dp=dp * ep, tp=tp, pp=pp, ep=ep)
    common, routed = layout.cuts
    held = training_memory(QWEN, WORK, layout).states - 6 * (QWEN.common / common + QWEN.routed / routed)
    assert held * layout.devices == pytest.approx(12 * QWEN.parameters)


@given(devices=st.integers(1, 6).map(lambda power: 1 << power), size=st.floats(1e6, 1e10))
def test_tokens_take_longer_to_more_devices(devices: int, size: float) -> None:
    one, two = (all_to_all_s(size, devices=each, device=NPU) for each in (devices, 2 * devices))
    assert one < two
    assert one < all_to_all_s(2 * size, devices=devices, device=NPU)
    assert all_to_all_s(size, devices=1, device=NPU) == 0


@given(running=st.integers(1, 4096), tp=st.sampled_from((1, 2, 4)), dp=st.sampled_from((1, 2, 4, 8)))
def test_more_sequences_take_longer_each_and_less_together(running: int, tp: int, dp: int) -> None:
    layout = EngineLayout(tp=tp, dp=dp, ep=tp * dp)
    one, two = (
        decoding(QWEN, NPU, layout, running=count, context=1000, dtype="bfloat16").seconds
        for count in (running, 2 * running)
    )
    assert one <= two < 2 * one
    prefills = [prefill_s(QWEN, NPU, layout, tokens=count, dtype="bfloat16") for count in (running, 2 * running)]
    assert prefills[0] < prefills[1]


def test_whole_experts_without_data_parallel_parts_cost_what_divided_ones_do() -> None:
    """Every device has all tokens, and its experts' answers are summed as parts of experts are."""
    full, whole = (
        decoding(QWEN, NPU, EngineLayout(tp=8, ep=ep), running=512, context=1000, dtype="bfloat16") for ep in (1, 8)
    )
    assert whole.exchange_s == 0
    assert whole.seconds == pytest.approx(full.seconds)


def test_data_parallel_parts_share_sequences_and_have_slots_each() -> None:
    one, four = (engine(QWEN, NPU, WORK, EngineLayout(tp=2, dp=dp, ep=2 * dp)) for dp in (1, 4))
    assert one is not None
    assert four is not None
    assert (one.slots, four.slots) == (WORK.slots, 4 * WORK.slots)
    assert four.rate > one.rate
    assert four.bytes < one.bytes


@given(devices=st.integers(1, 128))
def test_divisions_of_experts_are_even(devices: int) -> None:
    for wide in (False, True):
        for instance in engine_layouts(QWEN, NPU, msgspec.structs.replace(WORK, wide=wide), most=devices):
            assert instance.devices <= devices
            assert (instance.ep, instance.dp > 1) == (instance.devices, instance.dp > 1) if wide else (1, False)
            assert instance.devices <= NPU.node or instance.devices % NPU.node == 0
    tried = list(layouts(QWEN, NPU, WORK, devices=devices))
    assert len(set(tried)) == len(tried)
    for layout in tried:
        assert layout.devices == devices
        assert QWEN.experts % layout.ep == layout.dp * layout.tp % layout.ep == 0
    assert devices % 6 or any(layout.pp == 6 for layout in tried)


def test_a_dense_model_has_no_division_of_experts() -> None:
    problem = problem_of(WIDE, MEGATRON, model="Qwen2.5-7B", devices=16)
    assert {each.layout.ep * each.layout.dp for each in problem.engines(most=15)} == {1}
    assert {each.layout.ep for count in (2, 6, 8) for each in problem.trainers(count)} == {1}
    assert not {each.layout.pp for count in (6, 12) for each in problem.trainers(count)} & {3, 6, 12}


def test_the_search_for_a_dense_model_finds_these_divisions() -> None:
    problem, job = problem_of(MEGATRON, model="Qwen2.5-7B", device="910b", devices=16), job_of(MEGATRON)
    found = search(problem, job.spec.schedule, simulate=simulator_of(job, problem.work), most=4)
    assert [(each.split.name, round(each.step_s, 9)) for each in found.choices] == [
        ("8 (2 x TP4) + 6 (DP3 PP2)", 2.765065802),
        ("12 (3 x TP4) + 4 (DP2 TP2)", 2.775980555),
        ("12 (3 x TP4) + 4 (DP1 TP4)", 2.776409101),
        ("12 (3 x TP4) + 4 (DP1 TP4)", 2.788414732),
        ("8 (2 x TP4) + 6 (DP3 TP2)", 2.7892981),
        ("8 (2 x TP4) + 8 (DP2 TP4)", 2.795348054),
        ("8 (2 x TP4) + 6 (DP3 TP2)", 2.796025274),
        ("8 (2 x TP4) + 8 (DP2 TP4)", 2.801281742),
        ("8 (2 x TP4) + 8 (DP4 TP2)", 2.801591747),
        ("4 (1 x TP4) + 12 (DP3 TP4)", 2.98875083),
    ]


def test_the_paper_s_own_division_is_read_from_vllm_s_arguments() -> None:
    problem, spec = published()
    split = split_of(problem, spec)
    assert split.name == "192 (3 x TP2 DP32 EP64) + 192 (DP8 TP4 PP6 EP16)"
    assert split.trainer.layout.recompute
    with pytest.raises(ManifestError, match="192 devices of rollouts cannot be divided into instances of TP2 x DP20"):
        split_of(*published("rollout.engine.options.args.data_parallel_size=20"))
    with pytest.raises(ManifestError, match="cannot divide 12288 samples, 256 experts, 128 heads or 61 layers so"):
        split_of(*published("trainer.backend.options.expert_parallel=3"))
    with pytest.raises(ManifestError, match=r"expert_parallel: 'many' is not a number of devices"):
        split_of(*published("trainer.backend.options.expert_parallel=many"))


def test_an_instance_is_a_process_without_data_parallel_parts() -> None:
    overrides = (MEGATRON, "rollout.accelerator.count=4", "rollout.replicas=2", "trainer.accelerator.count=8")
    names = []
    for more in ((), (WIDE,)):
        problem = problem_of(*overrides, *more, model="Qwen3-30B-A3B", device="910b", devices=16)
        roomy = replace(problem, device=NPU)
        names.append(split_of(roomy, job_of(*overrides, *more, "trainer.backend.options.expert_parallel=8").spec).name)
    assert names == ["8 (2 x TP4) + 8 (DP8 EP8)", "8 (2 x TP4 EP4) + 8 (DP8 EP8)"]


def test_what_is_planned_can_be_read_again() -> None:
    problem, spec = published()
    layout = TrainerLayout(dp=2, tp=8, pp=12, ep=8)
    for instance, instances in ((EngineLayout(tp=4, dp=16, ep=64), 3), (EngineLayout(tp=4, dp=4, ep=16), 9)):
        split = problem.split(instance=instance, instances=instances, layout=layout)
        planned = choice(problem, spec.schedule, split, simulate=lambda *_: AT_ONCE)
        values = settings(problem, planned, spec=spec)
        again, changed = published(*values)
        assert split_of(again, changed).name == split.name
        assert f"it cannot run {instance}" in unmet(planned)


def test_a_mixture_that_no_device_holds_is_refused_with_the_arithmetic() -> None:
    problem = problem_of(WIDE, model="DeepSeek-R1", device="910b", devices=32)
    with pytest.raises(ManifestError, match="DeepSeek-R1 in bf16 needs 86 GB on each device of TP8 DP2") as raised:
        next(splits(problem))
    assert "experts of 1,308 GB / 16" in raised.value.what
    assert raised.value.what.endswith("of which 57.6 GB are for tensors: use TP8 DP4 EP32")
    narrow = problem_of(model="DeepSeek-R1", device="910b", devices=32)
    with pytest.raises(ManifestError) as raised:
        engines(narrow.shape, narrow.device, narrow.work, most=32)
    assert "enable_expert_parallel: true" in (raised.value.hint or "")
