"""Prompts of files: a task a row, in JSON lines, in Parquet files, or in folders of Hugging Face ``datasets``.

Opening a file reads all of it once, row by row, and keeps 24 bytes of each question: where its row is, a fingerprint
of its text, and its place in the order of the epoch. A prompt is read from the file when it is asked for.

Invariants: memory does not grow with the size of the rows; a file is used whole, unless its config says ``split:
hash``: then training and evaluation each take their part by ``held_out``, as of every source; a training source goes
through the file in a new keyed order each epoch, so that any serial can be had without those before it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from asyncflow.data.base import Message, Prompt, Purpose, digest, held_out
from asyncflow.errors import ManifestError

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


class Row(NamedTuple):
    """A row as a scan finds it. position: by which it is found again; place: the same for people."""

    position: int
    place: str
    fields: Mapping[str, Any]


class Rows(Protocol):
    """The rows of one file or folder."""

    name: str
    """Path, for messages."""

    def scan(self) -> Iterator[Row]:
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
        """Whether one of the tasks has this question."""
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
            question, _ = _question(asked, self._config.prompt, place=row.place)
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
        return Prompt(
            question=question,
            answer=None if answer is MISSING else answer,
            task=self._task,
            meta=meta,
            messages=messages,
        )


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
        messages = msgspec.convert(asked, tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise ManifestError(f"{field!r} is neither a text nor a list of messages: {error}", where=place) from error
    return json.dumps(asked), messages


def _fingerprint(question: str) -> int:
    return digest("question", question)
