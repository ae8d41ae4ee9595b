"""Which source a manifest means: ``gym://``, ``jsonl://`` or a path, ``tiny://``.

Invariant: whatever is wrong with a source is known when it is opened: the first task has been made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from asyncflow.api.learning import EvalDataSpec, TrainDataSpec
from asyncflow.data.base import GeneratedSource, PromptSource, Purpose
from asyncflow.data.gym import open_gym
from asyncflow.data.jsonl import open_jsonl
from asyncflow.data.prompter import Encoder, Prompter, PromptFormat, split_config
from asyncflow.data.tiny import open_tiny
from asyncflow.errors import ManifestError

DEFAULT_EVAL_SIZE = 512


class SourceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says of one source.

    source: ``gym://DATASET``, ``jsonl://PATH?prompt=FIELD&answer=FIELD``, a path of a JSONL file, or ``tiny://TASK``;
    config: the source's own fields and those of PromptFormat; seed: another seed gives other prompts of the same class;
    size: how many held-out prompts (DEFAULT_EVAL_SIZE where None and the source has no size of its own).
    """

    source: str
    config: dict[str, Any] = {}
    seed: int = 0
    size: int | None = None


class OpenSource(msgspec.Struct, frozen=True):
    """A source together with how its questions are put."""

    prompts: PromptSource
    form: PromptFormat


def open_source(spec: SourceSpec, purpose: Purpose, *, workdir: Path) -> OpenSource:
    """Open a source; relative paths start at ``workdir``, the job's folder.

    Raises ManifestError where the source, its config or its first task is wrong.
    """
    where = f"data.{purpose}"
    form, config = split_config(spec.config, where=f"{where}.config")
    prompts = _open(spec, config, purpose, workdir, where=where)
    prompts.prompt(0)
    return OpenSource(prompts, form)


def _open(spec: SourceSpec, config: Mapping[str, Any], purpose: Purpose, workdir: Path, *, where: str) -> PromptSource:
    scheme, separator, rest = spec.source.partition("://")
    size = spec.size
    if scheme == "gym" and separator:
        size = size or DEFAULT_EVAL_SIZE
        return open_gym(rest, config=config, seed=spec.seed, purpose=purpose, size=size, where=where)
    if scheme == "tiny" and separator:
        if config:
            raise ManifestError(f"unknown fields {sorted(config)}", where=f"{where}.config", hint="a task has none")
        return open_tiny(rest, seed=spec.seed, purpose=purpose, size=size or DEFAULT_EVAL_SIZE, where=where)
    if scheme == "jsonl" or not separator:
        path, fields = _file(rest if separator else spec.source, where=where)
        return open_jsonl(
            workdir / path,
            prompt_field=fields.get("prompt", "prompt"),
            answer_field=fields.get("answer", "answer"),
            config=config,
            seed=spec.seed,
            purpose=purpose,
            size=size,
            where=where,
        )
    raise ManifestError(
        f"{spec.source!r} is no source",
        where=f"{where}.source",
        hint="gym://DATASET, jsonl://PATH, a path, tiny://TASK",
    )


def _file(text: str, *, where: str) -> tuple[Path, dict[str, str]]:
    parts = urlsplit(f"file:{text}")
    fields = dict(parse_qsl(parts.query))
    unknown = sorted(set(fields) - {"prompt", "answer"})
    if unknown or not parts.path:
        raise ManifestError(
            f"{text!r} is not understood", where=f"{where}.source", hint="jsonl://PATH?prompt=FIELD&answer=FIELD"
        )
    return Path(parts.path), fields


def open_prompter(data: TrainDataSpec, purpose: Purpose, encoder: Encoder, *, folder: Path) -> Prompter:
    """Open a source as a manifest states it; relative paths start at ``folder``.

    Raises ManifestError where ``open_source`` does, and for a setting of the prompt's format inside ``config``.
    """
    for name in PromptFormat.__struct_fields__:
        if name in data.config:
            hint = f"Set data.{purpose}.{name}"
            raise ManifestError(f"{name} is no setting of the source", where=f"data.{purpose}.config", hint=hint)
    said = {"template": data.template, "system": data.system, "chat": data.chat or None}
    config: dict[str, Any] = data.config | {name: value for name, value in said.items() if value is not None}
    size = data.size if isinstance(data, EvalDataSpec) else None
    opened = open_source(
        SourceSpec(source=data.source, config=config, seed=data.seed, size=size), purpose, workdir=folder
    )
    return Prompter(opened.prompts, encoder, opened.form)


def check_disjoint(train: PromptSource, evaluation: PromptSource) -> None:
    """Refuse two finite sources that share a question, as one file used whole for both does.

    Endless sources are disjoint by construction, as long as both hold out the same share. Raises ManifestError.
    """
    shares = [source.share for source in (train, evaluation) if isinstance(source, GeneratedSource)]
    if len(set(shares)) > 1:
        raise ManifestError(
            f"training holds out {shares[0]} of all questions, evaluation takes {shares[1]}",
            where="data.eval.config.held_out",
            hint="Give both the same share.",
        )
    if train.size is None or evaluation.size is None:
        return
    asked = {train.prompt(serial).question for serial in range(train.size)}
    shared = [q for serial in range(evaluation.size) if (q := evaluation.prompt(serial).question) in asked]
    if shared:
        raise ManifestError(
            f"{len(shared)} held-out prompts are also trained on, such as {shared[0]!r}",
            where="data.eval",
            hint="Set data.*.config.split: hash for both, or take them out of the training file",
        )
