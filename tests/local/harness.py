"""Runs a supervisor over stand-ins: ``harness.py FOLDER ROLES END_S ACTIVE_S DISK_S [forked]``.

ROLES: {"rollout": {"replicas": 1, "gang": false, "restarts": 3, "does": [BEHAVIOUR, ...]}, ...} as JSON.
"missing": {"0": 2} names replicas that cannot be started by attempts before the given one, "full": {"0": 2} such of
which the disk takes no certificate; a role with "most" is
scaled up to that number, and has "places" replicas; "deaf": it cannot follow the policy.
"""

import asyncio
import errno
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

from asyncflow.errors import ManifestError
from asyncflow.local import supervisor
from asyncflow.local.folder import RunFolder
from asyncflow.local.lifecycle import Event, LocalReplica
from asyncflow.local.placement import Launch
from asyncflow.local.record import load_record
from asyncflow.local.scaling import Scaling
from asyncflow.local.supervisor import ElasticRole, Limits
from asyncflow.plan.roles import Readiness, Resources, RestartPolicy, Role

IMPORTS = ("asyncflow.process",)


class Deaf(Scaling):
    """Scaling that cannot follow the policy."""

    async def follow(self, port: int, changed: Callable[[], None]) -> None:
        raise RuntimeError(f"nobody can be asked at {port}")


def tell(event: Event) -> None:
    sys.stderr.write(f"{event}\n")


def main(path: str, parts: str, end_s: str, active_s: str, disk_s: str, forked: str) -> int:
    supervisor.DISK_S = float(disk_s)
    wanted = json.loads(parts)
    folder = RunFolder.claim(Path(path), resume=(Path(path) / "job.yaml").exists())
    folder.job.touch()
    roles = [
        Role(
            name=name,
            replicas=options.get("replicas", 1),
            core=1,
            most=options.get("most", 1),
            gang=options.get("gang", False),
            leader=name == "driver",
            restart=RestartPolicy(
                max_restarts=options.get("restarts", 3), window_s=3600, backoff_s=0.05, dismissed_s=15.0
            ),
            resources=Resources(cpu=1),
            readiness=Readiness(path="/readyz", port="http", within_s=1),
        )
        for name, options in wanted.items()
    ]
    limits = Limits(active_s=float(active_s) if active_s else None, end_s=float(end_s))

    def launch(replica: LocalReplica, attempt: int) -> Launch:
        record = load_record(folder.path)
        known = {(placed.role, placed.index, placed.attempt) for placed in record.processes} if record else set()
        assert (*astuple(replica), attempt) in known, "an attempt is on record before its process exists"
        does = wanted[replica.role].get("does", [])
        if attempt < wanted[replica.role].get("full", {}).get(str(replica.index), 0):
            raise OSError(errno.ENOSPC, "No space left on device")
        if attempt < wanted[replica.role].get("missing", {}).get(str(replica.index), 0):
            return Launch(argv=["/nowhere/standin"], env={})
        argv = [sys.executable, "-m", "standin", *does, "--", str(replica), str(attempt)]
        return Launch(argv=argv, env={}, imports=IMPORTS if forked else None)

    def place(replica: LocalReplica) -> None:
        if replica.index >= wanted[replica.role].get("places", 99):
            raise ManifestError("this machine is full", where="spec.rollout")

    def elastic() -> ElasticRole | None:
        scaled = [role for role in roles if role.most > 1]
        if not scaled:
            return None
        kind = Deaf if wanted[scaled[0].name].get("deaf") else Scaling
        return ElasticRole(scaling=kind(role=scaled[0], file=folder.requests), place=place, port=1, drain_s=-9.5)

    async def run() -> int:
        supervised = supervisor.Supervisor(
            roles=roles,
            launch=launch,
            folder=folder,
            limits=limits,
            elastic=elastic(),
            imports=IMPORTS if forked else (),
        )
        supervised.observe = tell
        outcome = await supervised.run()
        if outcome.failure:
            sys.stderr.write(f"refused: {outcome.refused}\n{outcome.failure}\n")
        return outcome.exit_code

    code = asyncio.run(run())
    folder.release()
    return code


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    gc.freeze()  # as `asyncflow` does
    sys.exit(status)
