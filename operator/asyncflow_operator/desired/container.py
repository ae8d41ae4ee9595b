"""The surroundings of a pod's containers: their volumes and their environment variables.

Invariants: /tmp, /dev/shm and the folder of the run are the pod's own, but for the folder of a run that must outlive
it, which lies on a claim; everything else is read-only. What a vendor's container runtime does not bring is mounted
from the host, which Pod Security ``restricted`` and ``baseline`` refuse: such pods need a namespace that allows it
(``accelerators.host_paths``). What the user's templates say wins over every variable but ASYNCFLOW_*; no address of a
peer is among them but that of a gang's rank 0, which torch wants: all others dial in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from asyncflow.api.names import (
    CERTIFICATE_FILES,
    CONFIG_DIR,
    ENVIRONMENT_FILE,
    GANG_PORT,
    HOST_ENV,
    JOB_FILE,
    LAST_WORDS_ENV,
    LAST_WORDS_FILE,
    LEAVE_ENV,
    NODE_ENV,
    REWARD_FILE,
    REWARD_SOCKET,
    REWARD_SOCKET_ENV,
    REWARD_VARIABLES,
    STORE_PASSWORD_FILE,
    STORE_ROLES,
    STORE_SECRET,
    TLS_DIR,
    TLS_ENV,
    TOKEN_FILE,
    TOKEN_FILE_ENV,
    WORKDIR,
    instance,
    service,
)
from asyncflow.api.placement import PROFILES, host_paths, ports
from asyncflow.api.queue import LEAVE_S, SecretEntry
from asyncflow_operator.desired.blueprint import Blueprint
from asyncflow_operator.desired.secrets import KEYS, part_name
from asyncflow_operator.observed import Manifest

_READ_BY_GROUP: Final = 0o440
_TLS: Final = TLS_DIR.rpartition("/")[2]
_REWARD_SOCKET_MOUNT: Final[Manifest] = {"name": "rewards", "mountPath": REWARD_SOCKET.rpartition("/")[0]}
_INTERFACE: Final = "eth0"
"""Name of the one interface of a pod, by every container runtime."""
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


class Volumes(NamedTuple):
    """A pod's ``volumes`` and its container's ``volumeMounts``."""

    volumes: list[Manifest]
    mounts: list[Manifest]


def make_volumes(blueprint: Blueprint, index: int) -> Volumes:
    """Return the volumes of process ``index``."""
    volumes = [
        {"name": "config", "projected": {"defaultMode": _READ_BY_GROUP, "sources": _config(blueprint, index)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 — the pod's own volume
    ]
    claims = _claims(blueprint, index)
    devices = _of_devices(blueprint)
    for part in (_run(claims), claims, devices, _rewards(blueprint)):
        volumes += part.volumes
        mounts += () if part is devices and blueprint.judges_alone else part.mounts
    return Volumes(volumes, mounts)


def _of_devices(blueprint: Blueprint) -> Volumes:
    """Return what the container needs that computes."""
    shared, host = _shared_memory(blueprint), _host(blueprint)
    return Volumes(shared.volumes + host.volumes, shared.mounts + host.mounts)


def reward_mounts(blueprint: Blueprint) -> list[Manifest]:
    """Return the mounts of the container that scores: its part of the manifest, its own /tmp, the socket, claims, and
    what its devices need.
    """
    read = [mount for mount in _claims(blueprint, 0).mounts if mount.get("readOnly")]
    return [
        {"name": "rewards-config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "rewards-tmp", "mountPath": "/tmp"},  # noqa: S108 — its own volume
        _REWARD_SOCKET_MOUNT,
        *read,
        *(_of_devices(blueprint).mounts if blueprint.judges_alone else ()),
    ]


def _rewards(blueprint: Blueprint) -> Volumes:
    if blueprint.reward is None:
        return Volumes([], [])
    files = (REWARD_FILE, ENVIRONMENT_FILE) if blueprint.has_environment else (REWARD_FILE,)
    part = {"name": blueprint.family.name, "items": _items(*files), "defaultMode": _READ_BY_GROUP}
    volumes: list[Manifest] = [
        {"name": "rewards-config", "configMap": part},
        {"name": "rewards-tmp", "emptyDir": {}},
        {"name": "rewards", "emptyDir": {}},
    ]
    return Volumes(volumes, [_REWARD_SOCKET_MOUNT])


def _items(*paths: str) -> list[Manifest]:
    return [{"key": path.rpartition("/")[2], "path": path.rpartition("/")[2]} for path in paths]


def _config(blueprint: Blueprint, index: int) -> list[Manifest]:
    """Return the sources of the configuration: of what is secret, only what process ``index`` of the role needs."""
    family, secrets, store = blueprint.family.name, blueprint.secrets, blueprint.store
    name = blueprint.role.name
    held = (CERTIFICATE_FILES[0], f"{index}.crt", f"{index}.key")
    files = [f"{_TLS}/{file}" for file in CERTIFICATE_FILES]
    certificate = [{"key": key, "path": path} for key, path in zip(held, files, strict=True)]
    own = _items(TOKEN_FILE) if name == "driver" else []
    own += [{"key": STORE_SECRET, "path": f"{_TLS}/{STORE_SECRET}"}] if name in STORE_ROLES else []
    return [
        {"configMap": {"name": family, "items": _items(JOB_FILE)}},
        {"secret": {"name": secrets.name(part_name(name, index)), "items": certificate}},
        *([{"secret": {"name": secrets.name(KEYS), "items": own}}] if own else []),
        *([_entry(store.password, STORE_PASSWORD_FILE)] if store is not None and store.password is not None else []),
    ]


def _entry(entry: SecretEntry, path: str) -> Manifest:
    return {"secret": {"name": entry.name, "items": [{"key": entry.key, "path": path.rpartition("/")[2]}]}}


def _run(claims: Volumes) -> Volumes:
    if any(mount["mountPath"] == WORKDIR for mount in claims.mounts):
        return Volumes([], [])
    return Volumes([{"name": "run", "emptyDir": {}}], [{"name": "run", "mountPath": WORKDIR}])


def _shared_memory(blueprint: Blueprint) -> Volumes:
    """Return /dev/shm where a size is asked for, or processes of the pod exchange tensors through it.

    Without a size it may grow to the pod's memory; what a container runtime provides by itself, 64 MiB, is too little
    for NCCL, HCCL and the workers of an engine.
    """
    role, size = blueprint.role, blueprint.role.resources.shared_memory
    if size is None and max(role.ranks, role.resources.accelerators) <= 1:
        return Volumes([], [])
    limit = {} if size is None else {"sizeLimit": str(size)}
    return Volumes(
        [{"name": "shm", "emptyDir": {"medium": "Memory", **limit}}],
        [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 — the pod's own volume
    )


def _claims(blueprint: Blueprint, index: int) -> Volumes:
    seen = [mounted for mounted in blueprint.mounts if index == 0 or not mounted.first]
    claims = {mounted.volume: mounted.claim for mounted in seen}
    mounts = [
        {
            "name": mounted.volume,
            "mountPath": mounted.path,
            **({"subPath": mounted.within} if mounted.within else {}),
            **({"readOnly": True} if mounted.read_only else {}),
        }
        for mounted in seen
    ]
    return Volumes(
        [{"name": volume, "persistentVolumeClaim": {"claimName": name}} for volume, name in claims.items()], mounts
    )


def _host(blueprint: Blueprint) -> Volumes:
    resources = blueprint.role.resources
    facts = PROFILES[resources.profile]
    paths = host_paths(facts, runtime=blueprint.vendor_runtime, gang=blueprint.role.linked)
    named = [(f"host-{number}", path) for number, path in enumerate(paths)]
    return Volumes(
        [{"name": name, "hostPath": {"path": path}} for name, path in named],
        [{"name": name, "mountPath": path, "readOnly": True} for name, path in named],
    )


def make_environment(blueprint: Blueprint, index: int) -> list[Manifest]:
    """Return the variables of process ``index``, as a container's ``env``."""
    computes = not blueprint.judges_alone
    devices = _devices(blueprint, index) if computes else {}
    plain = {**_HOME, **_rank(blueprint, index), **devices, **blueprint.role.env}
    referred = {**(_assigned(blueprint) if computes else {}), **_host_ip(blueprint)}
    theirs = {variable.name for template in blueprint.templates for variable in template.env}
    return [
        {"name": HOST_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *_of_the_pod({NODE_ENV: "spec.nodeName"} if blueprint.role.name == "rollout" else {}),
        {"name": TLS_ENV, "value": TLS_DIR},
        *([{"name": TOKEN_FILE_ENV, "value": TOKEN_FILE}] if blueprint.role.name == "driver" else []),
        {"name": LAST_WORDS_ENV, "value": LAST_WORDS_FILE},
        *([{"name": LEAVE_ENV, "value": f"{LEAVE_S:g}"}] if blueprint.role.name == "storage" else []),
        *([{"name": REWARD_SOCKET_ENV, "value": REWARD_SOCKET}] if blueprint.reward is not None else []),
        *_of_the_pod({name: path for name, path in referred.items() if name not in theirs}),
        *({"name": name, "value": value} for name, value in plain.items()),
    ]


def make_reward_environment(blueprint: Blueprint, index: int) -> list[Manifest]:
    """Return the variables of the container that scores in the pod of process ``index``.

    Of the user's it has only those that say where things are, and those of its devices.
    """
    theirs = {variable.name: variable.value for template in blueprint.templates for variable in template.env}
    names = list(REWARD_VARIABLES)
    devices: dict[str, str] = {}
    if blueprint.judges_alone:
        facts = PROFILES[blueprint.role.resources.profile]
        devices = {**facts.env, **_devices(blueprint, index)}
        names += [*facts.variables, *devices]
    kept = {name: theirs[name] for name in names if name in theirs}
    referred = _of_the_pod(_assigned(blueprint)) if blueprint.judges_alone else ()
    return [*referred, *({"name": name, "value": value} for name, value in {**_HOME, **devices, **kept}.items())]


def _of_the_pod(referred: Mapping[str, str]) -> Iterator[Manifest]:
    """Yield variables whose values are fields of the pod, by the paths of these."""
    for name, path in referred.items():
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _rank(blueprint: Blueprint, index: int) -> dict[str, str]:
    """Return what torchrun would set for the first rank of the pod, which passes it on to the others."""
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
