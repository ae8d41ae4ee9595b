"""Loader of manifests: reads a file, applies overrides, and returns a validated object.

Every manifest enters the program through this module. A file contains one manifest. Next to a job it may contain the
WeightSync that the job names; the job then takes over the fields of that WeightSync.

Invariant: an object that ``load`` returns satisfies every rule and uses only features that this version has. A manifest
that ``load`` refuses raises one ManifestError with every problem, and has changed nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os.path import normpath
from pathlib import Path
from typing import IO, Any, TypeVar

from asyncflow.api.base import Spec
from asyncflow.api.check import MISSING, Problem, broken, inspect, refusal
from asyncflow.api.document import MAX_BYTES, Document, Place, apply, dump, parse, parse_all
from asyncflow.api.job import RLJob
from asyncflow.api.learning import FILE_SCHEMES
from asyncflow.api.names import API_VERSION, CLAIMS_DIR
from asyncflow.api.queue import TransferQueue
from asyncflow.api.rewards import EnvironmentSpec, RewardSpec
from asyncflow.api.weights import JobWeightsSpec, WeightSync
from asyncflow.errors import ManifestError

S = TypeVar("S", bound=Spec)
Manifest = RLJob | TransferQueue | WeightSync
KINDS: dict[str, type[RLJob] | type[TransferQueue] | type[WeightSync]] = {
    "RLJob": RLJob,
    "TransferQueue": TransferQueue,
    "WeightSync": WeightSync,
}


def load(source: Path | str | IO[Any], overrides: Sequence[str] = ()) -> Manifest:
    """Read and check the manifest in a file (path) or stream. Raises ManifestError."""
    name = str(source) if isinstance(source, (str, Path)) else str(getattr(source, "name", "manifest"))
    document, sync_document = _read(source, name)
    apply(document, overrides)
    built = _built(document, name)
    if sync_document is None:
        return built
    sync = _built(sync_document, name)
    if not isinstance(built, RLJob) or built.spec.weight_sync.name != sync.metadata.name:
        where = f"{name}, line {sync_document.begin}"
        hint = f"Name it in the job: spec.weightSync.name: {sync.metadata.name}"
        raise ManifestError("this is a WeightSync that no job in this file names", where=where, hint=hint)
    assert isinstance(sync, WeightSync)
    merged = built.with_weights(JobWeightsSpec.of(sync.spec))
    if problems := [replace(each, place=("spec", *each.place[2:])) for each in broken(merged)]:
        raise refusal(_located(problems, sync_document), source=name)
    return merged


def load_job(source: Path | str | IO[Any], overrides: Sequence[str] = ()) -> RLJob:
    """Read and check a job. Raises ManifestError if it is invalid, or of another kind."""
    manifest = load(source, overrides)
    if not isinstance(manifest, RLJob):
        hint = "Pass a manifest of kind RLJob"
        raise ManifestError(f"kind = {manifest.kind!r}: not a job", where=str(source), hint=hint)
    return manifest


def load_sync(source: Path | str, *, job: str | None = None) -> WeightSync:
    """Read and check a WeightSync for followers, of ``job`` if given. Raises ManifestError if it is not one."""
    sync = load(source)
    if isinstance(sync, WeightSync) and sync.spec.source is not None and job in (None, sync.spec.source.job):
        return sync
    of_job, fix = ("", "a source") if job is None else (f" of RLJob {job}", f"spec.source.job: {job}")
    hint = f"Pass a WeightSync with {fix}"
    raise ManifestError(f"this is no WeightSync for followers{of_job}", where=str(source), hint=hint)


def load_reward(source: Path) -> RewardSpec:
    """Read and check the section ``spec.reward`` of a job, alone in a file. Raises ManifestError."""
    return _section(RewardSpec, source)


def load_environment(source: Path) -> EnvironmentSpec:
    """Read and check the section ``spec.environment`` of a job, alone in a file. Raises ManifestError."""
    return _section(EnvironmentSpec, source)


def _section(model: type[S], source: Path) -> S:
    document = parse(_text(source, str(source)), source=str(source))
    built, problems = inspect(model, document.data)
    if built is None or problems:
        raise refusal(_located(problems, document), source=str(source))
    return built


def kind_of(source: Path) -> str:
    """Return the kind of a manifest that is run, even if its other fields are invalid. Raises ManifestError."""
    if source.is_fifo():
        hint = "Write the manifest into a file; it is needed again to resume the run"
        raise ManifestError("it is a pipe, which can be read only once", where=str(source), hint=hint)
    return _kind(_read(source, str(source))[0], str(source))


def name_of(source: Path, overrides: Sequence[str] = ()) -> str:
    """Return the name of the object in a manifest, even if its other fields are invalid. Raises ManifestError."""
    document, _ = _read(source, str(source))
    apply(document, overrides)
    metadata = document.data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise ManifestError("metadata.name is missing", where=str(source), hint="Add the name of the object")
    return name


def to_yaml(manifest: Manifest) -> str:
    """Return an object as a YAML manifest, which ``load`` reads back as an equal object."""
    return dump(manifest.model_dump(mode="json", by_alias=True, exclude_none=True))


def check_files(job: RLJob, base: Path, *, name: str) -> None:
    """Raise ManifestError if the job names files that do not exist; relative paths start at ``base``.

    base: the folder of the manifest; name: its name in errors. Only files on this machine are checked: model folders,
    and data files, except data files on the claim of the model, which only pods mount.
    """
    scheme, _, path = job.spec.model.source.partition("://")
    mount = Path(CLAIMS_DIR, path.partition("/")[0]) if scheme == "pvc" else None
    found = [_missing(place, source, base, folder, mount) for place, source, folder in _sources(job)]
    if problems := [problem for problem in found if problem is not None]:
        raise refusal(problems, source=name)


def _sources(job: RLJob) -> Iterable[tuple[Place, str, bool]]:
    yield ("spec", "model", "source"), job.spec.model.source, True
    yield ("spec", "data", "train", "source"), job.spec.data.train.source, False
    if job.spec.data.eval is not None:
        yield ("spec", "data", "eval", "source"), job.spec.data.eval.source, False
    for index, each in enumerate(job.spec.data.eval_sets):
        yield ("spec", "data", "evalSets", index, "source"), each.source, False


def _missing(place: Place, source: str, base: Path, folder: bool, mount: Path | None) -> Problem | None:
    scheme, separator, rest = source.partition("://")
    if separator and scheme not in FILE_SCHEMES:
        return None
    path = rest if separator else source
    file = base / (path if folder else path.partition("?")[0])
    if mount is not None and Path(normpath(file)).is_relative_to(mount):
        return None
    needed = file / "config.json" if folder else file
    if needed.is_file() or (scheme in ("parquet", "dataset") and needed.is_dir()):
        return None
    reason = f"there is no file {needed}"
    fix = "Correct the path; a relative path starts at the folder of the manifest"
    if folder and (file / "adapter_config.json").is_file():
        fix = f"The folder holds adapters: run asyncflow model merge {shlex.quote(str(file))} DIR, and use DIR"
    if needed.is_dir():
        reason, fix = f"{needed} is a folder", f"Write parquet://{path} or dataset://{path}, or name a JSONL file in it"
    return Problem(place=place, value=source, reason=reason, fix=fix)


def _read(source: Path | str | IO[Any], name: str) -> tuple[Document, Document | None]:
    """Return the manifest in a file, and the WeightSync next to it. Raises ManifestError for other documents."""
    documents = parse_all(_text(source, name), source=name)
    kinds = [_kind(document, name) for document in documents]
    if len(documents) == 1:
        return documents[0], None
    if sorted(kinds) != ["RLJob", "WeightSync"]:
        where = f"{name}, line {documents[1].begin}"
        hint = "Keep one manifest in a file, or one job and the WeightSync that it names"
        raise ManifestError("a second document starts here", where=where, hint=hint)
    job = kinds.index("RLJob")
    return documents[job], documents[1 - job]


def _built(document: Document, name: str) -> Manifest:
    built, problems = inspect(KINDS[_kind(document, name)], document.data)
    if built is None or problems:
        raise refusal(sorted(_located(problems, document), key=lambda problem: problem.line), source=name)
    return built


def _text(source: Path | str | IO[Any], name: str) -> str:
    try:
        if isinstance(source, (str, Path)):
            with Path(source).open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        else:
            raw = source.read(MAX_BYTES + 1)
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else str(raw)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ManifestError(f"cannot be read: {reason}", where=name, hint="Pass the path of a manifest") from error
    except UnicodeDecodeError as error:
        raise ManifestError("it is not UTF-8 text", where=name, hint="Pass the path of a manifest") from error
    if len(raw) > MAX_BYTES:
        hint = "Check the path: no valid manifest is so large"
        raise ManifestError(f"it is larger than {MAX_BYTES} bytes", where=name, hint=hint)
    return text


def _kind(document: Document, name: str) -> str:
    if not isinstance(document.data, dict):
        hint = f"Begin the manifest with apiVersion: {API_VERSION} and kind: RLJob"
        raise ManifestError("the document is not a mapping", where=name, hint=hint)
    wrong = [
        Problem(
            place=(key,),
            value=document.data.get(key, MISSING),
            reason="is not supported",
            fix=f"Set it to {' or '.join(known)}",
        )
        for key, known in (("apiVersion", (API_VERSION,)), ("kind", tuple(KINDS)))
        if document.data.get(key) not in known
    ]
    if wrong:
        raise refusal(_located(wrong, document), source=name)
    kind: str = document.data["kind"]
    return kind


def _located(problems: Iterable[Problem], document: Document) -> list[Problem]:
    return [replace(problem, line=document.line(problem.place)) for problem in problems]
