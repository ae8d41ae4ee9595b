"""The pod of one process of a role, and its placement.

A pod satisfies Pod Security ``restricted`` unless a template changes that or a device needs paths of its host. Its
containers never restart, whatever a template says: the operator creates a new pod with the next attempt. There is no
preStop hook, because on SIGTERM the process itself hands back unfinished work within the grace period. On the host
network each process of a family has its own HTTP port, so that several fit on one node.

Invariants: a pod is a function of (blueprint, index, attempt). Its name depends on role and index only, so that the API
server rejects a second pod for the same replica. Node properties that its devices need are required; those that only
improve speed (spread, proximity) are preferred, so that no pod waits for a better node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import reduce
from types import MappingProxyType
from typing import Final

from asyncflow.api.names import (
    CONTAINER,
    ENVIRONMENT_FILE,
    HTTP_PORT,
    JOB_FILE,
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_ROLE,
    REWARD_CONTAINER,
    REWARD_FILE,
    REWARD_SOCKET,
    RPC_PORT,
    TASK,
    WORKDIR,
    instance,
    kind_of_role,
    service,
)
from asyncflow.api.placement import PROFILES
from asyncflow_operator.desired.blueprint import Blueprint, GangMembership
from asyncflow_operator.desired.container import make_environment, make_reward_environment, make_volumes, reward_mounts
from asyncflow_operator.desired.gang import membership
from asyncflow_operator.desired.objects import make_object, merge, stamped
from asyncflow_operator.observed import Manifest

_NOT_READY: Final = "node.kubernetes.io/not-ready"
_UNREACHABLE: Final = "node.kubernetes.io/unreachable"
_NODE: Final = "kubernetes.io/hostname"
_NEAR_WEIGHT: Final = 10
_HOLDS_LEASES: Final = ("rollout", "reward", "reference", TASK)
USER: Final = 65532
"""User and group of the runtime images."""
_EVERYWHERE: Final = f"tcp://*:{RPC_PORT}"
_DEFAULT_CONTAINER: Final = MappingProxyType({"kubectl.kubernetes.io/default-container": CONTAINER})
_ONCE: Final = MappingProxyType({"restartPolicy": "Never"})
"""Field of every pod's spec that no template can change."""
_CONTAINER_SECURITY: Final[Manifest] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_REWARD_CPU: Final = 0.1
"""Cores that the reward container requests by default."""
_START_PERIOD_S: Final = 1
_READY_PERIOD_S: Final = 2
_LIVE_PERIOD_S: Final = 10
_LIVE_FAILURES: Final = 18
"""Failed probes after which a process counts as hung: three minutes, longer than any computation on its event loop."""


def make_placement(blueprint: Blueprint) -> Manifest:
    """Return the fields of a pod's spec that restrict its placement."""
    resources = blueprint.role.resources
    facts = PROFILES[resources.profile]
    placement: Manifest = {}
    if facts.node_labels:
        placement["nodeSelector"] = dict(facts.node_labels)
    if facts.resource:
        placement["tolerations"] = [{"key": facts.resource, "operator": "Exists", "effect": "NoSchedule"}]
    if affinity := _affinity(blueprint):
        placement["affinity"] = affinity
    if blueprint.role.name == "storage":
        placement["topologySpreadConstraints"] = [_spread(blueprint)]
    return placement


def lost_nodes(blueprint: Blueprint, tolerations: Sequence[object]) -> list[Manifest]:
    """Return the tolerations that limit how long a pod stays on a lost node, which is 300 s by default in Kubernetes.

    A rollout or a process of another task is evicted immediately from a node that does not answer; after its leases
    expire, its peers get its rows. tolerations: those that the pod already has, which override these.
    """
    seconds = {_NOT_READY: blueprint.node_lost_s, _UNREACHABLE: blueprint.node_lost_s}
    if kind_of_role(blueprint.role.name) in _HOLDS_LEASES:
        seconds[_UNREACHABLE] = 0
    tolerated = {
        str(each.get("key") or "")
        for each in tolerations
        if isinstance(each, Mapping) and each.get("effect") in (None, "", "NoExecute")
    }
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": after}
        for key, after in seconds.items()
        if not tolerated & {key, ""}
    ]


def _affinity(blueprint: Blueprint) -> Manifest:
    facts = PROFILES[blueprint.role.resources.profile]
    affinity: Manifest = {}
    if facts.node_types:
        kinds = [{"key": key, "operator": "In", "values": list(values)} for key, values in facts.node_types.items()]
        terms = {"nodeSelectorTerms": [{"matchExpressions": kinds}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if blueprint.readers:
        near = {"topologyKey": _NODE, "labelSelector": _selector(blueprint, *blueprint.readers)}
        preferred = [{"weight": _NEAR_WEIGHT, "podAffinityTerm": near}]
        affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    return affinity


def _spread(blueprint: Blueprint) -> Manifest:
    return {
        "maxSkew": 1,
        "topologyKey": _NODE,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": _selector(blueprint, blueprint.role.name),
    }


def _selector(blueprint: Blueprint, *roles: str) -> Manifest:
    return {
        "matchLabels": dict(blueprint.family.selector),
        "matchExpressions": [{"key": LABEL_ROLE, "operator": "In", "values": list(roles)}],
    }


def make_pod(blueprint: Blueprint, *, index: int, attempt: int) -> Manifest:
    """Return the pod of process ``index`` in this attempt. Its digest is computed from ``blueprint.requested``."""
    family, role = blueprint.family, blueprint.role
    member = membership(blueprint, index)
    labels = {
        **_from_templates(blueprint, "labels"),
        **member.labels,
        **blueprint.labels,
        LABEL_ROLE: role.name,
        LABEL_INDEX: str(index),
        LABEL_ATTEMPT: str(attempt),
    }
    pod = make_object(
        "v1",
        "Pod",
        family,
        name=instance(family.name, role.name, index),
        labels=labels,
        annotations={**_DEFAULT_CONTAINER, **_from_templates(blueprint, "annotations"), **member.annotations},
        body={"spec": _spec(blueprint, member, index=index, attempt=attempt)},
    )
    return stamped(pod, made_from=blueprint.requested)


def _from_templates(blueprint: Blueprint, field: str) -> dict[str, str]:
    return {key: value for template in blueprint.templates for key, value in getattr(template, field).items()}


def _spec(blueprint: Blueprint, member: GangMembership, *, index: int, attempt: int) -> Manifest:
    family = blueprint.family
    http_port = HTTP_PORT + (blueprint.first_replica + index if blueprint.host_network else 0)
    volumes = make_volumes(blueprint, index)
    container = _container(blueprint, index=index, attempt=attempt, http_port=http_port)
    base: Manifest = {
        "serviceAccountName": family.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(blueprint.grace_s),
        "securityContext": _pod_security(blueprint),
        **make_placement(blueprint),
        **member.spec,
        **_rewards(blueprint, index=index),
        "containers": [{**container, "volumeMounts": volumes.mounts}],
        "volumes": volumes.volumes,
    }
    if blueprint.role.spread:
        base |= {"hostname": instance(family.name, blueprint.role.name, index)}
        base |= {"subdomain": service(family.name, blueprint.role.name)}
    if blueprint.host_network:
        base["dnsPolicy"] = "ClusterFirstWithHostNet"
    patches: list[Mapping[str, object]] = [template.pod_spec for template in blueprint.templates]
    spec = reduce(merge, [*patches, member.place, _ONCE], base)
    tolerations = spec.get("tolerations", [])
    if isinstance(tolerations, list):
        spec["tolerations"] = tolerations + lost_nodes(blueprint, tolerations)
    if not spec.get("runtimeClassName"):
        spec.pop("runtimeClassName", None)
    return spec


def _container(blueprint: Blueprint, *, index: int, attempt: int, http_port: int) -> Manifest:
    role = blueprint.role
    leads = blueprint.leads and index == 0
    driver = _EVERYWHERE if leads else blueprint.leader
    numbers = {port.name: http_port if port.name == "http" else port.number for port in role.ports}
    listens = numbers if leads else {"http": http_port}
    control_port = listens.get("control")
    return {
        "name": CONTAINER,
        "image": blueprint.image,
        "command": role.command(
            index=index,
            attempt=attempt,
            driver=driver,
            job=JOB_FILE,
            workdir=WORKDIR,
            http_port=http_port,
            control_port=control_port,
        ),
        "workingDir": WORKDIR,
        "env": make_environment(blueprint, index),
        **({"envFrom": [{"secretRef": {"name": name}} for name in blueprint.env_from]} if blueprint.env_from else {}),
        "ports": [{"name": name, "containerPort": number} for name, number in listens.items()],
        "resources": _resources(blueprint),
        "securityContext": _CONTAINER_SECURITY,
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": "http"},
            "periodSeconds": _START_PERIOD_S,
            "timeoutSeconds": _START_PERIOD_S,
            "failureThreshold": math.ceil(role.readiness.within_s / _START_PERIOD_S),
        },
        "readinessProbe": {
            "httpGet": {"path": role.readiness.path, "port": role.readiness.port},
            "periodSeconds": _READY_PERIOD_S,
            "timeoutSeconds": _READY_PERIOD_S,
        },
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "http"},
            "periodSeconds": _LIVE_PERIOD_S,
            "timeoutSeconds": _LIVE_PERIOD_S,
            "failureThreshold": _LIVE_FAILURES,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _rewards(blueprint: Blueprint, *, index: int) -> Manifest:
    """Return the reward container, which scores samples; it starts before the pod's main container and ends after it.

    It runs users' code on the output of a model, so it has no Secret and no token, and shares only a folder with a
    socket with the main container.
    """
    if blueprint.reward is None:
        return {}
    resources = blueprint.reward.resources
    cpu = float(resources.cpu.amount) if resources.cpu is not None else _REWARD_CPU
    hard = {"memory": str(resources.memory.bytes)} if resources.memory is not None else {}
    hard |= _devices(blueprint) if blueprint.scores_only else {}
    container = {
        "name": REWARD_CONTAINER,
        "image": blueprint.image,
        "restartPolicy": "Always",
        "command": [
            *("python", "-m", "asyncflow", "rewards", "--reward", REWARD_FILE),
            *(("--environment", ENVIRONMENT_FILE) if blueprint.has_environment else ()),
            *("--socket", REWARD_SOCKET),
        ],
        "env": make_reward_environment(blueprint, index),
        "resources": _requirements(cpu, hard),
        "securityContext": _CONTAINER_SECURITY,
        "volumeMounts": reward_mounts(blueprint),
    }
    return {"initContainers": [container]}


def _resources(blueprint: Blueprint) -> Manifest:
    resources = blueprint.role.resources
    hard: dict[str, str] = {}
    if resources.memory is not None:
        hard["memory"] = str(resources.memory)
    hard |= {} if blueprint.scores_only else _devices(blueprint)
    return _requirements(resources.cpu, hard)


def _devices(blueprint: Blueprint) -> dict[str, str]:
    resources = blueprint.role.resources
    return {resources.resource: str(resources.accelerators)} if resources.accelerators else {}


def _requirements(cpu: float, hard: dict[str, str]) -> Manifest:
    """Return the requests and limits of a container. hard: memory and devices, which are requests and limits."""
    requests = {"cpu": f"{math.ceil(Decimal(str(cpu)) * 1000)}m", **hard}
    return {"requests": requests, "limits": hard} if hard else {"requests": requests}


def _pod_security(blueprint: Blueprint) -> Manifest:
    groups = PROFILES[blueprint.role.resources.profile].groups
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **({"supplementalGroups": list(groups)} if groups else {}),
    }
