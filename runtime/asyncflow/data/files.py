"""Prompts from files with one task per row: JSON lines, Parquet files, or folders of Hugging Face ``datasets``.

Opening a file reads all rows once and keeps 24 bytes per question: the position of its row, a fingerprint of its text,
and its place in the order of the epoch. A prompt is read from the file on request: a JSON line by the offset of its
first byte, other rows by their number. Parquet files and folders of ``datasets`` are read as memory-mapped Arrow files.
Rows of a Parquet file cannot be read one by one, so its used columns are first written to an Arrow file in the cache
folder. The package ``datasets`` is imported only if it is needed.

Invariants: memory does not grow with the size of the rows. A file is used whole, unless its config has ``split: hash``;
then ``held_out`` divides it between training and evaluation, as for every other source. A training source reads the
file in a new keyed order in each epoch, so that any serial can be read without the serials before it. A JSON line is
read from the file that was opened, and is refused if the file changed meanwhile. A used column that JSON cannot
represent is refused when the source is opened, unless config.meta leaves it out.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from asyncflow.data.base import Message, Prompt, Purpose, digest, held_out
from asyncflow.errors import ManifestError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa


MISSING = object()
"""The value of a field that a row does not have."""


class FileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Config of a source that is a file.

    prompt: name of the field (or column) with the question, a string or a list of {role, content}; answer: name of the
    field with the answer, any JSON; meta: the fields that the reward function receives, None for all other fields;
    split: whether the file is used whole, or divided into training and held-out questions. A dot in a name selects a
    nested field.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    meta: tuple[str, ...] | None = None
    split: Literal["whole", "hash"] = "whole"


class FileRow(NamedTuple):
    """A row that a scan found. position: the key by which ``Rows.row`` reads it; place: its location, for messages."""

    position: int
    place: str
    fields: Mapping[str, Any]


class Rows(Protocol):
    """The rows of one file or folder."""

    name: str
    """Path, for messages."""

    def scan(self) -> Iterator[FileRow]:
        """Yield all rows in order, with at least the field of the prompt. Raises ManifestError for a bad row."""

    def row(self, position: int) -> Mapping[str, Any]:
        """Return the fields of the row at ``position``. Raises ManifestError if the file has changed."""

    @property
    def fields(self) -> Collection[str]:
        """Names of the fields of all rows, complete after the scan."""


def read_config(config: Mapping[str, Any], *, where: str) -> FileConfig:
    """Return the config of a source. Raises ManifestError if it is invalid."""
    try:
        return msgspec.convert(dict(config), FileConfig)
    except msgspec.ValidationError as error:
        raise ManifestError(
            f"config {dict(config)} is invalid: {error}",
            where=where,
            hint="Set only prompt, answer, meta (names of fields) and split (whole or hash)",
        ) from error


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """Return the field ``name``, or the nested field that its dots select; MISSING if there is none."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


class FileSource:
    """The tasks of one file. Opening reads it once; raises ManifestError with path and row if it cannot be used.

    task: name of the checker's task; size: number of prompts to use, None for all; where: field of the manifest.
    Of several rows with the same question only the first is used.
    """

    available: int | None = None

    def __init__(
        self,
        rows: Rows,
        config: FileConfig,
        *,
        task: str,
        seed: int,
        purpose: Purpose,
        size: int | None,
        where: str,
    ) -> None:
        self._rows = rows
        self._config = config
        self._task = task
        self._seed = seed
        self._purpose = purpose
        self._orders: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        positions, fingerprints, held = self._scan()
        self._check_fields(where)
        _, first = np.unique(fingerprints, return_index=True)
        first.sort()
        kept = first if config.split == "whole" else first[held[first] == (purpose == "eval")]
        if len(kept) < (size or 1):
            used = "all of them" if config.split == "whole" else "only a part of them"
            uses = f"it has {len(first)} different questions, and config.split: {config.split} uses {used}"
            raise ManifestError(
                f"has {len(kept)} {'training' if purpose == 'train' else 'held-out'} prompts, not {size or 1}",
                where=rows.name,
                hint=f"Set size to {len(kept)}, or add rows: {uses}" if size and len(kept) else f"Add rows: {uses}",
            )
        self._positions = positions[kept[:size]]
        self._fingerprints = np.sort(fingerprints[kept[:size]])
        self.size = len(self._positions)

    def prompt(self, serial: int) -> Prompt:
        """Return task ``serial``."""
        epoch, place = divmod(serial, self.size)
        if epoch and self._purpose == "eval":
            raise IndexError(f"{self._rows.name} has {self.size} held-out prompts, not {serial + 1}")
        row = self._rows.row(int(self._positions[self._order(epoch)[place]]))
        return self._prompt(row, place=self._rows.name)

    def contains(self, question: str) -> bool:
        """Return whether one of the tasks has this question."""
        fingerprint = _fingerprint(question)
        at = np.searchsorted(self._fingerprints, np.uint64(fingerprint))
        return bool(at < self.size and self._fingerprints[at] == fingerprint)

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if epoch not in self._orders:
            keys = np.fromiter((digest(self._seed, epoch, n) for n in range(self.size)), np.uint64, self.size)
            self._orders = {epoch: keys.argsort(kind="stable")}
        return self._orders[epoch]

    def _scan(self) -> tuple[Any, Any, Any]:
        """Return three arrays over the rows: position, fingerprint of the question, whether it is held out."""
        positions, fingerprints, held = array("q"), array("Q"), bytearray()
        missing, first_missing, fields = 0, "", list[str]()
        for row in self._rows.scan():
            if field_of(row.fields, self._config.prompt) is MISSING:
                missing += 1
                first_missing, fields = first_missing or row.place, fields or sorted(row.fields)
                continue
            question = self._prompt(row.fields, place=row.place).question
            positions.append(row.position)
            fingerprints.append(_fingerprint(question))
            held.append(held_out(question))
        rows = len(positions) + missing
        if not rows:
            raise empty(self._rows.name)
        if missing:
            raise ManifestError(
                f"the row has no field {self._config.prompt!r}, like {missing} of {rows} rows",
                where=first_missing,
                hint=f"Set config.prompt to the field with the question; this row has: {', '.join(fields) or 'none'}",
            )
        return np.asarray(positions, np.int64), np.asarray(fingerprints, np.uint64), np.asarray(held, np.bool_)

    def _check_fields(self, where: str) -> None:
        """Raise ManifestError if the config names a field that no row has."""
        config, fields = self._config, self._rows.fields
        answer = () if config.answer == FileConfig().answer else (config.answer,)
        for name in (*answer, *(config.meta or ())):
            if name not in fields and name.partition(".")[0] not in fields:
                hint = f"Name one of its fields: {', '.join(sorted(fields))}"
                raise ManifestError(f"{self._rows.name} has no field {name!r}", where=where, hint=hint)

    def _prompt(self, fields: Mapping[str, Any], *, place: str) -> Prompt:
        config = self._config
        question, messages = _question(field_of(fields, config.prompt), config.prompt, place=place)
        answer = field_of(fields, config.answer)
        used = (config.prompt, config.answer)
        named = config.meta if config.meta is not None else [name for name in fields if name not in used]
        meta = {name: value for name in named if (value := field_of(fields, name)) is not MISSING}
        prompt = Prompt(
            question=question,
            answer=None if answer is MISSING else answer,
            task=self._task,
            meta=meta,
            messages=messages,
        )
        try:
            prompt.packed()
        except ValueError as error:
            hint = "Write integers of more than 64 bits as strings, and remove unpaired surrogates from strings"
            raise ManifestError(f"the row has a value that cannot be sent: {error}", where=place, hint=hint) from error
        return prompt


def columns_used(config: FileConfig, columns: Iterable[str]) -> list[str]:
    """Return the columns of a table from which prompts are made."""
    columns = list(columns)
    if config.meta is None:
        return columns
    named = {config.prompt, config.answer, *config.meta}
    named |= {name.partition(".")[0] for name in named}
    return [column for column in columns if column in named]


def empty(name: str) -> ManifestError:
    """Return the error for data without rows."""
    return ManifestError("there are no rows", where=name, hint="Add one row for each task")


def _question(value: Any, field: str, *, place: str) -> tuple[str, tuple[Message, ...]]:
    if isinstance(value, str):
        return value, ()
    try:
        messages = msgspec.convert(value, Annotated[tuple[Message, ...], msgspec.Meta(min_length=1)])
    except msgspec.ValidationError as error:
        hint = "Write a string, or {role, content} for each turn"
        what = f"the field {field!r} is neither a string nor a list of messages: {error}"
        raise ManifestError(what, where=place, hint=hint) from error
    if any(message.get("tool_calls") for message in value):
        what = f"a message in the field {field!r} has tool_calls, which the model would not see"
        raise ManifestError(what, where=place, hint="Write the calls into its content, in the form of the model")
    return json.dumps(value), messages


def _fingerprint(question: str) -> int:
    return digest("question", question)


_PIECE = 1 << 16
_EACH_LINE = "Write one JSON object per line, in UTF-8, for each task; other files need parquet:// or dataset://"


class JsonlRows:
    """The rows of the JSON lines file at ``path``. Raises ManifestError if it cannot be read.

    where: the field of the manifest that names the file.
    """

    def __init__(self, path: Path, *, where: str) -> None:
        self.name = str(path)
        self.fields: set[str] = set()
        try:
            self._file = path.open("rb", buffering=_PIECE)
            self._state = self._stat()
        except OSError as error:
            hint = f"Correct {where}, or make the file readable"
            raise ManifestError(f"the file cannot be read: {error}", where=self.name, hint=hint) from error

    def scan(self) -> Iterator[FileRow]:
        """Yield the rows in order. Raises ManifestError with the line number if a line is not a JSON object."""
        position = 0
        try:
            for number, line in enumerate(self._file, 1):
                if line.strip():
                    place = f"{self.name}:{number}"
                    fields = _fields(line, place=place)
                    self.fields.update(fields)
                    yield FileRow(position, place, fields)
                position += len(line)
        except OSError as error:
            hint = "Check the disk, and start the job again"
            raise ManifestError(f"the file cannot be read: {error}", where=self.name, hint=hint) from error

    def row(self, position: int) -> dict[str, Any]:
        """Return the row whose line begins at ``position``."""
        if self._stat() != self._state:
            raise ManifestError(
                "the file was written to while the job reads it",
                where=self.name,
                hint="Replace the file by renaming a new one, and resume the run; or use another file name",
            )
        line, end = bytearray(), -1
        while end < 0 and (piece := os.pread(self._file.fileno(), _PIECE, position + len(line))):
            end = piece.find(b"\n")
            line += piece if end < 0 else piece[:end]
        return _fields(line, place=self.name)

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


def _fields(line: bytes | bytearray, *, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ManifestError(f"the line is not JSON: {error}", where=place, hint=_EACH_LINE) from error
    if not isinstance(fields, dict):
        raise ManifestError("the line is not a JSON object", where=place, hint=_EACH_LINE)
    return fields


_BATCH = 1000


class ArrowTable:
    """The rows of a data set. Raises ManifestError if JSON cannot represent a used column."""

    def __init__(self, data: datasets.Dataset, config: FileConfig, *, name: str) -> None:
        self.name = name
        self.fields = list(data.column_names)
        used = columns_used(config, self.fields)
        _check_types(data.features.arrow_schema, used, name=name)
        self._data = data.select_columns(used).with_format("arrow")
        self._scanned = [c for c in used if c in (config.prompt, config.prompt.partition(".")[0])] or used

    def scan(self) -> Iterator[FileRow]:
        """Yield the rows in order, with the column of the prompt only; with all columns if there is no such column."""
        number = 0
        for batch in self._data.select_columns(self._scanned).iter(_BATCH):
            for fields in batch.to_pylist():
                yield FileRow(number, f"{self.name}, row {number}", fields)
                number += 1

    def row(self, position: int) -> dict[str, Any]:
        """Return row ``position``."""
        row: dict[str, Any] = self._data[position].to_pylist()[0]
        return row


def open_parquet(path: Path, config: FileConfig, *, cache: Path, where: str) -> ArrowTable:
    """Open a Parquet file, or all ``*.parquet`` files in a folder and its subfolders, in the order of their paths.

    cache: folder for the Arrow file. Raises ManifestError if the files cannot be read.
    """
    library = _library("parquet", where=where)
    parquet = importlib.import_module("pyarrow.parquet")
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        hint = "Set the path of a Parquet file, or of a folder of Parquet files"
        raise ManifestError(f"there is no Parquet file at {path}", where=where, hint=hint)
    try:
        if not any(parquet.read_metadata(file).num_rows for file in files):
            raise empty(str(path))
        columns = columns_used(config, parquet.read_schema(files[0]).names)
        paths = [str(file) for file in files]
        data = library.Dataset.from_parquet(paths, cache_dir=str(cache), columns=columns, batch_size=_BATCH)
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        reason = error.__cause__ or error
        hint = "Check that all files are Parquet files with the same columns"
        raise ManifestError(f"the data cannot be read: {reason}", where=str(path), hint=hint) from error
    return ArrowTable(data, config, name=str(path))


def open_saved(path: Path, config: FileConfig, *, where: str) -> ArrowTable:
    """Open a folder that ``Dataset.save_to_disk`` wrote. Raises ManifestError for other folders, or several splits."""
    library = _library("dataset", where=where)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(file.parent.name for file in path.glob("*/state.json"))
        what = f"{path} contains the splits {', '.join(splits) or 'none'}"
        raise ManifestError(what, where=where, hint="Name one split: dataset://PATH/SPLIT")
    if not (path / "state.json").is_file():
        siblings = sorted(file.parent.name for file in path.parent.glob("*/state.json"))
        near = f"; such folders next to it: {', '.join(siblings)}" if siblings else ""
        raise ManifestError(
            f"{path} is not a folder that save_to_disk of datasets wrote{near}",
            where=where,
            hint="Set the path of such a folder; for Parquet files use parquet://PATH",
        )
    try:
        data = library.load_from_disk(str(path), keep_in_memory=False)
    except IndexError:  # the library concatenates the tables of the folder, and there are none
        raise empty(str(path)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Copy or save the folder again"
        raise ManifestError(f"the data cannot be read: {error}", where=str(path), hint=hint) from error
    return ArrowTable(data, config, name=str(path))


def _library(scheme: str, *, where: str) -> Any:
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise ManifestError(
            f"{scheme}:// needs the package datasets: {error}", where=where, hint="Run pip install 'asyncflow[data]'"
        ) from error
    library.disable_progress_bars()
    library.utils.logging.set_verbosity(logging.CRITICAL)
    return library


def _check_types(schema: pa.Schema, used: Sequence[str], *, name: str) -> None:
    types = importlib.import_module("pyarrow.types")
    if wrong := [field for field in schema if field.name in used and not _is_json(types, field.type)]:
        usable = [column for column in used if column not in {field.name for field in wrong}]
        raise ManifestError(
            f"the column {wrong[0].name!r} has the type {wrong[0].type}, which JSON cannot represent",
            where=name,
            hint=f"Set config.meta to the columns that the reward needs, out of: {', '.join(usable) or 'none'}",
        )


def _is_json(types: Any, kind: Any) -> bool:
    if types.is_struct(kind):
        return all(_is_json(types, field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return _is_json(types, kind.value_type)
    plain = (types.is_string, types.is_large_string, types.is_string_view, types.is_boolean, types.is_integer)
    return types.is_floating(kind) or types.is_null(kind) or any(is_kind(kind) for is_kind in plain)
