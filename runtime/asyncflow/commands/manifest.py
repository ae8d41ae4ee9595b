"""A manifest, checked as far as one machine can: the contract's rules, the files it names, the plug-ins installed here.

Invariant: checking starts no process, writes nothing, and runs nobody's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from asyncflow.api.job import RLJob
from asyncflow.api.learning import FILE_SCHEMES
from asyncflow.api.load import Manifest, check_files, load
from asyncflow.api.names import FOLDER
from asyncflow.api.problems import Problem, refusal
from asyncflow.errors import ManifestError
from asyncflow.plugins import installed
from asyncflow.queue.backends.base import BACKENDS
from asyncflow.rewards.registry import check as check_reward

_PLUGINS = (
    (("rollout", "engine", "name"), "asyncflow.rollout_engines"),
    (("trainer", "backend", "name"), "asyncflow.trainer_backends"),
    (("weightSync", "transport"), "asyncflow.transports"),
    (("transferQueue", "backend"), BACKENDS),
)


def checked(file: Path, overrides: Sequence[str] = ()) -> Manifest:
    """Read and check a manifest of any kind. Raises ManifestError that says everything that was found to be wrong."""
    manifest = load(file, overrides)
    if isinstance(manifest, RLJob):
        folder = folder_of(manifest, file)
        check_files(manifest, folder)
        if problems := list(_absent_plugins(manifest)):
            raise refusal(problems, source=str(file))
        reward = manifest.spec.reward
        check_reward(reward.function, reward.extractor, workdir=folder)
    return manifest


def resolved_job(file: Path, overrides: Sequence[str] = ()) -> RLJob:
    """Read and check a job, with its paths made absolute, so that it means the same wherever it is written.

    Raises ManifestError as ``checked`` does, and for a manifest that is no job or a job that is suspended.
    """
    manifest = checked(file, overrides)
    if not isinstance(manifest, RLJob):
        raise ManifestError(f"kind = {manifest.kind!r}: not a job", where=str(file), hint="Give an RLJob")
    if manifest.spec.suspend:
        raise ManifestError("the job is suspended", where=str(file), hint="Run it with --set suspend=false")
    return anchored(manifest, folder_of(manifest, file))


def folder_of(job: RLJob, file: Path) -> Path:
    """Return the folder where the job's relative paths and modules are: that of the file it was first read from."""
    return Path((job.metadata.annotations or {}).get(FOLDER, file.absolute().parent))


def anchored(job: RLJob, base: Path) -> RLJob:
    """Return ``job`` with the paths of its model and files made absolute; relative ones start at ``base``."""
    data = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = data["spec"]
    named = (spec["data"][name] for name in ("train", "eval") if name in spec["data"])
    for holder in (spec["model"], *named, *spec["data"].get("evalSets", ())):
        holder["source"] = _absolute(holder["source"], base)
    data["metadata"].setdefault("annotations", {})[FOLDER] = str(base)
    return RLJob.model_validate(data)


def _absolute(source: str, base: Path) -> str:
    scheme, separator, rest = source.partition("://")
    if not separator:
        return str(base / source)
    return f"{scheme}://{base / rest}" if scheme in FILE_SCHEMES else source


def _absent_plugins(job: RLJob) -> Iterator[Problem]:
    data = job.spec.model_dump(mode="json", by_alias=True)
    for place, group in _PLUGINS:
        name: Any = reduce(getitem, place, data)
        known = installed(group)
        if name not in known:
            yield Problem(
                place=("spec", *place),
                value=name,
                reason=f"no installed package offers it in {group}",
                fix=f"Installed here: {', '.join(known) or 'none'}",
            )
