"""``asyncflow follow``: an engine of this machine that serves the newest weights of a run of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from asyncflow.api.names import FOLLOWER, TLS_ENV
from asyncflow.local.folder import JOB, SYNC, record_of
from asyncflow.roles.context import RoleOptions
from asyncflow.roles.follower import main


def follow(run: Path, *, http_port: int, serve_port: int) -> int:
    """Follow the run, or the publisher, in a folder until a signal ends this process, and return the exit status.

    Raises ManifestError where no run goes on there.
    """
    record = record_of(run)
    os.environ[TLS_ENV] = str(run.absolute() / "run" / "tls" / f"{FOLLOWER}-0")
    options = RoleOptions(
        role=FOLLOWER,
        job=run.absolute() / (SYNC if (run / SYNC).is_file() else JOB),
        driver=record.driver,
        index=0,
        attempt=0,
        workdir=run.absolute(),
        http_port=http_port,
        serve_port=serve_port,
    )
    return main(options)
