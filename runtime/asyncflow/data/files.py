"""Prompts of files: a task a row, in JSON lines, in Parquet files, or in folders of Hugging Face ``datasets``.

Opening a file reads all of it once, row by row, and keeps 24 bytes of each question: where its row is, a fingerprint
of its text, and its place in the order of the epoch. A prompt is read from the file when it is asked for: a line of
JSON by the byte at which it begins, other rows by their number. Parquet files and folders of ``datasets`` are read as
Arrow files mapped into memory; a Parquet file has no rows that could be read one by one, so its used columns are
written into such a file first, in a folder for what can be made again. The package is imported where it is needed.

Invariants: memory does not grow with the size of the rows; a file is used whole, unless its config says ``split:
hash``: then training and evaluation each take their part by ``held_out``, as of every source; a training source goes
through the file in a new keyed order each epoch, so that any serial can be had without those before it. A JSON line is
read from the file that was opened, and refused where it was written into meanwhile; a column that JSON cannot hold is
refused when the source is opened, unless config.meta leaves it out.
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

    prompt, answer: names of the fields (or columns) with the question, a text or a list of {role, content}, and with
    the answer, any JSON; meta: the fields that the reward function is given, all others where None; split: whether the
    file is used whole or parted into training and held-out questions. A dot leads into a nested field.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    meta: tuple[str, ...] | None = None
    split: Literal["whole", "hash"] = "whole"


class FileRow(NamedTuple):
    """A row as a scan finds it. position: by which it is found again; place: the same for people."""

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
        """Return the fields of the row at ``position``. Raises ManifestError where it is not there any more."""

    @property
    def fields(self) -> Collection[str]:
        """Names of the fields of all rows, known after the scan."""


def read_config(config: Mapping[str, Any], *, where: str) -> FileConfig:
    """Return a source's config. Raises ManifestError where it is not understood."""
    try:
        return msgspec.convert(dict(config), FileConfig)
    except msgspec.ValidationError as error:
        raise ManifestError(
            f"config {dict(config)} is not understood: {error}",
            where=where,
            hint="It may hold prompt, answer, meta (names of fields) and split (whole or hash)",
        ) from error


def field_of(fields: Mapping[str, Any], name: str) -> Any:
    """Return the field ``name``, or the nested one that its dots lead to; MISSING where there is none."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


class FileSource:
    """The tasks of one file. Opening reads it once; raises ManifestError with path and row where it cannot be used.

    task: name of the checker's task; size: how many prompts to take, all where None; where: field of the manifest.
    Of rows with the same question the first is kept.
    """

    there: int | None = None

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
            taken = "all of them" if config.split == "whole" else "its part of them"
            raise ManifestError(
                f"has {len(kept)} {'training' if purpose == 'train' else 'held-out'} prompts, not {size or 1}",
                where=rows.name,
                hint=f"The file has {len(first)} different questions, and config.split: {config.split} takes {taken}",
            )
        self._positions = positions[kept[:size]]
        self._asked = np.sort(fingerprints[kept[:size]])
        self.size = len(self._positions)

    def prompt(self, serial: int) -> Prompt:
        """Return task ``serial``."""
        epoch, place = divmod(serial, self.size)
        if epoch and self._purpose == "eval":
            raise IndexError(f"{self._rows.name} has {self.size} held-out prompts, not {serial + 1}")
        row = self._rows.row(int(self._positions[self._order(epoch)[place]]))
        return self._prompt(row, place=self._rows.name)

    def asks(self, question: str) -> bool:
        """Return whether one of the tasks has this question."""
        fingerprint = _fingerprint(question)
        at = np.searchsorted(self._asked, np.uint64(fingerprint))
        return bool(at < self.size and self._asked[at] == fingerprint)

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if epoch not in self._orders:
            keys = np.fromiter((digest(self._seed, epoch, n) for n in range(self.size)), np.uint64, self.size)
            self._orders = {epoch: keys.argsort(kind="stable")}
        return self._orders[epoch]

    def _scan(self) -> tuple[Any, Any, Any]:
        """Return, of each row: its position, the fingerprint of its question, and whether that is held out."""
        positions, fingerprints, held = array("q"), array("Q"), bytearray()
        lacking, first_lacking, fields = 0, "", list[str]()
        for row in self._rows.scan():
            asked = field_of(row.fields, self._config.prompt)
            if asked is MISSING:
                lacking += 1
                first_lacking, fields = first_lacking or row.place, fields or sorted(row.fields)
                continue
            question = self._prompt(row.fields, place=row.place).question
            positions.append(row.position)
            fingerprints.append(_fingerprint(question))
            held.append(held_out(question))
        rows = len(positions) + lacking
        if not rows:
            raise empty(self._rows.name)
        if lacking:
            raise ManifestError(
                f"has no field {self._config.prompt!r}, as {lacking} of {rows} rows",
                where=first_lacking,
                hint=f"Name the one with the question in config.prompt; it has: {', '.join(fields) or 'none'}",
            )
        return np.asarray(positions, np.int64), np.asarray(fingerprints, np.uint64), np.asarray(held, np.bool_)

    def _check_fields(self, where: str) -> None:
        """Refuse a field that was named and that no row has. Raises ManifestError."""
        config, there = self._config, self._rows.fields
        answer = () if config.answer == FileConfig().answer else (config.answer,)
        for name in (*answer, *(config.meta or ())):
            if name not in there and name.partition(".")[0] not in there:
                known = ", ".join(sorted(there))
                raise ManifestError(f"{self._rows.name} has no field {name!r}", where=where, hint=f"It has: {known}")

    def _prompt(self, fields: Mapping[str, Any], *, place: str) -> Prompt:
        config = self._config
        question, messages = _question(field_of(fields, config.prompt), config.prompt, place=place)
        answer = field_of(fields, config.answer)
        taken = (config.prompt, config.answer)
        named = config.meta if config.meta is not None else [name for name in fields if name not in taken]
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
            hint = "Write a whole number of more than 64 bits as a text, and no half of a surrogate pair"
            raise ManifestError(f"holds what cannot be sent: {error}", where=place, hint=hint) from error
        return prompt


def columns_used(config: FileConfig, columns: Iterable[str]) -> list[str]:
    """Return those of a table's columns from which prompts are made."""
    columns = list(columns)
    if config.meta is None:
        return columns
    named = {config.prompt, config.answer, *config.meta}
    named |= {name.partition(".")[0] for name in named}
    return [column for column in columns if column in named]


def empty(name: str) -> ManifestError:
    """Return the error of a file without rows."""
    return ManifestError("is empty", where=name, hint="It needs a row for each task")


def _question(asked: Any, field: str, *, place: str) -> tuple[str, tuple[Message, ...]]:
    if isinstance(asked, str):
        return asked, ()
    try:
        messages = msgspec.convert(asked, Annotated[tuple[Message, ...], msgspec.Meta(min_length=1)])
    except msgspec.ValidationError as error:
        hint = "Give a text, or {role, content} for each turn"
        what = f"{field!r} is neither a text nor a list of messages: {error}"
        raise ManifestError(what, where=place, hint=hint) from error
    return json.dumps(asked), messages


def _fingerprint(question: str) -> int:
    return digest("question", question)


_PIECE = 1 << 16
_EACH_LINE = "Write one JSON object a line, a task each, in UTF-8"


class JsonlRows:
    """The rows of the file at ``path``. Raises ManifestError where it cannot be read; where: names it there."""

    def __init__(self, path: Path, *, where: str) -> None:
        self.name = str(path)
        self.fields: set[str] = set()
        try:
            self._file = path.open("rb", buffering=_PIECE)
            self._state = self._stat()
        except OSError as error:
            raise ManifestError(f"cannot be read: {error}", where=self.name, hint=f"{where} names it") from error

    def scan(self) -> Iterator[FileRow]:
        """Yield the rows in order. Raises ManifestError with the line's number for one that is no JSON object."""
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
            raise ManifestError(f"cannot be read: {error}", where=self.name) from error

    def row(self, position: int) -> dict[str, Any]:
        """Return the row whose line begins at ``position``."""
        if self._stat() != self._state:
            raise ManifestError(
                "was written into while the job reads it",
                where=self.name,
                hint="Put the new one into its place with a rename, and resume the run; or give it another name",
            )
        line = b""
        while b"\n" not in line and (more := os.pread(self._file.fileno(), _PIECE, position + len(line))):
            line += more
        return _fields(line.partition(b"\n")[0], place=self.name)

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns


def _fields(line: bytes, *, place: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ManifestError(f"is not JSON: {error}", where=place, hint=_EACH_LINE) from error
    if not isinstance(fields, dict):
        raise ManifestError("is not a JSON object", where=place, hint=_EACH_LINE)
    return fields


_BATCH = 1000


class ArrowTable:
    """The rows of a data set. Raises ManifestError for a column that is used and that JSON cannot hold."""

    def __init__(self, data: datasets.Dataset, config: FileConfig, *, name: str) -> None:
        self.name = name
        self.fields = list(data.column_names)
        used = columns_used(config, self.fields)
        _check_types(data.features.arrow_schema, used, name=name)
        self._data = data.select_columns(used).with_format("arrow")
        self._asked = [c for c in used if c in (config.prompt, config.prompt.partition(".")[0])] or used

    def scan(self) -> Iterator[FileRow]:
        """Yield the rows in order, with the column of the prompt; with all where there is no such column."""
        number = 0
        for batch in self._data.select_columns(self._asked).iter(_BATCH):
            for fields in batch.to_pylist():
                yield FileRow(number, f"{self.name}, row {number}", fields)
                number += 1

    def row(self, position: int) -> dict[str, Any]:
        """Return row ``position``."""
        row: dict[str, Any] = self._data[position].to_pylist()[0]
        return row


def open_parquet(path: Path, config: FileConfig, *, cache: Path, where: str) -> ArrowTable:
    """Open a Parquet file, or all ``*.parquet`` in a folder and below, in order of their paths.

    cache: folder for the Arrow file. Raises ManifestError where they cannot be read.
    """
    library = _library("parquet", where=where)
    parquet = importlib.import_module("pyarrow.parquet")
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ManifestError(f"there is no Parquet file at {path}", where=where, hint="Give a file, or a folder of them")
    try:
        if not any(parquet.read_metadata(file).num_rows for file in files):
            raise empty(str(path))
        columns = columns_used(config, parquet.read_schema(files[0]).names)
        paths = [str(file) for file in files]
        data = library.Dataset.from_parquet(paths, cache_dir=str(cache), columns=columns, batch_size=_BATCH)
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        reason = error.__cause__ or error
        raise ManifestError(
            f"cannot be read: {reason}", where=str(path), hint="Its files have to be Parquet, with the same columns"
        ) from error
    return ArrowTable(data, config, name=str(path))


def open_saved(path: Path, config: FileConfig, *, where: str) -> ArrowTable:
    """Open a folder that ``Dataset.save_to_disk`` wrote. Raises ManifestError where it is none, or holds several."""
    library = _library("dataset", where=where)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(file.parent.name for file in path.glob("*/state.json"))
        raise ManifestError(
            f"{path} holds the splits {', '.join(splits) or 'none'}", where=where, hint="Name one: dataset://PATH/SPLIT"
        )
    if not (path / "state.json").is_file():
        beside = sorted(file.parent.name for file in path.parent.glob("*/state.json"))
        near = f"; beside it: {', '.join(beside)}" if beside else ""
        raise ManifestError(
            f"{path} is no folder that save_to_disk of `datasets` wrote{near}",
            where=where,
            hint="Give one; Parquet files are opened by parquet://PATH",
        )
    try:
        data = library.load_from_disk(str(path), keep_in_memory=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"cannot be read: {error}", where=str(path), hint="Copy or save it again") from error
    return ArrowTable(data, config, name=str(path))


def _library(scheme: str, *, where: str) -> Any:
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise ManifestError(
            f"`{scheme}://` needs the package datasets: {error}", where=where, hint="pip install 'asyncflow[data]'"
        ) from error
    library.disable_progress_bars()
    library.utils.logging.set_verbosity(logging.CRITICAL)
    return library


def _check_types(schema: pa.Schema, used: Sequence[str], *, name: str) -> None:
    types = importlib.import_module("pyarrow.types")
    if wrong := [field for field in schema if field.name in used and not _is_json(types, field.type)]:
        sound = [column for column in used if column not in {field.name for field in wrong}]
        raise ManifestError(
            f"column {wrong[0].name!r} is {wrong[0].type}, which JSON cannot hold",
            where=name,
            hint=f"List in config.meta the columns that the reward needs, of: {', '.join(sound) or 'none'}",
        )


def _is_json(types: Any, kind: Any) -> bool:
    if types.is_struct(kind):
        return all(_is_json(types, field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return _is_json(types, kind.value_type)
    plain = (types.is_string, types.is_large_string, types.is_string_view, types.is_boolean, types.is_integer)
    return types.is_floating(kind) or types.is_null(kind) or any(is_kind(kind) for is_kind in plain)
