"""The checkpoint with the best evaluation, which stays when older ones are removed.

The driver evaluates and says which version is the best that it knows, and up to which step all evaluations are decided
(``Directives``); the trainer has a checkpoint of each version that is evaluated, and writes down here which of them is
the best.

    checkpoints/best.json   step, figure and value; step 0 is the model that the run began with

Invariants: what is the best was evaluated and has a complete checkpoint, unless it is θ_0; a checkpoint whose
evaluation is not decided stays. The record outlives trainer and driver: a driver that has forgotten evaluations of the
one before it replaces the best only by a better one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from asyncflow.durable import write_whole
from asyncflow.errors import CheckpointError
from asyncflow.net.roster import Best, Directives
from asyncflow.train.checkpoint import Checkpoint, Checkpoints

log = logging.getLogger(__name__)

BEST = "best.json"


class BestKeeper:
    """Decides which checkpoints stay for their evaluations. ``best``: the best so far, None before there is one.

    by: name of the figure that is compared; evaluates: tells whether θ_step is evaluated; directives: the driver's
    latest.
    """

    def __init__(
        self, folder: Path, *, by: str, evaluates: Callable[[int], bool], directives: Callable[[], Directives]
    ) -> None:
        self._folder = folder
        self._by = by
        self._evaluates = evaluates
        self._directives = directives
        found = read_best(folder)
        self.best = found if found is not None and found.by == by else None

    def keeps(self, steps: Collection[int]) -> set[int]:
        """Return which steps of complete checkpoints stay. Raises OSError where the best cannot be written down."""
        directives = self._directives()
        told, known = directives.best, {0, *steps}
        if self.best is not None and self.best.step not in known:
            log.warning("the checkpoint of θ_%d, the best so far, is not there any more", self.best.step)
            self.best = None
        better = told is not None and (self.best is None or told.value > self.best.value)
        if told is not None and better and told.by == self._by and told.step in known:
            write_whole(self._folder / BEST, msgspec.json.format(msgspec.json.encode(told), indent=1))
            self.best = told
            log.info("θ_%d is the best so far: %s %.4g", told.step, told.by, told.value)
        undecided = {step for step in steps if step > directives.judged and self._evaluates(step)}
        return undecided | ({self.best.step} if self.best is not None else set())


def read_best(folder: Path) -> Best | None:
    """Return what was written down in the folder of the checkpoints; None where that is nothing, or not readable."""
    file = folder / BEST
    try:
        return msgspec.json.decode(file.read_bytes(), type=Best)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be read, the best checkpoint is not known: %s", file, error)
        return None


def find_checkpoint(checkpoints: Checkpoints, which: str) -> tuple[int, Checkpoint | None]:
    """Return the step that is meant by ``newest``, ``best`` or a number, and its checkpoint, None for θ_0.

    Raises CheckpointError where there is none.
    """
    where, steps = str(checkpoints.folder), checkpoints.steps()
    there = f"There are checkpoints of the steps {', '.join(map(str, steps)) or 'none'}"
    if which == "newest":
        step = max(steps, default=-1)
    elif which == "best":
        best = read_best(checkpoints.folder)
        if best is None:
            hint = f"storage.checkpoints.keepBest asks for it. {there}"
            raise CheckpointError("nothing says which checkpoint is the best", where=where, hint=hint)
        step = best.step
    else:
        step = int(which)
    if step in steps:
        return step, checkpoints.at(step)
    if step == 0:
        return step, None
    what = f"there is no checkpoint of step {step}" if step > 0 else "there is no checkpoint"
    raise CheckpointError(what, where=where, hint=there)
