"""Measure whether the delayed update hides a slow transfer of weights, with real processes on links of low bandwidth.

    sudo python benchmarks/delayed_update.py [--output runs/delayed-update] [--transfer 5] [--control]

The core (driver, controller, storage, trainer) and each rollout have their own network namespaces. ``tc tbf`` limits
the link towards each rollout so that the transfer of a version takes ``--transfer`` seconds. There are three runs:
undisturbed, with one rollout less, and with one rollout under SIGSTOP from the middle of a transfer to the end of the
run. With ``--control``, there is instead one run whose transfers take longer than the generation of a step; it must
show a stall, to prove that the benchmark can measure one.

Prints a table. The exit status is 1 if a limit is missed, and 2 if this machine cannot create the network.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import capped_links
from capped_links import CORE_ADDRESS, Network
from stopped_receiver import Incident, stop_one
from swap_figures import Bar, Figures, control_bars, plain_bars, stopped_bars

from asyncflow.api.job import RLJob
from asyncflow.api.load import to_yaml
from asyncflow.api.names import HOST_ENV, NODE_ENV
from asyncflow.commands.preflight import runnable_job
from asyncflow.durable import write_whole
from asyncflow.local.folder import RunFolder
from asyncflow.local.issuer import Issuer
from asyncflow.local.lifecycle import LocalReplica
from asyncflow.local.placement import Launch, Places, launcher, replicas_of
from asyncflow.local.supervisor import Limits, RunOutcome, Supervisor
from asyncflow.plan.job import plan

HERE = Path(__file__).parent
DRIVER = f"tcp://{CORE_ADDRESS}:20001"
HTTP_PORT = 20002
"""The HTTP port of the first replica; the other replicas use the ports after it."""
OVERHEAD = 1.05
"""Bytes on the link for each byte of weights: headers of Ethernet, IP and TCP."""
MOST_S = 600.0
CONTROL = 3.0
"""The factor by which a transfer takes longer in the control."""
STOPPED_DURING = 3
"""The version during whose transfer a rollout is stopped."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. nbytes: the size of a version; transfer_s: its transfer time; stop: whether a rollout is stopped."""

    job: RLJob
    folder: Path
    nbytes: int
    transfer_s: float
    stop: bool = False


def weights_bytes(job: RLJob) -> int:
    """Return the number of bytes that change from one version of the counting trainer to the next."""
    return 8 * int(str(job.spec.trainer.backend.options["moving"]))


def placed_in(network: Network, launch: Callable[[LocalReplica, int], Launch]) -> Callable[[LocalReplica, int], Launch]:
    """Return ``launch`` changed so that rollouts start in the namespaces of the guests, and other roles in the core."""

    def launched(replica: LocalReplica, attempt: int) -> Launch:
        inner = launch(replica, attempt)
        guest = replica.role == "rollout"
        namespace = network.guests[replica.index] if guest else network.core
        address = network.address(replica.index) if guest else CORE_ADDRESS
        return Launch(
            argv=network.within(namespace, inner.argv), env={**inner.env, HOST_ENV: address, NODE_ENV: namespace}
        )

    return launched


@contextlib.asynccontextmanager
async def observed(network: Network, folder: Path, output: Path) -> AsyncIterator[None]:
    """Run the row observer during a run; it ends with the run, or with this context."""
    argv = [sys.executable, str(HERE / "row_observer.py"), str(folder), DRIVER, str(output)]
    with (folder / "logs" / "observer.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(*network.within(network.core, argv), stdout=log, stderr=log)
        try:
            yield
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 10.0)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def run(setting: Setting) -> Figures:
    """Carry out one run, and return its figures. Raises the error that made the job fail."""
    guests = setting.job.spec.rollout.replicas
    rate = OVERHEAD * 8 * setting.nbytes / setting.transfer_s
    folder = RunFolder.claim(setting.folder, fresh=True)
    print(f"{folder.path.name}: {guests} rollouts, {rate / 1e6:.1f} Mbit/s towards each", flush=True)
    try:
        write_whole(folder.job, to_yaml(setting.job).encode())
        folder.write_token()
        with capped_links.capped_links(guests=guests, bits_per_s=rate) as network:
            outcome, incident = await supervise(setting, folder, network)
    finally:
        folder.release()
    if outcome.failure:
        raise outcome.failure
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)
    return Figures.read(folder.path, rollouts=guests, incident=incident)


async def supervise(setting: Setting, folder: RunFolder, network: Network) -> tuple[RunOutcome, Incident | None]:
    """Run all roles to their end under the project's own supervisor; stop a rollout meanwhile if ``setting.stop``."""
    roles, victim = plan(setting.job).roles, len(network.guests) - 1
    ports = itertools.count(HTTP_PORT)
    places = Places(roles, ports={replica: next(ports) for replica in replicas_of(roles)}, another_port=ports.__next__)
    launch = launcher(roles, folder=folder, issuer=Issuer(folder.tls), driver=DRIVER, places=places)
    supervisor = Supervisor(
        roles=roles,
        launch=placed_in(network, launch),
        folder=folder,
        driver=DRIVER,
        limits=Limits(active_s=MOST_S),
    )
    incident: Incident | None = None
    async with observed(network, folder.path, folder.path / "versions.jsonl"):
        running = asyncio.create_task(supervisor.run())
        try:
            if setting.stop:
                incident = await stop_one(
                    folder=folder.path,
                    pid=lambda: _pid(supervisor, victim),
                    victim=victim,
                    version=STOPPED_DURING,
                    delay_s=setting.transfer_s / 2,
                    last=setting.job.spec.algorithm.steps,
                    run=running,
                )
            return await running, incident
        finally:
            running.cancel()
            await asyncio.wait([running])


def _pid(supervisor: Supervisor, rollout: int) -> int:
    return next(replica.pid for replica in supervisor.placed if (replica.role, replica.index) == ("rollout", rollout))


def judge(bars: list[Bar]) -> bool:
    """Print the limits as a table; return whether all are met."""
    width = max(len(bar.what) for bar in bars)
    limit = max(len(bar.limit) for bar in bars)
    for bar in bars:
        print(f"  {'ok  ' if bar.met else 'MISS'} {bar.what:{width}}  {bar.limit:{limit}}  {bar.measured}", flush=True)
    return all(bar.met for bar in bars)


def main() -> int:
    """Carry out the runs and check their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=HERE / "delayed_update.yaml")
    parser.add_argument("--output", type=Path, default=Path("runs/delayed-update"))
    parser.add_argument("--transfer", type=float, default=5.0, help="seconds for the transfer of one version")
    parser.add_argument("--control", action="store_true", help="only the run that must show a stall")
    options = parser.parse_args()
    if lacks := capped_links.missing():
        print(f"this needs {', '.join(lacks)}", file=sys.stderr)
        return 2
    job = runnable_job(options.manifest)

    def make(name: str, job: RLJob, *, factor: float = 1.0, stop: bool = False) -> Figures:
        folder, seconds = options.output / name, factor * options.transfer
        setting = Setting(job=job, folder=folder, nbytes=weights_bytes(job), transfer_s=seconds, stop=stop)
        return asyncio.run(run(setting))

    if options.control:
        return 0 if judge(control_bars(make("control", job, factor=CONTROL))) else 1
    plain = make("plain", job)
    good = judge(plain_bars(plain))
    fewer = make("fewer", runnable_job(options.manifest, [f"spec.rollout.replicas={job.spec.rollout.replicas - 1}"]))
    good = judge(plain_bars(fewer)) and good
    stopped = make("stopped", job, stop=True)
    good = judge(stopped_bars(stopped, plain, fewer, lease_s=job.spec.rollout.lease_seconds)) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
