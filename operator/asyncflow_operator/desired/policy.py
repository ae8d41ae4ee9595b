"""Policies for a family's pods: who may talk to them, how many may be evicted at once, which rights they have.

Invariant: pods have no right at the API server, and nobody but their family reaches more of them than the port with
metrics and status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncflow.api.names import LABEL_ROLE, RoleName
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest

_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_DNS_PORT: Final = 53


def make_account(family: Family) -> Manifest:
    """Return a ServiceAccount that nothing is granted to, and whose token no pod gets."""
    body = {"automountServiceAccountToken": False}
    return stamped(make_object("v1", "ServiceAccount", family, name=family.name, body=body))


def make_budget(family: Family, *, roles: Sequence[RoleName], pods: int) -> Manifest:
    """Let ``kubectl drain`` take one of the ``pods`` of these roles at a time; of pods that do not work, any.

    A number of pods that must stay, because for pods whose owner has a scale of its own (that of the rollouts) a number
    of pods that may go would be counted from that.
    """
    selector = {
        "matchLabels": dict(family.selector),
        "matchExpressions": [{"key": LABEL_ROLE, "operator": "In", "values": list(roles)}],
    }
    body = {
        "spec": {"minAvailable": max(0, pods - 1), "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    }
    return stamped(make_object("policy/v1", "PodDisruptionBudget", family, name=family.name, body=body))


def make_egress_policy(family: Family, *, network: bool) -> Manifest:
    """Let the pods in which samples are scored open connections to the family and to DNS only; with network, to all.

    A policy is of a pod, so it holds for the rollout too, which dials nobody else. Its name cannot be that of a job,
    which has no dot.
    """
    inside: list[Manifest] = [
        {"to": [{"podSelector": {"matchLabels": dict(family.selector)}}]},
        {"ports": [{"protocol": protocol, "port": _DNS_PORT} for protocol in ("UDP", "TCP")]},
    ]
    selector = {"matchLabels": {**family.selector, LABEL_ROLE: "rollout"}}
    spec = {"podSelector": selector, "policyTypes": ["Egress"], "egress": [{}] if network else inside}
    name = f"{family.name}.rewards"
    return stamped(make_object("networking.k8s.io/v1", "NetworkPolicy", family, name=name, body={"spec": spec}))


def make_network_policy(family: Family, *, watchers: Sequence[str], open_to_namespace: bool = False) -> Manifest:
    """Let the family's pods talk to each other, and the namespaces ``watchers`` (operator, monitoring) read metrics.

    open_to_namespace: whether all pods of the namespace may talk to them, where a key decides who is heard.
    """
    peers = [{"podSelector": {} if open_to_namespace else {"matchLabels": dict(family.selector)}}]
    ingress: list[Manifest] = [{"from": peers}]
    if watchers:
        named = {"matchExpressions": [{"key": _NAMESPACE_NAME, "operator": "In", "values": sorted(set(watchers))}]}
        ingress.append({"from": [{"namespaceSelector": named}], "ports": [{"protocol": "TCP", "port": "http"}]})
    spec = {"podSelector": {"matchLabels": dict(family.selector)}, "policyTypes": ["Ingress"], "ingress": ingress}
    return stamped(make_object("networking.k8s.io/v1", "NetworkPolicy", family, name=family.name, body={"spec": spec}))
