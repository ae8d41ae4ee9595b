"""``asyncflow follow``: an engine of this machine that serves the newest weights of a run of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from asyncflow.api.names import FOLLOWER, TLS_ENV
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, load_record
from asyncflow.roles.context import RoleOptions
from asyncflow.roles.follower import main


def follow(run: Path, *, http_port: int, serve_port: int) -> int:
    """Follow the run in a folder until a signal ends this process, and return the exit status.

    Raises ManifestError where nothing was ever run there.
    """
    folder = run.absolute() / "run"
    record = load_record(folder / "processes.json")
    if record is None:
        raise ManifestError("nothing was run there", where=str(run), hint="Give the folder of a run: runs/NAME")
    os.environ[TLS_ENV] = str(folder / "tls" / f"{FOLLOWER}-0")
    options = RoleOptions(
        role=FOLLOWER,
        job=run.absolute() / JOB,
        driver=record.driver,
        index=0,
        attempt=0,
        workdir=run.absolute(),
        http_port=http_port,
        serve_port=serve_port,
    )
    return main(options)
