"""Weights & Biases sink, online or into files that ``wandb sync`` uploads.

Figures are plotted over ``asyncflow/step``. W&B cannot delete values: both values of a repeated step exist, with
different ``asyncflow/attempt``. The run's summary holds the first repeated step as ``asyncflow/made_again_from``.

Invariants: a resumed run is the same run of W&B. The key comes only from the environment (WANDB_API_KEY) or from the
file that ``wandb login`` wrote. W&B neither takes over the terminal nor copies code.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from importlib import import_module
from typing import Literal

import msgspec

from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.telemetry.sinks.base import WHERE, MetricSink, SinkRun, check_address

_ID = "run-id"
_STEP = "asyncflow/step"
_STARTED_S = 90.0
_ENDED_WELL = ("Succeeded", "Suspended", "")


class WandbOptions(msgspec.Struct, frozen=True):
    """project, entity, group, tags: as in W&B; name: of the run, by default the job's.

    mode: ``offline`` writes files below ``sinks/wandb``; base_url: of a self-hosted server.
    """

    project: str = "asyncflow"
    entity: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"
    base_url: str = ""


class WandbSink(MetricSink):
    """Writes one run of W&B."""

    Options = WandbOptions
    needs = {"wandb": "asyncflow[wandb]"}  # noqa: RUF012

    def __init__(self, options: WandbOptions, *, run: SinkRun) -> None:
        wandb = import_module("wandb")
        server = {"base_url": options.base_url} if options.base_url else {}
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            init_timeout=_STARTED_S,
            **server,
        )
        self._run = wandb.init(
            project=options.project,
            entity=options.entity or None,
            name=options.name or run.name,
            group=options.group or None,
            tags=options.tags or None,
            id=_id_of(run),
            resume="allow",
            mode=options.mode,
            dir=str(run.own),
            config=dict(run.config),
            settings=settings,
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    @classmethod
    def check(cls, options: WandbOptions) -> None:
        """Raise ManifestError for options that W&B refuses, and for a password in the address."""
        check_address(options.base_url, option="base_url")
        if not options.project:
            raise ManifestError("project is empty", where=WHERE, hint="Remove the option, or set the project's name")

    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Log one point."""
        self._run.log({_STEP: step, **values, "_timestamp": at})

    def rewind(self, step: int) -> None:
        """Store the first repeated step in the summary."""
        self._run.summary["asyncflow/made_again_from"] = step

    def flush(self) -> None:
        """Do nothing: logged data is in W&B's own process, which writes its file every 15 s and when it finishes."""

    def close(self, phase: str) -> None:
        """Finish the run, and wait until all data is written or uploaded."""
        self._run.finish(exit_code=0 if phase in _ENDED_WELL else 1)


def _id_of(run: SinkRun) -> str:
    """Return the id of the run: the job's on a cluster, otherwise one that is generated once."""
    file = run.own / _ID
    if not file.exists():
        write_whole(file, (run.uid or uuid.uuid4().hex).encode())
    return file.read_text()
