"""``asyncflow follow``: an engine on this machine that serves the newest weights of a run on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from asyncflow.api.names import FOLLOWER, TLS_ENV
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, SYNC, check_run, record_of
from asyncflow.local.placement import PortReservation
from asyncflow.roles.context import RoleOptions
from asyncflow.roles.follower import main


def follow(run: Path, *, http_port: int, serve_port: int, sync: Path | None) -> int:
    """Follow the run, or the publisher, in a folder until a signal ends this process, and return the exit status.

    sync: a WeightSync for followers of the run. Raises ManifestError if the folder has no active run or publisher, or
    if ``sync`` is set for a publisher, which has its own WeightSync; AsyncFlowError if a port is taken.
    """
    record, published = record_of(run), (run / SYNC).is_file()
    check_run(run, JOB, SYNC)
    if published and sync is not None:
        hint = f"Its own is {run / SYNC}: set update there (asyncflow publish --set)"
        raise ManifestError("a publisher's followers use its own WeightSync", where=str(sync), hint=hint)
    for port in (http_port, serve_port):
        with PortReservation(1, first=port):
            pass
    os.environ[TLS_ENV] = str(run.absolute() / "run" / "tls" / f"{FOLLOWER}-0")
    options = RoleOptions(
        role=FOLLOWER,
        job=run.absolute() / (SYNC if published else JOB),
        driver=record.driver,
        index=0,
        attempt=0,
        workdir=run.absolute(),
        http_port=http_port,
        serve_port=serve_port,
        sync=sync,
    )
    return main(options)
