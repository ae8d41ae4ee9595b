"""Setup of a run on this machine: its ports, devices, certificates and log, and the supervisor of its roles.

Invariant: a run keeps its reserved ports, through all restarts, for as long as the context ``local_site`` lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncflow.api.names import CLIENT, FOLLOWER, OPERATOR, PUBLISHER, VIEWER
from asyncflow.local.folder import RunFolder
from asyncflow.local.issuer import Issuer
from asyncflow.local.placement import Places, PortReservation, launcher, modules_of, replicas_of
from asyncflow.local.record import load_record, open_log
from asyncflow.local.scaling import Scaling
from asyncflow.local.supervisor import ElasticRole, Limits, Supervisor
from asyncflow.plan.roles import Role
from asyncflow.process import allow_open_files
from asyncflow.rpc.addresses import address_of
from asyncflow.rpc.framing import new_server
from asyncflow.telemetry.logs import setup_logging


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSite:
    """A job that is ready to start.

    address: address to which all processes connect; http_port: port of the HTTP service of the first replica;
    certificate: folder with the certificate for users who view the job, for clients of the queue, or for followers of
    the publisher.
    """

    supervisor: Supervisor
    address: str
    http_port: int
    certificate: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic:
    """Scaling of a job's rollouts. policy: whether the built-in policy is enabled; drain_s: see ``ElasticRole``."""

    policy: bool
    drain_s: float


@contextlib.contextmanager
def local_site(
    roles: Sequence[Role], *, folder: RunFolder, limits: Limits, port: int = 0, elastic: Elastic | None = None
) -> Iterator[LocalSite]:
    """Yield the site that runs ``roles`` from ``folder``; all connect to the first role at ``port`` (0: any free port).

    The run starts with at most the number of replicas in the manifest. Replicas beyond it join afterwards, if there are
    free devices for them. Raises AsyncFlowError if a port or a device is not available, or if this process may open too
    few files.
    """
    allow_open_files()
    scaling = None if elastic is None else _scaling(roles, folder, policy=elastic.policy)
    if scaling is not None:
        initial = min(scaling.role.replicas, scaling.wanted().wanted)
        roles = [replace(role, replicas=initial) if role.name == scaling.role.name else role for role in roles]
    replicas = replicas_of(roles)
    reserved = PortReservation(2 + len(replicas), first=port)
    leader = replicas[0].role
    is_job = leader == "driver"
    issuer = Issuer(folder.tls)
    with open_log(folder.log("supervisor")) as log, reserved as (rpc_port, control_port, *ports), issuer.renewing():
        setup_logging("supervisor", 0, stream=log)
        places = Places(roles, ports=dict(zip(replicas, ports, strict=True)), another_port=reserved.another)
        http_port = places.port(replicas[0])
        named = {} if port else {"server": new_server()}
        address = address_of("127.0.0.1", rpc_port, **named)
        elastic_role = None
        if elastic is not None and scaling is not None:
            elastic_role = ElasticRole(scaling=scaling, place=places.assign, port=http_port, drain_s=elastic.drain_s)
        supervisor = Supervisor(
            roles=roles,
            launch=launcher(
                roles,
                folder=folder,
                issuer=issuer,
                driver=address,
                places=places,
                control_port=control_port,
            ),
            folder=folder,
            driver=address,
            http=f"http://127.0.0.1:{http_port}",
            control=f"https://127.0.0.1:{control_port}" if is_job else "",
            limits=limits,
            elastic=elastic_role,
            imports=[module for role in roles if not role.imports for module in modules_of(role)],
        )
        certificate = issuer.issue({"driver": VIEWER, PUBLISHER: FOLLOWER}.get(leader, CLIENT))
        if is_job:
            issuer.issue(OPERATOR)
            issuer.issue(FOLLOWER)
            _issue_to_user(issuer, roles)
        yield LocalSite(supervisor=supervisor, address=address, http_port=http_port, certificate=certificate)


def _issue_to_user(issuer: Issuer, roles: Sequence[Role]) -> None:
    """Issue certificates for the user's own process if it is the trainer, and may be one more rollout."""
    named = {role.name: role for role in roles}
    if "trainer" not in named:
        issuer.issue("trainer")
        issuer.issue(CLIENT)
        issuer.issue("rollout", named["rollout"].most)


def _scaling(roles: Sequence[Role], folder: RunFolder, *, policy: bool) -> Scaling | None:
    """Return the scaling of the one elastic role, or None if no role is elastic."""
    previous = load_record(folder.path)
    before = {scale.role: scale for scale in previous.scales} if previous is not None else {}
    elastic = next((role for role in roles if role.elastic), None)
    if elastic is None:
        return None
    return Scaling(role=elastic, file=folder.requests, policy=policy, before=before.get(elastic.name))
