"""A sink: where the figures of steps and evaluations go, besides the files of the run.

A third party adds one as a subclass of ``MetricSink``, by an entry point of the group ``SINKS``. It runs in a process
of its own (``feed``), which may block, fail or be killed as it likes.

Invariant: what a sink is given is what the files of the run say, in their order, and nothing that is secret: no
environment variable, no option that the manifest has for anything else.
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
_NOT_TOLD = ("template",)
"""Parts of those sections that a sink is not given: a template may hold what is secret."""


@dataclass(frozen=True, kw_only=True)
class SinkRun:
    """The run of a sink, as far as it is told.

    name, uid: of the job, the uid "" on one machine; folder: of the run; own: a folder for what the sink keeps between
    two processes, which exists; config: the sections of the manifest that say what is trained.
    """

    name: str
    uid: str
    folder: Path
    own: Path
    config: Mapping[str, Any]

    @classmethod
    def of(cls, job: RLJob, *, kind: str, folder: Path) -> SinkRun:
        """Return what the sink ``kind`` of a job with this folder knows."""
        spec = job.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        config = {name: _told(spec[name]) for name in _OF_RUN if name in spec}
        return cls(name=job.name, uid=job.metadata.uid or "", folder=folder, own=folder / "sinks" / kind, config=config)


class MetricSink(ABC):
    """One sink of one run. It goes on with what an earlier process of the same run and kind has written.

    Options: the shape of its options, each with a default; needs: the packages that it imports, and what installs them.
    """

    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    needs: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def __init__(self, options: Any, *, run: SinkRun) -> None:
        """Open the sink. Whatever it raises, from here or any method, is logged; another process tries again later."""

    @classmethod  # noqa: B027
    def check(cls, options: Any) -> None:
        """Raise ManifestError for options that cannot work; nothing is opened."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Write figures of a step, or of the evaluation of its weights, by name. at: unix seconds."""

    @abstractmethod
    def rewind(self, step: int) -> None:
        """Mark as void what was written of ``step`` and of later ones: they are made again."""

    @abstractmethod
    def flush(self) -> None:
        """Return when all that was written is where it survives this process."""

    @abstractmethod
    def close(self, phase: str) -> None:
        """Close the sink. phase: in which the run ended, "" where it did not, or that is not known."""


def sink_class(kind: str, *, where: str = WHERE) -> type[MetricSink]:
    """Return the sink that is offered as ``kind``. where: named in errors. Raises ManifestError."""
    loaded: type[MetricSink] = load_plugin(SINKS, kind, kind=MetricSink, where=where)
    return loaded


def check_sink(spec: SinkSpec, *, number: int) -> None:
    """Refuse a sink whose package is not installed, or whose options are wrong. Raises ManifestError.

    number: its place among the sinks of its job, from 0.
    """
    where = f"{WHERE}[{number}]"
    sink = sink_class(spec.kind, where=where)
    if absent := [name for name in sink.needs if find_spec(name) is None]:
        hint = f"pip install '{sink.needs[absent[0]]}'"
        raise ManifestError(f"not installed: {', '.join(absent)}", where=where, hint=hint)
    sink.check(read_options(spec.options, sink.Options, where=f"{where}.options"))


def check_address(address: str, *, option: str) -> None:
    """Refuse an address with a password in it. Raises ManifestError."""
    if urlsplit(address).password is not None:
        hint = "A manifest is no place for it: give it in the environment of the driver"
        raise ManifestError(f"{option} has a password in it", where=WHERE, hint=hint)


def _told(section: Any) -> Any:
    if isinstance(section, dict):
        return {name: value for name, value in section.items() if name not in _NOT_TOLD}
    return section
