"""The volumes of a pod, and where its container sees them.

Invariant: /tmp, /dev/shm and the folder of the run are the pod's own, but for the folder of a run that must outlive it,
which lies on a claim; everything else is read-only. What a vendor's container runtime does not bring is mounted from
the host, which Pod Security ``restricted`` and ``baseline`` refuse: such pods need a namespace that allows it
(``accelerators.host_paths``).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncflow.api.accelerators import PROFILES, host_paths
from asyncflow.api.names import (
    CONFIG_DIR,
    JOB_FILE,
    KEY_FILE,
    REWARD_FILE,
    REWARD_SOCKET,
    STORE_PASSWORD_FILE,
    TOKEN_FILE,
    WORKDIR,
)
from asyncflow.api.queue import SecretEntry
from asyncflow_operator.desired.blueprint import Blueprint
from asyncflow_operator.observed import Manifest

_READ_BY_GROUP: Final = 0o440
_REWARD_SOCKET_MOUNT: Final[Manifest] = {"name": "rewards", "mountPath": REWARD_SOCKET.rpartition("/")[0]}


class Volumes(NamedTuple):
    """A pod's ``volumes`` and its container's ``volumeMounts``."""

    volumes: list[Manifest]
    mounts: list[Manifest]


def make_volumes(blueprint: Blueprint, index: int) -> Volumes:
    """Return the volumes of process ``index``."""
    volumes = [
        {"name": "config", "projected": {"defaultMode": _READ_BY_GROUP, "sources": _config(blueprint)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 — the pod's own volume
    ]
    claims = _claims(blueprint, index)
    for part in (_run(claims), claims, _shared_memory(blueprint), _host(blueprint), _rewards(blueprint)):
        volumes += part.volumes
        mounts += part.mounts
    return Volumes(volumes, mounts)


def reward_mounts(blueprint: Blueprint) -> list[Manifest]:
    """Return what the container that scores mounts: its part of the manifest, its own /tmp, the socket, claims."""
    read = [mount for mount in _claims(blueprint, 0).mounts if mount.get("readOnly")]
    return [
        {"name": "rewards-config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "rewards-tmp", "mountPath": "/tmp"},  # noqa: S108 — its own volume
        _REWARD_SOCKET_MOUNT,
        *read,
    ]


def _rewards(blueprint: Blueprint) -> Volumes:
    if blueprint.reward is None:
        return Volumes([], [])
    part = {"name": blueprint.family.name, "items": _items(REWARD_FILE), "defaultMode": _READ_BY_GROUP}
    volumes: list[Manifest] = [
        {"name": "rewards-config", "configMap": part},
        {"name": "rewards-tmp", "emptyDir": {}},
        {"name": "rewards", "emptyDir": {}},
    ]
    return Volumes(volumes, [_REWARD_SOCKET_MOUNT])


def _items(*paths: str) -> list[Manifest]:
    return [{"key": path.rpartition("/")[2], "path": path.rpartition("/")[2]} for path in paths]


def _config(blueprint: Blueprint) -> list[Manifest]:
    family, store = blueprint.family.name, blueprint.store
    return [
        {"configMap": {"name": family, "items": _items(JOB_FILE)}},
        {"secret": {"name": blueprint.keys, "items": _items(KEY_FILE, TOKEN_FILE)}},
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

    Without a size it may grow to the pod's memory; what a container runtime gives by itself, 64 MiB, is too little for
    NCCL, HCCL and the workers of an engine.
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
    paths = host_paths(facts, runtime=blueprint.vendor_runtime, gang=blueprint.role.spread)
    named = [(f"host-{number}", path) for number, path in enumerate(paths)]
    return Volumes(
        [{"name": name, "hostPath": {"path": path}} for name, path in named],
        [{"name": name, "mountPath": path, "readOnly": True} for name, path in named],
    )
