"""The interface of a sink, which receives the figures of steps and evaluations in addition to the files of the run.

A third party adds a sink as a subclass of ``MetricSink``, by an entry point of the group ``SINKS``. Each sink runs in a
separate process (``feed``), so it may block, fail or be killed without harm to the run.

Invariant: a sink receives the content of the run's files, in order, and nothing secret: no environment variable, and no
options that the manifest has for other parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import msgspec

from asyncflow.api.durability import SinkSpec
from asyncflow.api.job import RLJob
from asyncflow.errors import ManifestError
from asyncflow.plugins import NoOptions, load_plugin, read_options

SINKS: Final = "asyncflow.metric_sinks"
"""Entry points of sinks."""
WHERE: Final = "spec.telemetry.sinks"
_OF_RUN = ("model", "data", "reward", "algorithm", "sampling", "schedule", "evaluation", "rollout", "trainer")
_WITHHELD = ("template",)
"""Fields of those sections that a sink does not receive: a template may contain a secret."""


@dataclass(frozen=True, kw_only=True)
class SinkRun:
    """The information about a run that its sink receives.

    name, uid: of the job, the uid is "" on one machine; folder: of the run; own: an existing folder for data that the
    sink keeps between two processes; config: the sections of the manifest about the training.
    """

    name: str
    uid: str
    folder: Path
    own: Path
    config: Mapping[str, Any]

    @classmethod
    def of(cls, job: RLJob, *, kind: str, folder: Path) -> SinkRun:
        """Return the information for the sink ``kind`` of a job with this folder."""
        spec = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        config = {name: _without_secrets(spec[name]) for name in _OF_RUN if name in spec}
        return cls(name=job.name, uid=job.metadata.uid or "", folder=folder, own=folder / "sinks" / kind, config=config)


class MetricSink(ABC):
    """One sink of one run. It continues after the data of an earlier process of the same run and kind.

    Options: the type of its options, each with a default; needs: the packages that it imports, and the requirement that
    installs each.
    """

    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    needs: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def __init__(self, options: Any, *, run: SinkRun) -> None:
        """Open the sink. Errors of this and all other methods are logged, and another process tries again."""

    @classmethod  # noqa: B027
    def check(cls, options: Any) -> None:
        """Raise ManifestError for options that cannot work, without opening anything."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Write figures of a step, or of the evaluation of its weights, by name. at: Unix seconds."""

    @abstractmethod
    def rewind(self, step: int) -> None:
        """Invalidate the figures of ``step`` and later ones, because these steps are repeated."""

    @abstractmethod
    def flush(self) -> None:
        """Return when all written figures are stored outside this process."""

    @abstractmethod
    def close(self, phase: str) -> None:
        """Close the sink. phase: final phase of the run, "" if it has not ended, or if it is unknown."""


def sink_class(kind: str, *, where: str = WHERE) -> type[MetricSink]:
    """Return the sink class with the entry point ``kind``. where: place named in errors. Raises ManifestError."""
    loaded: type[MetricSink] = load_plugin(SINKS, kind, kind=MetricSink, where=where)
    return loaded


def check_sink(spec: SinkSpec, *, number: int) -> None:
    """Raise ManifestError for a sink whose package is not installed, or whose options are wrong.

    number: its index among the sinks of its job, from 0.
    """
    where = f"{WHERE}[{number}]"
    sink = sink_class(spec.kind, where=where)
    if absent := [name for name in sink.needs if find_spec(name) is None]:
        hint = f"Run pip install '{sink.needs[absent[0]]}'"
        raise ManifestError(f"not installed: {', '.join(absent)}", where=where, hint=hint)
    sink.check(read_options(spec.options, sink.Options, where=f"{where}.options"))


def check_address(address: str, *, option: str) -> None:
    """Raise ManifestError for an address that contains a password."""
    if urlsplit(address).password is not None:
        hint = "A manifest must not hold a password: set it in the environment of the driver"
        raise ManifestError(f"{option} contains a password", where=WHERE, hint=hint)


def _without_secrets(section: Any) -> Any:
    if isinstance(section, dict):
        return {name: value for name, value in section.items() if name not in _WITHHELD}
    return section
