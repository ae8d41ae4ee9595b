"""Weights & Biases, online or into files that ``wandb sync`` uploads.

Figures are drawn over ``asyncflow/step``. W&B takes no value back: of steps that are made again both are there, with
``asyncflow/attempt`` beside them, and the run's summary says ``asyncflow/made_again_from``.

Invariants: a run that is resumed is the same run of W&B; the key comes from the environment (WANDB_API_KEY) or from
where ``wandb login`` has put it, and from nowhere else; W&B neither takes over the terminal nor copies code.
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
    """project, entity, group, tags: as W&B has them; name: of the run, by default the job's.

    mode: ``offline`` writes files below ``sinks/wandb``; base_url: of a server of your own.
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
        """Refuse what W&B refuses, and a password in the address."""
        check_address(options.base_url, option="base_url")
        if not options.project:
            raise ManifestError("project is empty", where=WHERE, hint="Leave it out, or give the project's name")

    def write(self, step: int, values: Mapping[str, float], *, at: float) -> None:
        """Log one point."""
        self._run.log({_STEP: step, **values, "_timestamp": at})

    def rewind(self, step: int) -> None:
        """Note from where on steps are made again."""
        self._run.summary["asyncflow/made_again_from"] = step

    def flush(self) -> None:
        """Return at once: what was logged is with W&B's own process, and in files that ``wandb sync`` uploads."""

    def close(self, phase: str) -> None:
        """Finish the run, and wait until all is written, or uploaded."""
        self._run.finish(exit_code=0 if phase in _ENDED_WELL else 1)


def _id_of(run: SinkRun) -> str:
    """Return the id of the run: that of the job on a cluster, else one that is made once."""
    file = run.own / _ID
    if not file.exists():
        write_whole(file, (run.uid or uuid.uuid4().hex).encode())
    return file.read_text()
