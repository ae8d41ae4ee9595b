"""Sources of models: ``tiny://NAME?seed=N``, a folder, ``pvc://CLAIM/PATH``, ``hf://ORG/NAME`` (local cache).

Every role needs config and tokenizer, which are cheap and need no torch; the first trainer rank alone needs weights.

Invariants: ``materialize_config`` and ``materialize_weights`` may be called by several processes at once, and again
after a crash, with the same bytes as result; nothing is ever downloaded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

import msgspec

from asyncflow.data.tiny import tiny_task
from asyncflow.durable import sync
from asyncflow.errors import ManifestError
from asyncflow.models.folders import whole_folder
from asyncflow.models.tiny import write_config

WHERE = "model.source"
CLAIMS = Path("/mnt")
"""Folder in which pods mount the claims that a manifest names, each under its name."""
WEIGHTS = "model.safetensors"
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_DAMAGED = "Copy it again: it may be cut off, or the pointer of a large-file store"


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed source of a model.

    kind: how it is had; name: the tiny model, or ORG/NAME; folder: where it lies or will lie (hf: unused).
    """

    kind: Literal["tiny", "folder", "hf"]
    folder: Path
    name: str = ""
    seed: int = 0

    @classmethod
    def resolve(cls, source: str, workdir: Path) -> ModelSource:
        """Understand ``source``; nothing is read or written. workdir: the role's, for what the project makes itself.

        Raises ManifestError where it has no meaning.
        """
        scheme, separator, rest = source.partition("://")
        if not separator:
            return cls(kind="folder", folder=Path(source))
        if scheme == "pvc" and rest.strip("/"):
            return cls(kind="folder", folder=CLAIMS / rest)
        if scheme == "hf" and rest:
            return cls(kind="hf", name=rest, folder=workdir)
        if scheme == "tiny":
            name, seed = _tiny(rest)
            return cls(kind="tiny", name=name, seed=seed, folder=workdir / "model" / f"{name}-{seed}")
        raise ManifestError(
            f"{source!r} is no model", where=WHERE, hint="Give tiny://NAME, a folder, pvc://CLAIM/PATH or hf://ORG/NAME"
        )


def materialize_config(source: str, workdir: Path) -> Path:
    """Return a folder with config.json and the tokenizer's files, written under ``workdir`` if the project makes them.

    Raises ManifestError where there is no such model.
    """
    model = ModelSource.resolve(source, workdir)
    if model.kind == "tiny":
        if not model.folder.is_dir():
            with whole_folder(model.folder, replace=False) as folder:
                write_config(folder)
        return model.folder
    folder = _cached(model.name) if model.kind == "hf" else model.folder
    if not (folder / "config.json").is_file():
        raise ManifestError(f"{folder} has no config.json", where=WHERE, hint="Give an ordinary Hugging Face folder")
    return folder


def materialize_weights(source: str, folder: Path) -> None:
    """Have the initial weights lie in ``folder``, which ``materialize_config`` gave.

    A tiny model is warmed up (some 5 seconds of one core) unless that has been done. Raises ManifestError where a
    folder has no weights.
    """
    if any(next(folder.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        return
    model = ModelSource.resolve(source, folder)
    if model.kind != "tiny":
        raise _no_weights(folder)
    from safetensors.torch import save_file

    from asyncflow.models.warmup import warm_up

    weights = warm_up(folder, tiny_task(model.name, where=WHERE), seed=model.seed)
    written = folder / f".{WEIGHTS}.{os.getpid()}"
    save_file(weights, written, metadata={"format": "pt"})
    sync(written)
    written.replace(folder / WEIGHTS)
    sync(folder)


def check_weights(source: str, folder: Path) -> None:
    """Refuse a ``folder``, which ``materialize_config`` gave, whose weights are missing or cannot be read.

    Only the headers of safetensors files are read. Raises ManifestError.
    """
    if ModelSource.resolve(source, folder).kind == "tiny":
        return
    stored = sorted(folder.glob("*.safetensors"))
    if not stored and not any(folder.glob(_WEIGHT_PATTERNS[1])):
        raise _no_weights(folder)
    named = set(_index(folder / f"{WEIGHTS}.index.json"))
    if absent := sorted(named - {file.name for file in stored}):
        hint = "Copy the whole folder; its index names the file"
        raise ManifestError(f"{folder / absent[0]} is missing, of {len(named)} files", where=WHERE, hint=hint)
    for file in stored:
        _check_header(file)


def stored_matrices(folder: Path) -> list[str]:
    """Return the names of the layers whose weights are matrices in the safetensors files of ``folder``.

    They come without ``.weight``; embeddings and output layers are left out, and experts, which transformers opens as
    one tensor of all. Only headers are read.
    """
    from safetensors import safe_open

    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as stored:
            for name in stored.keys():  # noqa: SIM118  a safetensors file is no mapping
                layer, _, kind = name.rpartition(".")
                if kind == "weight" and len(stored.get_slice(name).get_shape()) == 2 and not _has_no_adapter(layer):
                    found.append(layer)
    return found


def _has_no_adapter(layer: str) -> bool:
    return layer.endswith(("lm_head", "embed_tokens", "wte", "wpe")) or ".experts." in layer


def _index(file: Path) -> list[str]:
    """Return the files that the index of a model in several parts names, none where there is no index."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{file} is not an index of weights: {error!r}", where=WHERE, hint=_DAMAGED) from error


def _check_header(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except (OSError, SafetensorError) as error:
        raise ManifestError(f"{file} is not a safetensors file: {error}", where=WHERE, hint=_DAMAGED) from error


def _no_weights(folder: Path) -> ManifestError:
    return ManifestError(f"{folder} has no weights", where=WHERE, hint=f"It needs {' or '.join(_WEIGHT_PATTERNS)}")


def _tiny(rest: str) -> tuple[str, int]:
    name, _, query = rest.partition("?")
    fields = dict(parse_qsl(query, keep_blank_values=True))
    seed = fields.pop("seed", "0")
    if fields or not seed.isdecimal():
        raise ManifestError(f"{query!r} is not understood", where=WHERE, hint="Give tiny://NAME or tiny://NAME?seed=N")
    tiny_task(name, where=WHERE)
    return name, int(seed)


def _cached(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ManifestError(
            f"hf://{name} is not in this machine's cache: {str(error).rstrip('.')}",
            where=WHERE,
            hint=f"Download it first: hf download {repository}",
        ) from error
