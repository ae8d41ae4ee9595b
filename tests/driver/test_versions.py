"""Versions that the job still needs: never forgotten too early, never waited for in vain."""

from pathlib import Path

import pytest

from asyncflow.driver.driver import Versions
from asyncflow.driver.evaluation import EvaluationResult
from asyncflow.driver.progress import RunProgress
from asyncflow.flow.assignment import PromptAssignment
from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.weights.catalogue import Catalogue
from asyncflow.weights.manifest import ManifestPart, Slice, TensorEntry
from asyncflow.weights.slices import Box


def whole(version: Version) -> ManifestPart:
    piece = Slice(box=Box((0,), (1,)), holder="t", nbytes=4, digest=str(version.step))
    entry = TensorEntry(name="w", dtype="float32", shape=(1,), slices=(piece,))
    return ManifestPart(version=version.packed, part=0, parts=1, worker="t", address="tcp://t", tensors=(entry,))


def test_required_are_those_of_unfinished_steps_and_unfinished_evaluations(tmp_path: Path) -> None:
    schedule = Schedule(steps=10, lag=1, exact=True, eval_every=5)
    progress = RunProgress(tmp_path, steps=10, now=0.0)
    assignment = PromptAssignment(prompts_per_step=1, steps=10)
    versions = Versions(
        catalogue=Catalogue(), schedule=schedule, assignment=assignment, progress=progress, evaluates=True
    )
    assert versions.newest is None
    assert versions.due() == []
    for _ in range(4):
        assignment.issue()
    assert versions.required() == {0, 1, 2, 3} | {5, 10}
    assert versions.judged() == -1
    progress.evaluated(EvaluationResult(step=0, prompts=1, accuracy=1.0, greedy=None), at=0.0)
    assert versions.judged() == 4
    progress.evaluated(EvaluationResult(step=5, prompts=1, accuracy=1.0, greedy=None), at=1.0)
    assert versions.required() == {0, 1, 2, 3} | {10}
    assert versions.judged() == 9
    progress.evaluated(EvaluationResult(step=10, prompts=1, accuracy=1.0, greedy=None), at=2.0)
    assert versions.judged() == 10


def test_weights_are_evaluated_only_after_their_step_is_recorded(tmp_path: Path) -> None:
    catalogue = Catalogue()
    progress = RunProgress(tmp_path, steps=4, now=0.0)
    versions = Versions(
        catalogue=catalogue,
        schedule=Schedule(steps=4, lag=1, exact=True, eval_every=2),
        assignment=PromptAssignment(prompts_per_step=1, steps=4),
        progress=progress,
        evaluates=True,
    )
    for step in (0, 1, 2):
        catalogue.publish(whole(Version(0, step)))
    assert versions.due() == [0]
    for step in (1, 2):
        progress.step({"step": step, "attempt": 0, "at": 0.0, "wall_s": 1.0})
    assert versions.due() == [0, 2]
    progress.step({"step": 1, "attempt": 1, "at": 1.0, "wall_s": 1.0})
    assert versions.due() == [0], "θ_2 is one of a history that is no more"


def test_a_driver_that_begins_again_has_nobody_forget_what_is_to_be_evaluated(tmp_path: Path) -> None:
    """Versions are told to it one after another, the newest perhaps first, and it says at once what is required."""
    catalogue = Catalogue(keep=1)
    versions = Versions(
        catalogue=catalogue,
        schedule=Schedule(steps=4, lag=1, exact=True, eval_every=2),
        assignment=PromptAssignment(prompts_per_step=1, steps=4),
        progress=RunProgress(tmp_path, steps=4, now=0.0),
        evaluates=True,
    )
    for step in (1, 2, 3):
        versions.progress.step({"step": step, "attempt": 0, "at": 0.0, "wall_s": 1.0})
        versions.assignment.issue()
    assert versions.unevaluated() == [0, 2, 4]
    for step in (None, 3, 1, 0, 2):
        if step is not None:
            catalogue.publish(whole(Version(0, step)))
        assert {0, 2, 4} & set(versions.required()) == {0, 2, 4}
        assert not {0, 2, 3} & {version.step for version in catalogue.releasable}
        catalogue.require(versions.required())
    assert versions.due() == [0, 2]


def test_a_job_that_does_not_evaluate_waits_for_no_evaluation(tmp_path: Path) -> None:
    versions = Versions(
        catalogue=Catalogue(),
        schedule=Schedule(steps=4, lag=0, exact=True),
        assignment=PromptAssignment(prompts_per_step=1, steps=4),
        progress=RunProgress(tmp_path, steps=4, now=0.0),
        evaluates=False,
    )
    assert versions.unevaluated() == []
    assert versions.required() == {0}, "D_1 is still to come"


@pytest.mark.parametrize("dropped", [False, True])
def test_a_version_is_kept_for_prompts_that_are_still_to_come(tmp_path: Path, dropped: bool) -> None:
    """Those of D_3 come late, or others take the place of groups that were dropped: θ_1 alone may generate them."""
    catalogue, assignment = Catalogue(keep=1), PromptAssignment(prompts_per_step=1, steps=4)
    versions = Versions(
        catalogue=catalogue,
        schedule=Schedule(steps=4, lag=1, exact=True),
        assignment=assignment,
        progress=RunProgress(tmp_path, steps=4, now=0.0),
        evaluates=False,
    )
    for step in range(2 + dropped):
        assert assignment.issue() == (step, step + 1)
    if dropped:
        assignment.exclude(2)
    for step in range(3):
        catalogue.publish(whole(Version(0, step)))
        versions.progress.step({"step": step, "attempt": 0, "at": 0.0, "wall_s": 1.0})
    catalogue.require(versions.required())
    assert catalogue.releasable == [Version(0, 0)]
