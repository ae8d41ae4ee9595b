"""Volumes and environment variables of a pod's containers.

Invariants: /tmp, /dev/shm and the folder of the run belong to the pod, except that a run folder that must outlive the
pod lies on a claim; everything else is read-only. Files that the vendor's container runtime does not provide are
mounted from the host, which Pod Security ``restricted`` and ``baseline`` refuse: such pods need a namespace that allows
it (``accelerators.host_paths``). The user's templates override every variable except ASYNCFLOW_*. The only address of
a peer in a variable is that of a gang's rank 0, which torch needs; all other processes connect to the driver.
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
    LEAVE_ENV,
    NODE_ENV,
    REWARD_FILE,
    REWARD_SOCKET,
    REWARD_SOCKET_ENV,
    REWARD_VARIABLES,
    STORE_PASSWORD_FILE,
    STORE_ROLES,
    STORE_SECRET,
    TERMINATION_MESSAGE_FILE,
    TLS_DIR,
    TLS_ENV,
    TOKEN_FILE,
    TOKEN_FILE_ENV,
    WORKDIR,
    instance,
    service,
)
from asyncflow.api.placement import PROFILES, host_paths, ports
from asyncflow.api.queue import DRAIN_S, SecretEntry
from asyncflow_operator.desired.blueprint import Blueprint
from asyncflow_operator.desired.secrets import KEYS, part_name
from asyncflow_operator.observed import Manifest

_READ_BY_GROUP: Final = 0o440
_TLS: Final = TLS_DIR.rpartition("/")[2]
_REWARD_SOCKET_MOUNT: Final[Manifest] = {"name": "rewards", "mountPath": REWARD_SOCKET.rpartition("/")[0]}
_INTERFACE: Final = "eth0"
"""Name of a pod's only network interface, the same under every container runtime."""
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
"""Variables that are needed because the root file system is read-only and the user has no entry in /etc/passwd."""


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
    devices = _device_volumes(blueprint)
    for part in (_run(claims), claims, devices, _rewards(blueprint)):
        volumes += part.volumes
        mounts += () if part is devices and blueprint.scores_only else part.mounts
    return Volumes(volumes, mounts)


def _device_volumes(blueprint: Blueprint) -> Volumes:
    """Return the volumes of the container that uses the devices."""
    shared, host = _shared_memory(blueprint), _host(blueprint)
    return Volumes(shared.volumes + host.volumes, shared.mounts + host.mounts)


def reward_mounts(blueprint: Blueprint) -> list[Manifest]:
    """Return the mounts of the reward container: its part of the manifest, its own /tmp, the socket, the read-only
    claims, and the mounts for its devices.
    """
    read_only = [mount for mount in _claims(blueprint, 0).mounts if mount.get("readOnly")]
    return [
        {"name": "rewards-config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "rewards-tmp", "mountPath": "/tmp"},  # noqa: S108 — its own volume
        _REWARD_SOCKET_MOUNT,
        *read_only,
        *(_device_volumes(blueprint).mounts if blueprint.scores_only else ()),
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
    """Return the sources of the configuration volume; its secrets are only those that process ``index`` needs."""
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
    """Return /dev/shm if the user sets its size or several processes of the pod exchange tensors through it.

    Without a size it may grow to the pod's memory. The default of container runtimes, 64 MiB, is too small for NCCL,
    HCCL and the workers of an engine.
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
    used = [mounted for mounted in blueprint.mounts if index == 0 or not mounted.first]
    claims = {mounted.volume: mounted.claim for mounted in used}
    mounts = [
        {
            "name": mounted.volume,
            "mountPath": mounted.path,
            **({"subPath": mounted.within} if mounted.within else {}),
            **({"readOnly": True} if mounted.read_only else {}),
        }
        for mounted in used
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
    uses_devices = not blueprint.scores_only
    devices = _devices(blueprint, index) if uses_devices else {}
    plain = {**_HOME, **_rank(blueprint, index), **devices, **blueprint.role.env}
    pod_fields = {**(_assigned(blueprint) if uses_devices else {}), **_host_ip(blueprint)}
    user_variables = {variable.name for template in blueprint.templates for variable in template.env}
    return [
        {"name": HOST_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *_from_pod_fields({NODE_ENV: "spec.nodeName"} if blueprint.role.name == "rollout" else {}),
        {"name": TLS_ENV, "value": TLS_DIR},
        *([{"name": TOKEN_FILE_ENV, "value": TOKEN_FILE}] if blueprint.role.name == "driver" else []),
        {"name": LAST_WORDS_ENV, "value": TERMINATION_MESSAGE_FILE},
        *([{"name": LEAVE_ENV, "value": f"{DRAIN_S:g}"}] if blueprint.role.name == "storage" else []),
        *([{"name": REWARD_SOCKET_ENV, "value": REWARD_SOCKET}] if blueprint.reward is not None else []),
        *_from_pod_fields({name: path for name, path in pod_fields.items() if name not in user_variables}),
        *({"name": name, "value": value} for name, value in plain.items()),
    ]


def make_reward_environment(blueprint: Blueprint, index: int) -> list[Manifest]:
    """Return the reward container's variables; of the user's only ``REWARD_VARIABLES`` and those of its devices."""
    user_variables = {variable.name: variable.value for template in blueprint.templates for variable in template.env}
    names = list(REWARD_VARIABLES)
    devices: dict[str, str] = {}
    if blueprint.scores_only:
        facts = PROFILES[blueprint.role.resources.profile]
        devices = {**facts.env, **_devices(blueprint, index)}
        names += [*facts.variables, *devices]
    kept = {name: user_variables[name] for name in names if name in user_variables}
    from_pod = _from_pod_fields(_assigned(blueprint)) if blueprint.scores_only else ()
    return [*from_pod, *({"name": name, "value": value} for name, value in {**_HOME, **devices, **kept}.items())]


def _from_pod_fields(paths: Mapping[str, str]) -> Iterator[Manifest]:
    """Yield variables whose values are fields of the pod. paths: the path of the field, by variable."""
    for name, path in paths.items():
        yield {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _rank(blueprint: Blueprint, index: int) -> dict[str, str]:
    """Return the variables that torchrun would set for the pod's first rank, which passes them to its other ranks."""
    family, role = blueprint.family, blueprint.role
    if role.world == 1:
        return {}
    host = f"{instance(family.name, role.name, 0)}.{service(family.name, role.name)}.{family.namespace}.svc"
    rendezvous = {"MASTER_ADDR": host if role.spread else "127.0.0.1", "MASTER_PORT": str(GANG_PORT)}
    return rendezvous | role.rank_variables(index)


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
    """Return the variable for the devices that the vendor's plug-in for Volcano chooses and writes as an annotation."""
    facts = PROFILES[blueprint.role.resources.profile]
    if not facts.assigned or blueprint.scheduling.gang != "volcano":
        return {}
    return {facts.assigned: f"metadata.annotations['{facts.resource}']"}


def _host_ip(blueprint: Blueprint) -> dict[str, str]:
    facts = PROFILES[blueprint.role.resources.profile]
    return {facts.host_ip: "status.hostIP"} if facts.host_ip and blueprint.host_network else {}
