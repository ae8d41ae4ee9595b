"""Data sources of a manifest: ``gym://``, ``tiny://``, ``put://``, or a file (``jsonl``, ``parquet``, ``dataset``).

Invariant: whatever is wrong with a source is known when it is opened: the first task has been made, unless it is put
later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from asyncflow.api.learning import FILE_SCHEMES, DataSpec, EvalDataSpec, TrainDataSpec
from asyncflow.data.base import GeneratedSource, PromptSource, Purpose
from asyncflow.data.files import FileConfig, FileSource, JsonlRows, Rows, open_parquet, open_saved, read_config
from asyncflow.data.generated import open_gym, open_tiny
from asyncflow.data.prompter import QUESTION, Encoder, Prompter, PromptFormat
from asyncflow.data.put import SCHEME, PutSource
from asyncflow.errors import ManifestError

CACHE = "data-cache"
"""Folder for what sources write and can make again."""
_FORMAT = ("template", "system", "chat", "chatOptions")
"""Settings that say how a question is put, and belong to no source's config."""


def open_source(data: TrainDataSpec, *, workdir: Path, cache: Path, where: str) -> PromptSource:
    """Open a source: of held-out prompts for an ``EvalDataSpec``, else of training prompts.

    workdir: the job's folder, where relative paths start; cache: folder for what a source writes and can make again;
    where: the field of the manifest. Raises ManifestError where the source, its config or its first task is wrong.
    """
    for name in _FORMAT:
        if name in data.config:
            raise ManifestError(
                f"{name} is no setting of the source", where=f"{where}.config", hint=f"Set {where}.{name}"
            )
    prompts = _open(data, workdir, cache, where=where)
    if prompts.there is None:
        prompts.prompt(0)
    return prompts


def _open(data: TrainDataSpec, workdir: Path, cache: Path, *, where: str) -> PromptSource:
    scheme, separator, rest = data.source.partition("://")
    scheme, rest = (scheme, rest) if separator else ("jsonl", data.source)
    purpose: Purpose = "eval" if isinstance(data, EvalDataSpec) else "train"
    size = data.size if isinstance(data, EvalDataSpec) else None
    if scheme == "gym":
        return open_gym(rest, config=data.config, seed=data.seed, purpose=purpose, size=size, where=where)
    if scheme == "tiny":
        if data.config:
            raise ManifestError(
                f"unknown fields {sorted(data.config)}", where=f"{where}.config", hint="a task has none"
            )
        return open_tiny(rest, seed=data.seed, purpose=purpose, size=size, where=where)
    if scheme == SCHEME and purpose == "train":
        if rest or data.config:
            what = f"{data.source!r} has nothing to be configured"
            raise ManifestError(what, where=f"{where}.source", hint="Give put://, without config")
        return PutSource()
    if scheme in FILE_SCHEMES:
        path, named = _file(rest, scheme=scheme, where=where)
        if twice := sorted(named.keys() & data.config.keys()):
            hint = "Name a field in the source or in config, not in both"
            raise ManifestError(f"{', '.join(twice)} is given twice", where=f"{where}.config", hint=hint)
        settings = read_config({**named, **data.config}, where=f"{where}.config")
        rows = _rows(scheme, workdir / path, settings, cache, where=f"{where}.source")
        return FileSource(
            rows, settings, task=scheme, seed=data.seed, purpose=purpose, size=size, where=f"{where}.config"
        )
    raise ManifestError(
        f"{data.source!r} is no source",
        where=f"{where}.source",
        hint=f"gym://DATASET, tiny://TASK, a path, {', '.join(f'{name}://PATH' for name in FILE_SCHEMES)}",
    )


def _rows(scheme: str, path: Path, config: FileConfig, cache: Path, *, where: str) -> Rows:
    if scheme == "parquet":
        return open_parquet(path, config, cache=cache, where=where)
    return open_saved(path, config, where=where) if scheme == "dataset" else JsonlRows(path, where=where)


def _file(text: str, *, scheme: str, where: str) -> tuple[Path, dict[str, str]]:
    """Return path and field names of ``PATH?prompt=FIELD&answer=FIELD``."""
    path, _, query = text.partition("?")
    fields = dict(parse_qsl(query))
    unknown = sorted(set(fields) - {"prompt", "answer"})
    if unknown or not path:
        raise ManifestError(
            f"{text!r} is not understood", where=f"{where}.source", hint=f"{scheme}://PATH?prompt=FIELD&answer=FIELD"
        )
    return Path(path), fields


def open_training(data: DataSpec, encoder: Encoder, *, folder: Path, cache: Path) -> Prompter:
    """Open the training prompts of a manifest; relative paths start at ``folder``.

    cache: folder for what a source writes and can make again. Raises ManifestError where ``open_source`` does, and for
    options of a chat template where none is applied.
    """
    return _prompter(data.train, encoder, data.train.chat_options, where="data.train", folder=folder, cache=cache)


def open_held_out(
    data: DataSpec, encoder: Encoder, *, train: PromptSource, folder: Path, cache: Path
) -> dict[str, Prompter]:
    """Open all sets of held-out prompts of a manifest, by name, the main one first.

    train: the training prompts. Raises ManifestError as ``open_training`` does, and where a question is in both.
    """
    prompters: dict[str, Prompter] = {}
    for name, each in data.held_out.items():
        where = f"data.evalSets[{name}]" if name else "data.eval"
        options = data.train.chat_options if each.chat_options is None else each.chat_options
        prompters[name] = _prompter(each, encoder, options, where=where, folder=folder, cache=cache)
        check_disjoint(train, prompters[name].source, where=where)
    return prompters


def _prompter(
    data: TrainDataSpec, encoder: Encoder, options: Mapping[str, Any] | None, *, where: str, folder: Path, cache: Path
) -> Prompter:
    source = open_source(data, workdir=folder, cache=cache, where=where)
    if data.chat_options and not data.chat and source.there is None and not source.prompt(0).messages:
        raise ManifestError(
            "no chat template is applied to these prompts", where=f"{where}.chatOptions", hint=f"Set {where}.chat: true"
        )
    form = PromptFormat(data.template or QUESTION, data.system or "", data.chat, options or {})
    return Prompter(source, encoder, form)


def check_disjoint(train: PromptSource, evaluation: PromptSource, *, where: str = "data.eval") -> None:
    """Refuse two finite sources that share a question, as one file used whole for both does.

    Endless sources are disjoint by construction, as long as both hold out the same share. where: the field with the
    held-out prompts. Raises ManifestError.
    """
    shares = [source.share for source in (train, evaluation) if isinstance(source, GeneratedSource)]
    if len(set(shares)) > 1:
        raise ManifestError(
            f"training holds out {shares[0]} of all questions, evaluation takes {shares[1]}",
            where=f"{where}.config.held_out",
            hint="Give both the same share.",
        )
    if not isinstance(train, FileSource) or evaluation.size is None:
        return
    questions = (evaluation.prompt(serial).question for serial in range(evaluation.size))
    shared = [question for question in questions if train.asks(question)]
    if shared:
        raise ManifestError(
            f"{len(shared)} held-out prompts are also trained on, such as {shared[0]!r}",
            where=where,
            hint="Set config.split: hash for both, or take them out of the training file",
        )
