"""The best checkpoint stays: by evaluations that the driver tells, among checkpoints that are there."""

from pathlib import Path

import pytest

from asyncflow.errors import ManifestError
from asyncflow.rpc.membership import Best, Directives
from asyncflow.training.checkpoint import (
    BEST,
    BestCheckpoints,
    CheckpointManifest,
    Checkpoints,
    find_checkpoint,
    read_best,
)


class Run:
    """Checkpoints of a run of which every second version is evaluated; ``told`` is what the driver says."""

    def __init__(self, folder: Path, *, by: str = "accuracy") -> None:
        self.folder = folder
        self.told = Directives()
        self.best_checkpoints = BestCheckpoints(
            folder, by=by, evaluates=lambda step: step % 2 == 0, directives=lambda: self.told
        )
        self.checkpoints = Checkpoints(folder, keep=1, also=self.best_checkpoints.keeps)

    def tell(self, judged: int, best: int, value: float, *, by: str = "accuracy") -> None:
        self.told = Directives(judged=judged, best=Best(step=best, by=by, value=value))

    def write(self, *steps: int) -> list[int]:
        for step in steps:
            self.checkpoints.write(
                CheckpointManifest(attempt=0, step=step, samples=step), lambda folder: (folder / "w").touch()
            )
        return self.checkpoints.steps()

    @property
    def best(self) -> int | None:
        return self.best_checkpoints.best.step if self.best_checkpoints.best is not None else None


def test_the_best_stays_and_so_does_what_is_not_judged(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.write(1, 2, 3, 4, 5) == [2, 4, 5]
    run.tell(judged=2, best=2, value=0.5)
    assert run.write(6, 7) == [2, 4, 6, 7]
    run.tell(judged=6, best=4, value=0.7)
    assert run.write(8) == [4, 8]
    assert (run.best, read_best(tmp_path)) == (4, Best(step=4, by="accuracy", value=0.7))
    run.checkpoints.prune(0)
    assert run.write(9) == [4, 8, 9]


def test_a_version_without_a_checkpoint_is_never_the_best_but_for_the_first(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.tell(judged=2, best=2, value=0.5)
    run.write(1)
    assert run.best is None
    run.tell(judged=0, best=0, value=0.4)
    run.write(3)
    assert run.best == 0
    run.tell(judged=2, best=2, value=0.5)
    run.write(4)
    assert run.best == 0


def test_a_driver_that_has_forgotten_replaces_the_best_only_by_a_better_one(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.tell(judged=2, best=2, value=0.5)
    first.write(2, 3)
    again = Run(tmp_path)
    assert again.best == 2
    again.told = Directives(judged=10)
    assert again.write(4, 5) == [2, 5]
    again.tell(judged=10, best=4, value=0.5)
    assert again.write(6) == [2, 6], "of equals the first"
    again.tell(judged=10, best=6, value=0.6)
    assert again.write(7) == [6, 7]


def test_a_best_that_was_moved_away_is_found_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.tell(judged=2, best=2, value=0.5)
    run.write(2, 3)
    (tmp_path / "step-000002").rename(tmp_path / "elsewhere")
    run.tell(judged=4, best=4, value=0.3)
    run.write(4, 5)
    assert run.best == 4


def test_another_figure_starts_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.tell(judged=2, best=2, value=0.5)
    run.write(2, 3)
    other = Run(tmp_path, by="reward")
    assert other.best is None
    other.tell(judged=4, best=2, value=0.9)
    other.write(4)
    assert other.best is None, "that was told for the other figure"
    other.tell(judged=4, best=4, value=-3.0, by="reward")
    other.write(5)
    assert other.best == 4


@pytest.mark.parametrize(
    "damaged", [b"", b"[]", b'{"step": -1, "by": "accuracy", "value": 1}', b'{"step": 2, "by": "\xff", "value": 1}']
)
def test_a_damaged_record_is_none(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / BEST).write_bytes(damaged)
    run = Run(tmp_path)
    assert run.best is None
    run.tell(judged=2, best=2, value=0.5)
    assert run.write(2, 3) == [2, 3]
    assert read_best(tmp_path) == Best(step=2, by="accuracy", value=0.5)


def test_a_checkpoint_is_found_by_name_or_number(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ManifestError, match=r"best: only a run with .*keepBest says so\. Use another run, or step 0"):
        find_checkpoint(run.checkpoints, "best")
    with pytest.raises(ManifestError, match=r"there is no checkpoint yet\. Use another run, or step 0"):
        find_checkpoint(run.checkpoints, "newest")
    run.tell(judged=2, best=2, value=0.5)
    run.write(2, 3)
    found = [find_checkpoint(run.checkpoints, which) for which in ("best", "newest", "2", "0")]
    assert [step for step, _ in found] == [2, 3, 2, 0]
    assert [checkpoint and checkpoint.manifest.step for _, checkpoint in found] == [2, 3, 2, None]
    with pytest.raises(ManifestError, match=r"no checkpoint of step 7\. Use newest, or a step .*: 2, 3"):
        find_checkpoint(run.checkpoints, "7")
