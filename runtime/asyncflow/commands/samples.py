"""Texts of samples of a run, finished or not: ``asyncflow samples DIR``.

Invariant: the command only reads the files of the run: it writes nothing, and contacts no process of the run.
"""

from __future__ import annotations

from pathlib import Path

from asyncflow.driver.sample_files import SAMPLES, Purpose, SampleFile, SampleText, read_step, sample_files
from asyncflow.errors import ManifestError
from asyncflow.local.folder import check_run
from asyncflow.view.console import make_console, print_json
from asyncflow.view.samples import sample_panel

_WIDTH = 120
"""Width in columns without a terminal."""
_NAMED = 12
"""Most steps that an error lists."""


def samples(run: Path, *, step: int | None, purpose: Purpose, order: str | None, most: int, as_json: bool) -> None:
    """Print samples of one step, by default the newest.

    order: "best" or "worst" to sort by reward, or None for the randomly drawn samples. Raises ManifestError if there
    are none, and AsyncFlowError if a file cannot be read.
    """
    chosen = _step(run, sample_files(run), step=step, purpose=purpose)
    kept = read_step(run, purpose=purpose, step=chosen)
    shown = _ordered(kept, order)[:most]
    if as_json:
        print_json(shown)
        return
    console = make_console(width=_WIDTH)
    for sample in shown:
        console.print(sample_panel(sample))
    what = f"the evaluation of θ_{chosen}" if purpose == "eval" else f"step {chosen}"
    console.print(f"{len(shown)} of the {len(kept)} kept samples of {what}")


def _ordered(kept: list[SampleText], order: str | None) -> list[SampleText]:
    if order is None:
        return [sample for sample in kept if sample.drawn]
    sign = -1 if order == "best" else 1
    scored = [(sign * sample.reward, sample) for sample in kept if sample.reward is not None]
    return [sample for _, sample in sorted(scored, key=lambda pair: pair[0])]


def _step(run: Path, files: list[SampleFile], *, step: int | None, purpose: Purpose) -> int:
    """Return the requested step, or the newest. Raises ManifestError if no samples of it are kept."""
    steps = [file.step for file in files if file.purpose == purpose]
    if steps and (step is None or step in steps):
        return steps[-1] if step is None else step
    what, where = "evaluation" if purpose == "eval" else "step", str(run / SAMPLES)
    if steps:
        named = ", ".join(map(str, steps[-_NAMED:]))
        more = f"the last are {named}" if len(steps) > _NAMED else f"there are {named}"
        raise ManifestError(f"no samples are kept of {what} {step}", where=where, hint=f"Of {len(steps)}, {more}")
    check_run(run)
    field = "perEvaluation" if purpose == "eval" else "perStep"
    raise ManifestError(
        f"no samples are kept of any {what}",
        where=where,
        hint=f"The run has made none yet, or its storage.samples.{field} is 0"
        + (", or it has no evaluation" if purpose == "eval" else ""),
    )
