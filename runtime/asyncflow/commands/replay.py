"""``asyncflow replay DIR --step K``: which samples made a step, under which weights and why, and the step made again.

Invariant: what was compared is named with its result, and so is what could not be; the exit status is 0 only where
everything that was compared is the same: to the bit, or, where a reason is named why bits cannot be, within 0.1 %.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import msgspec

from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job
from asyncflow.driver.journal import METRICS
from asyncflow.driver.progress import line_of
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, check_run
from asyncflow.plan.describe import ABSENT
from asyncflow.plan.job import plan as make_plan
from asyncflow.replay.history import RecordedStep, ReplayPlan, RunHistory, obstacles, plan_replay, reasons
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.recording import ranks_of, read_records
from asyncflow.view.console import make_console, make_table

_CLOSE = 1e-3
_WIDTH = 120
_SAME, _OTHER = "the same bits", "DIFFERS"
_NOT_OF_THE_STEP = re.compile(r"at|started|ended|attempt|ranks|published|reward_components|logprob_gap.*|.*_s")
"""Fields of a line of figures that are not the step's own."""


def replay(run: Path, *, step: int, most: int, again: bool, output: Path | None) -> int:
    """Print the samples of a step, make it again where ``again``, and print what is the same; 1 where something is not.

    most: samples that are listed; output: a folder that does not exist, for the checkpoint that is made, None: it is
    not kept. Raises ManifestError where there is no such step.
    """
    check_run(run)
    if output is not None and output.exists():
        raise ManifestError("is there already", where=str(output), hint="Give a folder that does not exist")
    job = load_job(run / JOB)
    history = RunHistory.of([list(read_records(run, rank)) for rank in ranks_of(run)])
    recorded = history.step(step)
    _show(job, step, recorded, most)
    if not again:
        return 0
    found = Checkpoints(run / "checkpoints")
    plan = plan_replay(
        history, step=step, checkpoints={each: found.at(each).manifest.carried for each in found.steps()}
    )
    refused, inexact = obstacles(job.spec, history, plan)
    if refused:
        for reason in refused:
            click.echo(f"cannot be made again: {reason}")
        return 1
    for reason in inexact:
        click.echo(f"may differ in bits: {reason}")
    with tempfile.TemporaryDirectory() if output is None else nullcontext(str(output)) as target:
        return _again(job, run.absolute(), history, plan, Path(target), exact=not inexact)


def _show(job: RLJob, step: int, recorded: RecordedStep, most: int) -> None:
    samples, slots = recorded.samples, len(recorded.slots)
    click.echo(
        f"step {step}: θ{step - 1} became θ{step} by attempt {recorded.attempt} of the trainer, "
        f"from {len(samples)} samples in {slots} slot{'' if slots == 1 else 's'}"
    )
    for reason in reasons(job.spec, step, recorded):
        click.echo(f"  {reason}")
    numbers = ("slot", "tokens", "reward", "advantage")
    table = make_table("slot", "sample", "tokens", "made by", "reward", "advantage", right=numbers)
    rows = [(number, sample) for number, slot in enumerate(recorded.slots) for sample in slot]
    for number, sample in rows[:most]:
        several = len(sample.runs) > 1
        made = " ".join(f"{run.version}×{run.tokens}" if several else str(run.version) for run in sample.runs)
        table.add_row(
            str(number),
            f"{sample.serial}/{sample.sample}",
            str(sample.tokens),
            made,
            ABSENT if sample.reward is None else f"{sample.reward:.4g}",
            ABSENT if sample.decided is None else f"{sample.decided:+.4g}",
        )
    if most:
        make_console(width=_WIDTH).print(table)
        if len(rows) > most:
            click.echo(f"and {len(rows) - most} more (-n)")


def _again(job: RLJob, run: Path, history: RunHistory, plan: ReplayPlan, target: Path, *, exact: bool) -> int:
    os.environ.update(make_plan(job).role("trainer").env)  # before torch is imported
    from asyncflow.replay.again import StepAgain, compare_checkpoints, replay_steps, weights_gap

    step, base = plan.steps[-1], f"the checkpoint of step {plan.base}" if plan.base else "the initial model"
    several = f"steps {plan.steps[0]} to {step}" if len(plan.steps) > 1 else f"step {step}"
    click.echo(f"making {several} again, from {base}")
    steps: list[StepAgain] = asyncio.run(
        replay_steps(
            job.spec,
            run=run,
            folder=job.folder(run),
            history=history,
            plan=plan,
            target=target,
            done=lambda number, samples: click.echo(f"  step {number}: {samples} samples", err=True),
        )
    )
    right, compared, missing = True, [], []
    for one in steps:
        differ = [made.record for made in one.samples if not made.same]
        tokens = sum(not made.same_tokens for made in one.samples)
        what = f"tokens and log-probs of the {len(one.samples)} samples of step {one.report.step}"
        if differ:
            first = f"{differ[0].serial}/{differ[0].sample}"
            compared.append(f"{what}: {len(differ)} differ, {tokens} of them in tokens; the first is {first}")
        else:
            compared.append(f"{what}: {_SAME}")
        weights = f"θ{one.report.step} with the digest of what was published"
        if one.same is None:
            missing.append(f"{weights}: it was not published by one rank")
        else:
            compared.append(f"{weights}: {_SAME if one.same else _OTHER}")
        right = right and (not exact or (not differ and one.same is not False))
    where = f"checkpoints/step-{step:06d}"
    if exact and (files := compare_checkpoints(run, target, step=step)):
        compared += [f"{where}/{path}: {_SAME if same else _OTHER}" for path, same in sorted(files.items())]
        right = right and all(files.values())
    elif not exact and (gap := weights_gap(run, target, step=step)) is not None:
        compared.append(f"weights of {where}: {f'they differ by at most {gap:.1e}' if gap else _SAME}")
    else:
        missing.append(f"optimizer: the run keeps no checkpoint of step {step}")
    theirs = _line(run, step, history.step(step).attempt)
    if theirs is None:
        missing.append(f"figures: {METRICS} has no line of step {step}")
    else:
        unlike = _unlike(theirs, line_of(steps[-1].report, at=0.0), exact=exact)
        compared.append(f"figures of {METRICS}: {'the same' if not unlike else '; '.join(unlike)}")
        right = right and not unlike
    missing.append("rewards and advantages: they are those recorded, no reward function was called")
    for line in compared:
        click.echo(f"compared: {line}")
    for line in missing:
        click.echo(f"not compared: {line}")
    click.echo(_result(step, right=right, exact=exact))
    return 0 if right else 1


def _result(step: int, *, right: bool, exact: bool) -> str:
    if not exact:
        how = "is the same within" if right else "differs by more than"
        return f"step {step} {how} {_CLOSE:.1%}"
    if right:
        return f"step {step} is the same"
    return (
        f"step {step} is NOT the same. Another kind of processor, other versions of torch or transformers, or a "
        "manifest or data that was changed since make other bits"
    )


def _line(run: Path, step: int, attempt: int) -> dict[str, Any] | None:
    """Return the line of figures of a step, None where there is none that can be read."""
    found = None
    try:
        lines = (run / METRICS).read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            told = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            continue
        if told.get("step") == step and told.get("attempt") == attempt:
            found = told
    return found


def _unlike(theirs: dict[str, Any], own: dict[str, Any], *, exact: bool) -> Sequence[str]:
    """Return the figures that differ: not those of times, nor the log-prob gap, which depends on what was at hand."""
    names = (name for name in theirs if name in own and not _NOT_OF_THE_STEP.fullmatch(name))
    pairs = ((name, theirs[name], own[name]) for name in names)
    return [f"{name} was {was}, is {now}" for name, was, now in pairs if not _equal(was, now, exact)]


def _equal(one: object, other: object, exact: bool) -> bool:
    if exact or not isinstance(one, float) or not isinstance(other, float):
        return one == other
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE**2)
