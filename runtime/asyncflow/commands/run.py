"""``asyncflow run FILE``: a job on this machine, from its manifest to its summary.

Invariant: until manifest, plug-ins and folder have been found good, nothing is created and nothing is started.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from asyncflow.api.job import RLJob, RLJobSpec
from asyncflow.api.load import load_job, to_yaml
from asyncflow.commands.manifest import resolved_job
from asyncflow.durable import write_whole
from asyncflow.net.hosts import address_of
from asyncflow.net.stream.server import new_server
from asyncflow.plan.job import plan
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.logs import open_log
from asyncflow.substrates.local.placement import launcher
from asyncflow.substrates.local.ports import PortReservation
from asyncflow.substrates.local.resume import differences
from asyncflow.substrates.local.supervisor import Supervisor
from asyncflow.substrates.local.terms import Limits, Outcome
from asyncflow.telemetry.logs import setup_logging
from asyncflow.view.watch import Watch


def run(file: Path, *, output: Path | None, overrides: Sequence[str], resume: bool, fresh: bool) -> int:
    """Run the job to its end and give the exit status.

    Raises ManifestError before anything was started, another AsyncFlowError where the job failed.
    """
    job = resolved_job(file, overrides)
    folder = RunFolder.claim(output or Path("runs") / job.name, resume=resume, fresh=fresh)
    try:
        if resume:
            for difference in differences(load_job(folder.job), job):
                click.echo(f"changed: {difference}")
        if folder.moved_to:
            click.echo(f"the run that was there is now in {folder.moved_to}")
        outcome, seen = _supervise(job, folder)
    finally:
        folder.release()
    if not seen:
        _leave(outcome)
    if outcome.failure:
        raise outcome.failure
    return outcome.exit_code


def _supervise(job: RLJob, folder: RunFolder) -> tuple[Outcome, bool]:
    """Run everything; give the outcome, and whether all of the view could be written."""
    write_whole(folder.job, to_yaml(job).encode())
    folder.write_token()
    with open_log(folder.log("supervisor")) as log, PortReservation(2) as (rpc_port, http_port):
        setup_logging("supervisor", 0, stream=log)
        places, driver = plan(job), address_of("127.0.0.1", rpc_port, server=new_server())
        for role in places.roles:
            if role.replicas == 0:
                click.echo(f"no {role.name} is placed, and none comes later: spec.{role.name}.replicas is 0")
        if ignored := _only_on_a_cluster(job.spec):
            click.echo(f"of no effect on one machine: {', '.join(ignored)}")
        limits = job.spec.limits
        supervisor = Supervisor(
            roles=places.roles,
            launch=launcher(places, folder=folder, driver=driver, http_port=http_port),
            folder=folder,
            driver=driver,
            http=f"http://127.0.0.1:{http_port}",
            limits=Limits(active_s=limits.active_deadline_seconds, end_s=limits.stop_seconds),
        )
        console = Console(highlight=False)
        watch = Watch(
            name=job.name, folder=folder.path, http_port=http_port, placed=lambda: supervisor.placed, console=console
        )
        supervisor.observe = watch.event
        watch.start()
        try:
            outcome = asyncio.run(supervisor.run())
        finally:
            seen = watch.close()
        return outcome, seen


def _only_on_a_cluster(spec: RLJobSpec) -> list[str]:
    asked = {
        "spec.elasticity": spec.elasticity.enabled or spec.elasticity.dry_run,
        "spec.scheduling.gang": spec.scheduling.gang != "none",
    }
    return [place for place, given in asked.items() if given]


def _leave(outcome: Outcome) -> None:
    """End although a thread hangs in a write that nobody reads: interpreter shutdown would wait for its lock."""
    if outcome.failure:
        os.write(sys.stderr.fileno(), f"error: {outcome.failure}\n".encode())
    os._exit(outcome.exit_code)
