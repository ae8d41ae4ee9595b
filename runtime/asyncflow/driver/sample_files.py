"""Files with the texts of samples, one file for each step and each evaluation with kept samples.

    DIR/samples/step-000012.jsonl  eval-000010.jsonl  or .parquet

Invariants: a reader sees a complete file or none, also during the run; a step that is made again replaces its file; the
error for a file that is damaged, or in a format that cannot be read here, names the file and affects its samples only.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct

from asyncflow.durable import make_folder, write_whole
from asyncflow.errors import AsyncFlowError, ManifestError

SAMPLES = "samples"
"""Folder of a run with these files."""
Format = Literal["jsonl", "parquet"]
Purpose = Literal["train", "eval"]
_FORMATS = get_args(Format)
_PREFIX: dict[Purpose, str] = {"train": "step", "eval": "eval"}
_PURPOSE = {prefix: purpose for purpose, prefix in _PREFIX.items()}
_NAME = re.compile(r"(step|eval)-([0-9]{6,})\.(jsonl|parquet)")
_LACKS_PYARROW = "Run pip install 'asyncflow[data]', or set storage.samples.format: jsonl"


class SampleText(Struct, frozen=True, kw_only=True):
    """One sample in readable form.

    step: the step that trains it, or whose weights are evaluated; serial: serial of the prompt, in an evaluation its
    index in all sets; set: name of the evaluation's set; drawn: whether it belongs to the unbiased draw, or is kept for
    its reward only; prompt, response: texts with special tokens; answer: answer in the data, as JSON; reward: None if
    the reward failed for the reason ``failure``; advantage: None in an evaluation, or if the trainer computes
    advantages; version_min, version_max: steps of the weights that generated its oldest and newest token; details:
    further JSON values by name: the other tags of the row, such as components of the reward, and the details that the
    reward function returned.
    """

    purpose: Purpose
    step: int
    serial: int
    sample: int
    set: str = ""
    drawn: bool
    prompt: str
    response: str
    answer: str
    reward: float | None
    failure: str = ""
    advantage: float | None = None
    prompt_tokens: int
    response_tokens: int
    version_min: int
    version_max: int
    finish: str
    details: dict[str, Any] = {}


class SampleFile(NamedTuple):
    """One file, and the purpose and step in its name."""

    path: Path
    purpose: Purpose
    step: int


def check_format(form: Format) -> None:
    """Refuse a format that this machine cannot write. Raises ManifestError."""
    if form == "parquet" and find_spec("pyarrow") is None:
        raise ManifestError("not installed: pyarrow", where="spec.storage.samples.format", hint=_LACKS_PYARROW)


def write_samples(run: Path, samples: Sequence[SampleText], *, purpose: Purpose, step: int, form: Format) -> None:
    """Replace the samples of a step or an evaluation. Raises OSError."""
    folder = run / SAMPLES
    make_folder(folder)
    name = f"{_PREFIX[purpose]}-{step:06d}"
    ordered = sorted(samples, key=lambda sample: (sample.serial, sample.sample))
    write_whole(folder / f"{name}.{form}", _parquet(ordered) if form == "parquet" else _jsonl(ordered))
    for other in _FORMATS:
        if other != form:
            (folder / f"{name}.{other}").unlink(missing_ok=True)


def sample_files(run: Path) -> list[SampleFile]:
    """Return the files of a run, those of steps before those of evaluations, each in the order of the steps."""
    found = []
    for path in (run / SAMPLES).glob("*"):
        if match := _NAME.fullmatch(path.name):
            found.append(SampleFile(path, _PURPOSE[match[1]], int(match[2])))
    return sorted(found, key=lambda file: (file.purpose == "eval", file.step))


def kept_steps(run: Path) -> dict[Purpose, list[int]]:
    """Return the steps of ``sample_files``, by purpose. A long run has very many, so no path is made for each."""
    names = os.listdir(run / SAMPLES) if (run / SAMPLES).is_dir() else ()
    found: dict[Purpose, set[int]] = {purpose: set() for purpose in _PREFIX}
    for match in filter(None, map(_NAME.fullmatch, names)):
        found[_PURPOSE[match[1]]].add(int(match[2]))
    return {purpose: sorted(steps) for purpose, steps in found.items()}


def read_samples(path: Path) -> list[SampleText]:
    """Return the samples of one file. Raises AsyncFlowError if it cannot be read."""
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        return [msgspec.json.decode(line, type=SampleText) for line in path.read_bytes().splitlines()]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise AsyncFlowError(f"cannot be read: {error}", where=str(path)) from error


def read_step(run: Path, *, purpose: Purpose, step: int) -> list[SampleText]:
    """Return the kept samples of a step or an evaluation, none if there is no file. Raises AsyncFlowError."""
    paths = [run / SAMPLES / f"{_PREFIX[purpose]}-{step:06d}.{form}" for form in _FORMATS]
    return [sample for path in paths if path.is_file() for sample in read_samples(path)]


def _jsonl(samples: Iterable[SampleText]) -> bytes:
    return b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)


def _parquet(samples: Sequence[SampleText]) -> bytes:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    kinds: dict[Any, Any] = {str: arrow.string(), int: arrow.int64(), bool: arrow.bool_()}
    kinds |= {float | None: arrow.float64(), Purpose: arrow.string(), dict[str, Any]: arrow.string()}
    fields = msgspec.structs.fields(SampleText)
    schema = arrow.schema([(field.name, kinds[field.type]) for field in fields])
    columns = [{**msgspec.structs.asdict(one), "details": msgspec.json.encode(one.details).decode()} for one in samples]
    sink = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(columns, schema=schema), sink, compression="zstd")
    return sink.getvalue()


def _read_parquet(path: Path) -> list[SampleText]:
    if find_spec("pyarrow") is None:
        raise AsyncFlowError("not installed: pyarrow", where=str(path), hint="Run pip install 'asyncflow[data]'")
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        rows = parquet.read_table(path).to_pylist()
    except arrow.ArrowException as error:
        raise AsyncFlowError(f"cannot be read: {error}", where=str(path)) from error
    return [msgspec.convert({**row, "details": msgspec.json.decode(row["details"])}, SampleText) for row in rows]
