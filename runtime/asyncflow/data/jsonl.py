"""Prompts of a JSONL file: ``jsonl://PATH?prompt=FIELD&answer=FIELD``, one task a line.

Invariants: a file is used whole, unless its config says ``split: hash``: then training and evaluation each take their
part by ``held_out``, as of every source; a training source goes through the file in a new keyed order each epoch, so
that any serial can be had without those before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.data.base import Message, Prompt, Purpose, digest, held_out
from asyncflow.errors import ManifestError


class JsonlSource:
    """The tasks of one file, held in memory."""

    def __init__(self, prompts: list[Prompt], *, name: str, seed: int, purpose: Purpose, size: int | None) -> None:
        self._prompts = prompts[:size]
        self._name = name
        self._seed = seed
        self._cycles = purpose == "train"
        self._orders: dict[int, list[int]] = {}
        self.size = len(self._prompts)

    def prompt(self, serial: int) -> Prompt:
        """Give task ``serial``."""
        epoch, place = divmod(serial, self.size)
        if epoch and not self._cycles:
            raise IndexError(f"{self._name} has {self.size} held-out prompts, not {serial + 1}")
        return self._prompts[self._order(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            keyed = sorted(range(len(self._prompts)), key=lambda line: digest(self._seed, epoch, line))
            self._orders = {epoch: keyed}
        return self._orders[epoch]


def open_jsonl(
    path: Path,
    *,
    prompt_field: str,
    answer_field: str,
    config: Mapping[str, Any],
    seed: int,
    purpose: Purpose,
    size: int | None,
    where: str,
) -> JsonlSource:
    """Read the file. Raises ManifestError with path and line where it cannot be used.

    prompt_field: a text, or a list of {role, content}; answer_field: any JSON. The other fields of a line are the
    task's ``meta``. config: ``split``: ``whole`` (the default) or ``hash``; of equal questions the first is kept.
    """
    split = config.get("split", "whole")
    unknown = sorted(set(config) - {"split"})
    if unknown or split not in ("hash", "whole"):
        raise ManifestError(
            f"config {dict(config)} is not understood", where=where, hint="it may hold `split: whole` or `split: hash`"
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"cannot be read: {error}", where=str(path), hint=f"{where} names it") from error
    rows = {number: _fields(line, where=f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()}
    if not rows:
        raise ManifestError("is empty", where=str(path), hint="Write one JSON object a line, a task each")
    if lacking := [number for number, fields in rows.items() if prompt_field not in fields]:
        raise ManifestError(
            f"has no field {prompt_field!r}, as {len(lacking)} of {len(rows)} lines",
            where=f"{path}:{lacking[0]}",
            hint="name it: jsonl://PATH?prompt=FIELD&answer=FIELD",
        )
    read: dict[str, Prompt] = {}
    for number, fields in rows.items():
        prompt = _prompt(fields, prompt_field, answer_field, where=f"{path}:{number}")
        read.setdefault(prompt.question, prompt)
    prompts = [p for p in read.values() if split == "whole" or held_out(p.question) == (purpose == "eval")]
    if len(prompts) < (size or 1):
        taken = "all of them" if split == "whole" else "its part of them"
        raise ManifestError(
            f"has {len(prompts)} {'training' if purpose == 'train' else 'held-out'} prompts, not {size or 1}",
            where=str(path),
            hint=f"The file has {len(read)} different questions, and config.split: {split} takes {taken}",
        )
    return JsonlSource(prompts, name=str(path), seed=seed, purpose=purpose, size=size)


def _fields(line: str, *, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ManifestError(f"is not JSON: {error}", where=where) from error
    if not isinstance(fields, dict):
        raise ManifestError("is not a JSON object", where=where, hint="Write one JSON object a line, a task each")
    return fields


def _prompt(fields: dict[str, Any], prompt_field: str, answer_field: str, *, where: str) -> Prompt:
    asked = fields.pop(prompt_field)
    answer = fields.pop(answer_field, None)
    if isinstance(asked, str):
        return Prompt(question=asked, answer=answer, task="jsonl", meta=fields)
    try:
        messages = msgspec.convert(asked, tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise ManifestError(
            f"{prompt_field!r} is neither a text nor a list of messages: {error}", where=where
        ) from error
    return Prompt(question=json.dumps(asked), answer=answer, task="jsonl", meta=fields, messages=messages)
