"""The environment of a role's process: where it is, who it is in its gang, and what the vendor's libraries are told.

Invariant: what the user's templates say wins over everything but ASYNCFLOW_*; no address of a peer is in here but that
of a gang's rank 0, which torch wants: all others dial in.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from asyncflow.api.accelerators import PROFILES, ports
from asyncflow.api.names import (
    GANG_PORT,
    HOST_ENV,
    KEY_FILE,
    KEY_FILE_ENV,
    LAST_WORD_ENV,
    LAST_WORD_FILE,
    LEAVE_ENV,
    REWARD_SOCKET,
    REWARD_SOCKET_ENV,
    REWARD_VARIABLES,
    TOKEN_FILE,
    TOKEN_FILE_ENV,
    instance,
    service,
)
from asyncflow.api.queue import LEAVE_S
from asyncflow_operator.desired.blueprint import Blueprint
from asyncflow_operator.observed import Manifest

_INTERFACE: Final = "eth0"
"""Name that the container runtimes give to the one interface of a pod."""
_HOME: Final[Mapping[str, str]] = MappingProxyType(
    {
        "HOME": "/tmp",  # noqa: S108 — the pod's own volume
        "USER": "asyncflow",
        "XDG_CACHE_HOME": "/tmp/cache",  # noqa: S108
        "TRITON_CACHE_DIR": "/tmp/cache/triton",  # noqa: S108
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/cache/inductor",  # noqa: S108
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
)
"""The root file system cannot be written, and the user has no entry in /etc/passwd."""


def make_environment(blueprint: Blueprint, index: int) -> list[Manifest]:
    """Return the variables of process ``index``, as a container's ``env``."""
    plain = {**_HOME, **_rank(blueprint, index), **_devices(blueprint, index), **blueprint.role.env}
    referred = {**_assigned(blueprint), **_host_ip(blueprint)}
    theirs = {variable.name for template in blueprint.templates for variable in template.env}
    return [
        {"name": HOST_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": KEY_FILE_ENV, "value": KEY_FILE},
        {"name": TOKEN_FILE_ENV, "value": TOKEN_FILE},
        {"name": LAST_WORD_ENV, "value": LAST_WORD_FILE},
        *([{"name": LEAVE_ENV, "value": f"{LEAVE_S:g}"}] if blueprint.role.name == "storage" else []),
        *([{"name": REWARD_SOCKET_ENV, "value": REWARD_SOCKET}] if blueprint.reward is not None else []),
        *(
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in referred.items()
            if name not in theirs
        ),
        *({"name": name, "value": value} for name, value in plain.items()),
    ]


def make_reward_environment(blueprint: Blueprint) -> list[Manifest]:
    """Return the variables of the container that scores: of the user's, only those that say where things are."""
    theirs = {variable.name: variable.value for template in blueprint.templates for variable in template.env}
    kept: dict[str, str] = {name: theirs[name] for name in REWARD_VARIABLES if name in theirs}
    return [{"name": name, "value": value} for name, value in (dict(_HOME) | kept).items()]


def _rank(blueprint: Blueprint, index: int) -> dict[str, str]:
    """Return what torchrun would tell the first rank of the pod, which tells the others."""
    family, role = blueprint.family, blueprint.role
    if role.world == 1:
        return {}
    named = f"{instance(family.name, role.name, 0)}.{service(family.name, role.name)}.{family.namespace}.svc"
    meeting = {"MASTER_ADDR": named if role.spread else "127.0.0.1", "MASTER_PORT": str(GANG_PORT)}
    return meeting | role.rank_variables(index)


def _devices(blueprint: Blueprint, index: int) -> dict[str, str]:
    resources = blueprint.role.resources
    facts = PROFILES[resources.profile]
    if not resources.accelerators:
        return {}
    host_network = blueprint.host_network
    return {
        **({facts.visible: ",".join(map(str, range(resources.accelerators)))} if facts.visible else {}),
        **({} if host_network else dict.fromkeys(facts.interfaces, _INTERFACE)),
        **ports(facts, blueprint.first_slot + index, host_network=host_network),
    }


def _assigned(blueprint: Blueprint) -> dict[str, str]:
    """Under Volcano the vendor's plug-in chooses the devices, and says which in an annotation."""
    facts = PROFILES[blueprint.role.resources.profile]
    if not facts.assigned or blueprint.scheduling.gang != "volcano":
        return {}
    return {facts.assigned: f"metadata.annotations['{facts.resource}']"}


def _host_ip(blueprint: Blueprint) -> dict[str, str]:
    facts = PROFILES[blueprint.role.resources.profile]
    return {facts.host_ip: "status.hostIP"} if facts.host_ip and blueprint.host_network else {}
