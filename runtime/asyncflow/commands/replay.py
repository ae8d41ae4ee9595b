"""``asyncflow replay DIR --step K``: the samples of a step, their weights and the reasons, and a replay of the step.

Invariants: the output lists each comparison with its result, and each comparison that was not possible. The exit status
is 0 only if everything that was compared is the same: bit for bit, or within 0.1 % if the output states a reason why
bits may differ.
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
"""Fields of a line of figures that do not depend on the step's computation."""


def replay(run: Path, *, step: int, most: int, again: bool, output: Path | None) -> int:
    """Print the samples of a step; if ``again``, replay the step, and compare and print the results.

    most: most samples to list; output: a folder that does not exist, for the resulting checkpoint, None to discard it.
    Returns 0, or 1 if a result differs or the step cannot be replayed. Raises ManifestError if there is no such step.
    """
    check_run(run)
    if output is not None and output.exists():
        raise ManifestError("exists already", where=str(output), hint="Pass a folder that does not exist")
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
        return _replay(job, run.absolute(), history, plan, Path(target), exact=not inexact)


def _show(job: RLJob, step: int, recorded: RecordedStep, most: int) -> None:
    samples, slots = recorded.samples, len(recorded.slots)
    click.echo(
        f"step {step}: θ{step - 1} became θ{step} by attempt {recorded.attempt} of the trainer, "
        f"from {len(samples)} samples in {slots} slot{'' if slots == 1 else 's'}"
    )
    for reason in reasons(job.spec, step, recorded):
        click.echo(f"  {reason}")
    numbers = ("slot", "tokens", "reward", recorded.decided)
    table = make_table("slot", "sample", "tokens", "made by", "reward", recorded.decided, right=numbers)
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


def _replay(job: RLJob, run: Path, history: RunHistory, plan: ReplayPlan, target: Path, *, exact: bool) -> int:
    """Replay the steps of ``plan``, print all comparisons, and return the exit status."""
    os.environ.update(make_plan(job).role("trainer").env)  # before torch is imported
    from asyncflow.replay.again import ReplayedStep, compare_checkpoints, replay_steps, weights_gap

    step, base = plan.steps[-1], f"the checkpoint of step {plan.base}" if plan.base else "the initial model"
    several = f"steps {plan.steps[0]} to {step}" if len(plan.steps) > 1 else f"step {step}"
    click.echo(f"making {several} again, from {base}")
    steps: list[ReplayedStep] = asyncio.run(
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
    same, compared, missing = True, [], []
    for replayed in steps:
        differ = [made.record for made in replayed.samples if not made.same]
        tokens = sum(not made.same_tokens for made in replayed.samples)
        what = f"tokens and log-probs of the {len(replayed.samples)} samples of step {replayed.report.step}"
        if differ:
            first = f"{differ[0].serial}/{differ[0].sample}"
            compared.append(f"{what}: {len(differ)} differ, {tokens} of them in tokens; the first is {first}")
        else:
            compared.append(f"{what}: {_SAME}")
        weights = f"θ{replayed.report.step} with the digest of the published version"
        if replayed.same is None:
            missing.append(f"{weights}: it was not published by one rank")
        else:
            compared.append(f"{weights}: {_SAME if replayed.same else _OTHER}")
        same = same and (not exact or (not differ and replayed.same is not False))
    where = f"checkpoints/step-{step:06d}"
    if exact and (files := compare_checkpoints(run, target, step=step)):
        compared += [f"{where}/{path}: {_SAME if equal else _OTHER}" for path, equal in sorted(files.items())]
        same = same and all(files.values())
    elif not exact and (gap := weights_gap(run, target, step=step)) is not None:
        compared.append(f"weights of {where}: {f'they differ by at most {gap:.1e}' if gap else _SAME}")
    else:
        missing.append(f"optimizer: the run keeps no checkpoint of step {step}")
    recorded = _line(run, step, history.step(step).attempt)
    if recorded is None:
        missing.append(f"figures: {METRICS} has no line of step {step}")
    else:
        different = _differences(recorded, line_of(steps[-1].report, at=0.0), exact=exact)
        compared.append(f"figures of {METRICS}: {'the same' if not different else '; '.join(different)}")
        same = same and not different
    missing.append("rewards and advantages: the recorded ones were used, no reward function was called")
    for line in compared:
        click.echo(f"compared: {line}")
    for line in missing:
        click.echo(f"not compared: {line}")
    click.echo(_result(step, same=same, exact=exact))
    return 0 if same else 1


def _result(step: int, *, same: bool, exact: bool) -> str:
    if not exact:
        how = "is the same within" if same else "differs by more than"
        return f"step {step} {how} {_CLOSE:.1%}"
    if same:
        return f"step {step} is the same"
    return (
        f"step {step} is NOT the same. Bits differ with another kind of processor, with other versions of torch or "
        "transformers, or if the manifest or the data has changed since"
    )


def _line(run: Path, step: int, attempt: int) -> dict[str, Any] | None:
    """Return the recorded figures of a step, None if no line of the step can be read."""
    found = None
    try:
        lines = (run / METRICS).read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            figures = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            continue
        if figures.get("step") == step and figures.get("attempt") == attempt:
            found = figures
    return found


def _differences(recorded: dict[str, Any], own: dict[str, Any], *, exact: bool) -> Sequence[str]:
    """Return the figures that differ, except times and the log-prob gap, which depends on the versions in memory."""
    names = (name for name in recorded if name in own and not _NOT_OF_THE_STEP.fullmatch(name))
    pairs = ((name, recorded[name], own[name]) for name in names)
    return [f"{name} was {was}, is {now}" for name, was, now in pairs if not _equal(was, now, exact)]


def _equal(one: object, other: object, exact: bool) -> bool:
    if exact or not isinstance(one, float) or not isinstance(other, float):
        return one == other
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE**2)
