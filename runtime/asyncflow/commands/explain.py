"""``asyncflow explain DIR PROMPT/SAMPLE``: the history of one sample of a run, finished or not, in about ten lines.

Invariant: the command reads only the files of the run, and changes none; it reports missing or unreadable sample texts.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import click

from asyncflow.driver.sample_files import SampleText, read_step
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import AsyncFlowError, ManifestError
from asyncflow.identity import SampleKey
from asyncflow.local.folder import JOB
from asyncflow.queue.ledger.audit import ledgers_of
from asyncflow.queue.ledger.log import read_ledger
from asyncflow.replay.history import RunHistory
from asyncflow.replay.life import HistoryEntry, SampleHistory, life_of
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.recording import SampleRecord, ranks_of, read_records
from asyncflow.view.render import plain

_NAME = re.compile(r"([0-9]{1,10})/([0-9]{1,6})")
_INCARNATION = re.compile(r"(?<=-[0-9a-f]{8})[0-9a-f]{24}\b")
"""The last 24 digits of the unique id in a worker's name; they are not printed."""
_MOST = 100
"""Most characters of a text that are printed."""


def explain(run: Path, sample: str) -> None:
    """Print the history of a training sample. Raises ManifestError if the run, its ledger or the sample is missing."""
    match = _NAME.fullmatch(sample)
    if match is None:
        hint = "Pass the number of the prompt and the number of the sample in its group, e.g. 17/3"
        raise ManifestError(f"{sample!r} names no sample", where="asyncflow explain", hint=hint)
    ledger = run / "ledger"
    if not ledger.is_dir():
        raise ManifestError("there is no ledger", where=str(ledger), hint="Pass the folder of a run")
    key = SampleKey(int(match[1]), int(match[2]))
    life = life_of([read_ledger(each) for each in ledgers_of(ledger).values()], key, partition=TRAIN)
    if not life.entries:
        hint = "Prompts count from 0 in data order, and samples from 0 in each prompt; overlong prompts are skipped"
        raise ManifestError(f"sample {sample} was never put into the queue", where=str(ledger), hint=hint)
    outcome = life.outcome or "unfinished"
    click.echo(f"sample {sample}: {outcome}" + ("" if life.step is None else f", of step {life.step}"))
    for entry in life.entries:
        click.echo(f"  {_line(entry)}")
    for line in (*_trained(run, key, life), *_text(run, key, life), *_checkpoint(run, life)):
        click.echo(f"  {line}")


def _line(entry: HistoryEntry) -> str:
    time = "" if entry.at is None else datetime.fromtimestamp(entry.at, UTC).strftime("%H:%M:%S  ")
    duration = ""
    if entry.until is not None and entry.at is not None and entry.until > entry.at:
        duration = f" after {entry.until - entry.at:.0f} s"
    duration = ", not done yet" if entry.open else duration
    return f"{time}{plain(_INCARNATION.sub('', entry.what))}{duration}"


def _trained(run: Path, key: SampleKey, life: SampleHistory) -> list[str]:
    """Return the trainer's record of the sample: its versions, its reward, and its advantage or outcome."""
    if (run / JOB).is_file() and life.step is not None:
        history = RunHistory.of([list(read_records(run, rank)) for rank in ranks_of(run)])
        step = history.steps.get(life.step)
        found = next((sample for sample in step.samples if sample.key == key), None) if step is not None else None
        if step is not None and found is not None:
            made = _made(found, step.decided)
            return [f"trained in step {life.step} by attempt {step.attempt} of the trainer: {made}"]
    return []


def _made(sample: SampleRecord, column: str) -> str:
    made = ", then ".join(f"{run.tokens} tokens by {run.version}" for run in sample.runs) or "no token"
    reward = "" if sample.reward is None else f"; reward {sample.reward:.4g}"
    decided = "" if sample.decided is None else f", {column} {sample.decided:+.4g}"
    return f"{made}{reward}{decided}"


def _text(run: Path, key: SampleKey, life: SampleHistory) -> list[str]:
    """Return the stored texts of the sample."""
    try:
        texts = [] if life.step is None else read_step(run, purpose="train", step=life.step)
    except AsyncFlowError as error:
        return [f"its text cannot be read: {error}"]
    found = next((text for text in texts if (text.serial, text.sample) == key), None)
    if found is None:
        return ["its text and the components of its reward are not kept (storage.samples sets how many are)"]
    return [
        f"prompt {_short(found.prompt)}",
        f"response {_short(found.response)} ({found.response_tokens} tokens, {plain(found.finish)})",
        _reward(found),
    ]


def _reward(text: SampleText) -> str:
    reward = f"no reward: {plain(text.failure)}" if text.reward is None else f"reward {text.reward:.4g}"
    parts = [f"{plain(name)} {plain(str(value))}" for name, value in text.details.items()]
    answer = f", answer {_short(text.answer)}" if text.answer else ""
    return reward + (f" ({', '.join(parts)})" if parts else "") + answer


def _short(text: str) -> str:
    text = plain(text.replace("\n", "\\n"))
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."


def _checkpoint(run: Path, life: SampleHistory) -> list[str]:
    """Return the oldest existing checkpoint that contains the sample."""
    if life.outcome != "trained" or life.step is None:
        return []
    steps = [step for step in Checkpoints(run / "checkpoints").steps() if step >= life.step]
    return [f"the oldest kept checkpoint that contains it is that of step {steps[0]}"] if steps else []
