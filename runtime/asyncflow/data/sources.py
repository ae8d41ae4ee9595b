"""Data sources of a manifest: ``gym://``, ``tiny://``, ``put://``, or a file (``jsonl``, ``parquet``, ``dataset``).

Invariant: opening a source reports every error of the source, since it makes the first task; only ``put://`` has no
task at that time.
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
"""Folder for files that a source derives from its data and can write again."""
_FORMAT = ("template", "system", "chat", "chatOptions")
"""Settings of the format of a question, which are not part of a source's config."""


def open_source(data: TrainDataSpec, *, workdir: Path, cache: Path, where: str) -> PromptSource:
    """Open a source: of held-out prompts for an ``EvalDataSpec``, otherwise of training prompts.

    workdir: the job's folder, at which relative paths start; cache: folder for derived files; where: the field of the
    manifest. Raises ManifestError if the source, its config or its first task is invalid.
    """
    for name in _FORMAT:
        if name in data.config:
            what = f"{name} is not a setting of the source"
            raise ManifestError(what, where=f"{where}.config", hint=f"Set {where}.{name}")
    prompts = _open(data, workdir, cache, where=where)
    if prompts.available is None:
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
            what = f"unknown fields {sorted(data.config)}"
            raise ManifestError(what, where=f"{where}.config", hint="Remove config: a tiny:// source has no settings")
        return open_tiny(rest, seed=data.seed, purpose=purpose, size=size, where=where)
    if scheme == SCHEME and purpose == "train":
        if rest or data.config:
            what = f"{data.source!r} has a path or a config, but put:// has no settings"
            raise ManifestError(what, where=f"{where}.source", hint="Set put://, without config")
        return PutSource()
    if scheme in FILE_SCHEMES:
        path, named = _file(rest, scheme=scheme, where=where)
        if duplicates := sorted(named.keys() & data.config.keys()):
            hint = "Set each either in the source or in config"
            raise ManifestError(f"{', '.join(duplicates)} is set twice", where=f"{where}.config", hint=hint)
        settings = read_config({**named, **data.config}, where=f"{where}.config")
        rows = _rows(scheme, workdir / path, settings, cache, where=f"{where}.source")
        return FileSource(
            rows, settings, task=scheme, seed=data.seed, purpose=purpose, size=size, where=f"{where}.config"
        )
    raise ManifestError(
        f"{data.source!r} is not a source of {'held-out' if purpose == 'eval' else 'training'} prompts",
        where=f"{where}.source",
        hint=f"Use gym://DATASET, tiny://TASK, a path, {', '.join(f'{name}://PATH' for name in FILE_SCHEMES)}",
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
        what = f"{text!r} does not have the form PATH?prompt=FIELD&answer=FIELD"
        raise ManifestError(what, where=f"{where}.source", hint=f"Write {scheme}://PATH?prompt=FIELD&answer=FIELD")
    return Path(path), fields


def open_training(data: DataSpec, encoder: Encoder, *, folder: Path, cache: Path) -> Prompter:
    """Open the training prompts of a manifest; relative paths start at ``folder``.

    cache: folder for derived files. Raises ManifestError as ``open_source`` does, and for options of a chat template if
    no chat template is applied.
    """
    return _prompter(data.train, encoder, data.train.chat_options, where="spec.data.train", folder=folder, cache=cache)


def open_held_out(
    data: DataSpec, encoder: Encoder, *, train: PromptSource, folder: Path, cache: Path
) -> dict[str, Prompter]:
    """Open all sets of held-out prompts of a manifest, by name, the main set first.

    train: the training prompts. Raises ManifestError as ``open_training`` does, and if a question is in both.
    """
    prompters: dict[str, Prompter] = {}
    for name, each in data.held_out.items():
        where = f"spec.data.evalSets[{name}]" if name else "spec.data.eval"
        options = data.train.chat_options if each.chat_options is None else each.chat_options
        prompters[name] = _prompter(each, encoder, options, where=where, folder=folder, cache=cache)
        check_disjoint(train, prompters[name].source, where=where)
    return prompters


def _prompter(
    data: TrainDataSpec, encoder: Encoder, options: Mapping[str, Any] | None, *, where: str, folder: Path, cache: Path
) -> Prompter:
    source = open_source(data, workdir=folder, cache=cache, where=where)
    if data.chat_options and not data.chat and source.available is None and not source.prompt(0).messages:
        raise ManifestError(
            "no chat template is applied to these prompts", where=f"{where}.chatOptions", hint=f"Set {where}.chat: true"
        )
    form = PromptFormat(data.template or QUESTION, data.system or "", data.chat, options or {})
    return Prompter(source, encoder, form)


def check_disjoint(train: PromptSource, evaluation: PromptSource, *, where: str = "spec.data.eval") -> None:
    """Raise ManifestError if two finite sources share a question, e.g. if both use the same whole file.

    Endless sources are disjoint by construction if both hold out the same share. where: the field with the held-out
    prompts.
    """
    shares = [source.share for source in (train, evaluation) if isinstance(source, GeneratedSource)]
    if len(set(shares)) > 1:
        raise ManifestError(
            f"training holds out {shares[0]} of all questions, but evaluation uses {shares[1]}",
            where=f"{where}.config.held_out",
            hint="Set held_out to the same share in both",
        )
    if not isinstance(train, FileSource) or evaluation.size is None:
        return
    questions = (evaluation.prompt(serial).question for serial in range(evaluation.size))
    shared = [question for question in questions if train.contains(question)]
    if shared:
        raise ManifestError(
            f"{len(shared)} held-out prompts are also trained on, such as {shared[0]!r}",
            where=where,
            hint="Set config.split: hash for both, or remove them from the training file",
        )
