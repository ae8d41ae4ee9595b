"""A run's folder that is written bit by bit, sinks that a third party offers, and a reader of W&B's files."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job, to_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"

THIRD_PARTY = """
import json, os, sys, time
from pathlib import Path
import msgspec
from asyncflow.telemetry.sinks.base import MetricSink

class Options(msgspec.Struct, frozen=True):
    raises: int = 0
    hangs: bool = False

class Lines(MetricSink):
    Options = Options

    def __init__(self, options, *, run):
        self._options, self._file = options, run.own / "lines"
        starts = run.own / "starts"
        count = len(starts.read_bytes()) if starts.exists() else 0
        with starts.open("ab") as file:
            file.write(b".")
        self._fails = count < options.raises

    def write(self, step, values, *, at):
        if self._fails:
            raise ConnectionError("the server is\\naway: " + "0.25, " * 400)
        with self._file.open("a") as file:
            file.write(f"{step} {len(values)}\\n")

    def rewind(self, step):
        with self._file.open("a") as file:
            file.write(f"again {step}\\n")

    def flush(self):
        pass

    def close(self, phase):
        while self._options.hangs:
            time.sleep(60)
        with self._file.open("a") as file:
            file.write(f"closed {phase}\\n")

class Absent(Lines):
    needs = {"nowhere_at_all": "nowhere-at-all"}
"""


def third_party(folder: Path) -> Path:
    """Install a package that offers the sinks ``lines`` and ``absent``; return what to put on the path."""
    made = folder / "site"
    (made / "third_sinks-1.dist-info").mkdir(parents=True)
    (made / "third_sinks.py").write_text(THIRD_PARTY)
    (made / "third_sinks-1.dist-info" / "METADATA").write_text("Name: third-sinks\nVersion: 1\n")
    points = "[asyncflow.metric_sinks]\nlines = third_sinks:Lines\nabsent = third_sinks:Absent\n"
    (made / "third_sinks-1.dist-info" / "entry_points.txt").write_text(points)
    return made


def job_with(sinks: list[dict[str, Any]], *settings: str) -> RLJob:
    return load_job(EXAMPLE, [f"telemetry.sinks={json.dumps(sinks)}", *settings])


def step(number: int, *, attempt: int = 0, at: float | None = None, **figures: float) -> dict[str, Any]:
    line = {"at": float(number) if at is None else at, "step": number, "attempt": attempt, "samples": 8, "tokens": 80}
    return {**line, "response_tokens": 64, "reward": number / 10, "keys": "ab", "published": True, **figures}


def evaluation(number: int, *, at: float) -> dict[str, Any]:
    result = {"prompts": 4, "accuracy": 0.5, "greedy": None, "reward": 0.25, "pass_at": {"2": 0.75}}
    return {"event": "evaluation", "at": at, "step": number, **result, "sets": {"hard": {**result, "accuracy": 0.0}}}


def again(number: int, *, at: float) -> dict[str, Any]:
    return {"event": "step made again", "at": at, "step": number}


class RunFolder:
    """The files that a driver writes."""

    def __init__(self, path: Path, job: RLJob) -> None:
        self.path = path
        path.mkdir(parents=True)
        (path / "job.yaml").write_text(to_yaml(job))

    def steps(self, *lines: Mapping[str, Any]) -> None:
        self._append("metrics.jsonl", lines)

    def events(self, *lines: Mapping[str, Any]) -> None:
        self._append("events.jsonl", lines)

    def ended(self, phase: str) -> None:
        (self.path / "summary.json").write_text(json.dumps({"phase": phase}))

    def _append(self, name: str, lines: tuple[Mapping[str, Any], ...]) -> None:
        with (self.path / name).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


_BLOCK, _HEADER, _WHOLE, _LAST = 32768, struct.Struct("<IHB"), 1, 4


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file of W&B: a log of LevelDB behind 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + _HEADER.size <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEADER.size:
            at += left
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        whole += data[at + _HEADER.size : at + _HEADER.size + length]
        at += _HEADER.size + length
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""
