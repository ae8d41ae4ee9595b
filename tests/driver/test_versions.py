"""Versions that the job still needs: never forgotten too early, never waited for in vain."""

from pathlib import Path

from asyncflow.driver.book import PromptBook
from asyncflow.driver.evaluation import EvaluationResult
from asyncflow.driver.progress import Progress
from asyncflow.driver.versions import Versions
from asyncflow.flow.schedule import Schedule
from asyncflow.weights.catalogue import Catalogue


def test_required_are_those_of_unfinished_steps_and_unfinished_evaluations(tmp_path: Path) -> None:
    schedule = Schedule(steps=10, lag=1, exact=True, eval_every=5)
    progress = Progress(tmp_path, steps=10, now=0.0)
    book = PromptBook(prompts_per_step=1, steps=10)
    versions = Versions(catalogue=Catalogue(), schedule=schedule, book=book, progress=progress, evaluates=True)
    assert versions.newest is None
    assert versions.due() == []
    for _ in range(4):
        book.issue()
    assert versions.required() == {0, 1, 2} | {5, 10}
    progress.evaluated(EvaluationResult(step=5, prompts=1, accuracy=1.0, greedy=None), at=1.0)
    assert versions.required() == {0, 1, 2} | {10}


def test_a_job_that_does_not_evaluate_waits_for_no_evaluation(tmp_path: Path) -> None:
    versions = Versions(
        catalogue=Catalogue(),
        schedule=Schedule(steps=4, lag=0, exact=True),
        book=PromptBook(prompts_per_step=1, steps=4),
        progress=Progress(tmp_path, steps=4, now=0.0),
        evaluates=False,
    )
    assert versions.unevaluated() == []
    assert versions.required() == set()
