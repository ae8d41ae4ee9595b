"""The search: as good as trying everything, by bounds that the simulator keeps."""

import dataclasses
from itertools import pairwise

import pytest
from msgspec.structs import replace
from planner_problems import SCHEDULES, job_of, problem_of, random_problem

from asyncflow.api.schedule import ScheduleSpec
from asyncflow.planner.bounds import Split, bound_of
from asyncflow.planner.costs import EngineLayout, TrainerLayout
from asyncflow.planner.layouts import trainer
from asyncflow.planner.measured import COMPUTED, Factors, factors, models_of_split
from asyncflow.planner.report import settings
from asyncflow.planner.schedules import alternatives, changes, described
from asyncflow.planner.search import Predicted, choice, search, split_of, splits, training_devices
from asyncflow.planner.simulated import scenario, simulator_of
from asyncflow.planner.work import Responses
from asyncflow.rollout.lengths import Lengths
from asyncflow.sim import simulate

BAR = 1.02


EVERY = 20
NUMBERS = [*range(len(SCHEDULES)), *(pytest.param(n, marks=pytest.mark.slow) for n in range(len(SCHEDULES), EVERY))]
"""A problem for each schedule, and the rest of twenty by name alone."""


@pytest.mark.parametrize("mixture", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("number", NUMBERS)
def test_the_search_finds_the_optimum_of_brute_force(number: int, mixture: bool) -> None:
    job, problem = random_problem(number, mixture=mixture)
    simulate, schedule = simulator_of(job, problem.work), job.spec.schedule
    known: dict[Split, Predicted] = {}

    def once(split: Split, schedule: ScheduleSpec) -> Predicted:
        return known.get(split) or known.setdefault(split, simulate(split, schedule))

    found = search(problem, schedule, simulate=once, most=12)
    every = {
        split: once(split, schedule).step_s
        for fastest in splits(problem)
        for trainer_ in problem.trainers(fastest.trainer.layout.devices)
        for split in [replace(fastest, trainer=trainer_)]
    }
    assert found.best.step_s <= BAR * min(every.values())
    assert {each.split for each in found.choices} <= set(every)
    for split, step_s in every.items():
        assert bound_of(problem.work, schedule, split).step_s <= step_s


def test_a_search_that_ends_early_says_so() -> None:
    job, problem = random_problem(2)
    found = search(problem, job.spec.schedule, simulate=simulator_of(job, problem.work), most=1)
    assert not found.proven


def test_devices_of_the_trainer_are_tried_one_by_one_or_in_even_steps() -> None:
    assert training_devices(6) == [1, 2, 3, 4, 5]
    many = training_devices(512)
    assert many[:8] == list(range(1, 9))
    assert {later - earlier for earlier, later in pairwise(many[7:])} == {8}
    assert set(range(8, 384, 8)) | set(training_devices(384)) == set(training_devices(384, node=8))


def test_the_split_of_a_manifest() -> None:
    spec = job_of(
        "rollout.replicas=3",
        "rollout.accelerator.count=2",
        "trainer.replicas=2",
        "trainer.accelerator.count=4",
        "trainer.backend.name=mindspeed",
        "trainer.backend.options={tensor_parallel: 2, pipeline_parallel: 2}",
    ).spec
    split = split_of(problem_of("trainer.backend.name=mindspeed"), spec)
    assert split.name == "6 (3 x TP2) + 8 (DP2 TP2 PP2)"


CPUS = ("rollout={engine: {name: transformers, slots: 64}}", "trainer={backend: {name: torch}}")


def test_ranks_on_the_cpu_are_replicas_in_the_values_that_are_printed() -> None:
    small = problem_of(*CPUS, device="cpu", devices=4)
    problem = dataclasses.replace(small, device=replace(small.device, memory=1e11))
    split = problem.split(instance=EngineLayout(tp=1), instances=2, layout=TrainerLayout(dp=2))
    planned = choice(
        problem,
        job_of().spec.schedule,
        split,
        simulate=lambda *_: Predicted(step_s=1.0, generation_idle=0.0, training_idle=0.0),
    )
    values = settings(problem, planned, spec=job_of(*CPUS).spec)
    assert split_of(problem, job_of(*CPUS, *values).spec).name == split.name == "2 (2 x TP1) + 2 (DP2)"


def test_schedules_that_a_job_could_have() -> None:
    spec = job_of("schedule={mode: periodic}", "algorithm.old=lagged").spec
    assert [described(each) for each in alternatives(spec)] == ["periodic"]  # lagged belongs to it
    usual = job_of().spec
    words = [described(each) for each in alternatives(usual)]
    assert words[:3] == ["sync", "periodic", "async, delayed at quota"]
    assert "async, staggered at token, staleness 4" in words
    assert changes(usual, ScheduleSpec(mode="sync")) == [
        "schedule.mode=sync",
        "schedule.update=sync",
        "schedule.maxStaleness=0",
    ]


def test_a_job_with_a_stagger_could_have_every_schedule_and_keeps_it_where_it_has_an_effect() -> None:
    few = job_of("schedule={mode: async, update: staggered, swapAt: token}", "weightSync.stagger=2").spec
    found = alternatives(few)
    words = [described(each) for each in found]
    assert {"sync", "async, delayed at token, staleness 1", "async, staggered at sequence, staleness 1"} <= {*words}
    for schedule in found:
        values = changes(few, schedule)
        assert ("weightSync.stagger=null" in values) == (schedule.update != "staggered")
        job_of("schedule={mode: async, update: staggered, swapAt: token}", "weightSync.stagger=2", *values)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_probe_that_measured_what_is_computed_changes_nothing(schedule: str) -> None:
    problem, spec = problem_of(), job_of(f"schedule={schedule}").spec
    split = split_of(problem, spec)
    models = models_of_split(problem.work, split.engine, split.trainer)
    found = factors(models, work=problem.work, engine=split.engine, trainer=split.trainer)
    for name in Factors.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(COMPUTED, name))


@pytest.mark.parametrize("packing", ["separate", "shared-prompt"])
def test_a_step_is_simulated_as_long_as_it_is_computed_if_its_samples_are_available(packing: str) -> None:
    settings = ("schedule.mode=sync", "sampling.maxPromptTokens=4096", f"trainer.backend.packing={packing}")
    problem, job = problem_of(*settings), job_of(*settings)
    work = replace(problem.work, responses=Responses(lengths=Lengths(tokens=100), most=512))
    alone = trainer(problem.shape, problem.device, work, TrainerLayout(dp=1))
    assert alone is not None
    split = replace(split_of(problem, job.spec), trainer=alone)
    step = simulate(scenario(job, work, split, job.spec.schedule), seed=0).steps[0]
    assert step.compute_s + step.optimizer_s == pytest.approx(alone.step_s, rel=0.03)


def test_what_a_probe_measured_is_what_its_layout_costs() -> None:
    problem = problem_of()
    split = split_of(problem, job_of().spec)
    slow = Factors(token=3.0, share=2.0, training=4.0, swap=1.5)
    measured = models_of_split(problem.work, slow.engine(split.engine), slow.trainer(split.trainer))
    found = factors(measured, work=problem.work, engine=split.engine, trainer=split.trainer)
    again = models_of_split(problem.work, found.engine(split.engine), found.trainer(split.trainer), like=measured)
    assert again.engine.token_s == pytest.approx(measured.engine.token_s)
    assert again.trainer.token_s == pytest.approx(measured.trainer.token_s)
    assert found.training == pytest.approx(4.0)
