"""Constraints on where a pod may run: devices, nodes that have them, neighbours.

Invariant: what the facts demand (the node's kind) is required, what is only good for speed (spread, nearness) is
preferred, so that nothing waits for a place that is merely better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from asyncflow.api.accelerators import PROFILES
from asyncflow.api.names import LABEL_ROLE
from asyncflow_operator.desired.blueprint import Blueprint
from asyncflow_operator.observed import Manifest

_NOT_READY: Final = "node.kubernetes.io/not-ready"
_UNREACHABLE: Final = "node.kubernetes.io/unreachable"
_NODE: Final = "kubernetes.io/hostname"
_NEAR_WEIGHT: Final = 10


def make_placement(blueprint: Blueprint) -> Manifest:
    """Return the fields of a pod's spec that say where it may run."""
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
    """Return the tolerations that say how long a pod stays on a node that is lost, which Kubernetes would make 300 s.

    A rollout goes at once from a node that does not answer: others have its prompts as soon as its leases end.
    tolerations: those that the pod has; what they say about such a node stays.
    """
    seconds = {_NOT_READY: blueprint.node_lost_s, _UNREACHABLE: blueprint.node_lost_s}
    if blueprint.role.name == "rollout":
        seconds[_UNREACHABLE] = 0
    said = {
        str(each.get("key") or "")
        for each in tolerations
        if isinstance(each, Mapping) and each.get("effect") in (None, "", "NoExecute")
    }
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": after}
        for key, after in seconds.items()
        if not said & {key, ""}
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
