"""Supporting objects of a family, all except its pods: its manifest, TransferQueue, WeightSync, Services and policies.

The manifest contains the spec, without the fields that the API server and the operator add to an object. If a job names
a WeightSync, the manifest has the fields of the WeightSync in place of its name. It is written as JSON, which is valid
YAML and much faster to produce. Fields with default values are left out, so that a job that started with an older image
can read the manifest of a newer operator: it contains no field that the older image does not know.

Invariants: the manifest changes only when the spec changes, and is the same while a job is suspended. A job that names
an existing WeightSync creates none. The address of a process exists as soon as the process does, ready or not: its
peers must connect before it becomes ready, and the operator must reach it to learn why it is not ready. Pods have no
rights at the API server. Only pods of the family and followers, which have a label, reach more than the port with
metrics and status; for a queue without a job, all pods of its namespace may call. Only the family reaches the processes
of a store. Only the operator reaches the driver's port for orders; no other pod does, not even of the family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from asyncflow.api.base import Spec
from asyncflow.api.job import RLJob
from asyncflow.api.names import (
    API_VERSION,
    CONTROL_PORT,
    ENVIRONMENT_FILE,
    FIELD_MANAGER,
    GANG_PORT,
    HTTP_PORT,
    JOB_FILE,
    LABEL_FOLLOWS,
    LABEL_INDEX,
    LABEL_ROLE,
    REWARD_FILE,
    RPC_PORT,
    RoleName,
    service,
)
from asyncflow.api.queue import TransferQueue
from asyncflow.api.rewards import RewardSpec
from asyncflow.api.weights import WeightSync
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest

_BREAKS: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")
"""Characters that JSON leaves unescaped and that YAML treats as line breaks or refuses."""
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_OPERATOR: Final = MappingProxyType({"app.kubernetes.io/name": FIELD_MANAGER})
"""Label that the chart sets on the operator's pods."""
_DNS_PORTS: Final = (53, 5353)
"""Ports of a DNS service and of its pods on OpenShift; policies apply to the address after translation."""


def make_config(manifest: RLJob | TransferQueue | WeightSync, family: Family, *, name: str = "") -> Manifest:
    """Return the ConfigMap with the manifest and, for a job, separate files for its reward container.

    name: its name, by default the name of the family.
    """
    data = {_key(JOB_FILE): _text(_manifest(manifest, family))}
    if isinstance(manifest, RLJob):
        data[_key(REWARD_FILE)] = _text(_reward_section(manifest.spec.reward))
        if manifest.spec.environment is not None:
            data[_key(ENVIRONMENT_FILE)] = _text(_without_defaults(manifest.spec.environment))
    return stamped(make_object("v1", "ConfigMap", family, name=name or family.name, body={"data": data}))


def _manifest(manifest: RLJob | TransferQueue | WeightSync, family: Family) -> Manifest:
    spec = _without_defaults(manifest.spec)
    spec.pop("suspend", None)
    if (weights := spec.get("weightSync")) is not None:
        weights.pop("name", None)
    metadata = {"name": family.name, "namespace": family.namespace, "uid": family.owner.uid}
    return {"apiVersion": manifest.api_version, "kind": manifest.kind, "metadata": metadata, "spec": spec}


def _without_defaults(spec: Spec) -> Manifest:
    """Return a spec without fields that have default values, since older definitions in the cluster may lack them."""
    return spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)


def _reward_section(spec: RewardSpec) -> Manifest:
    """Return the section that the reward container reads; of the separate reward role only its accelerator is kept."""
    section = _without_defaults(spec)
    if "role" in section:
        section["role"] = {name: value for name, value in section["role"].items() if name == "accelerator"}
    return section


def _key(path: str) -> str:
    return path.rpartition("/")[2]


def _text(data: Manifest) -> str:
    text = json.dumps(data, ensure_ascii=False, indent=1)
    return _BREAKS.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def make_children(job: RLJob, family: Family) -> tuple[Manifest, ...]:
    """Return the job's own TransferQueue and WeightSync."""
    spec = job.spec
    queue = _without_defaults(spec.transfer_queue)
    queue |= {"ledger": _without_defaults(spec.storage.ledger), "template": _without_defaults(spec.template)}
    queue["storageUnits"] = spec.transfer_queue.storage_units
    made = [make_object(API_VERSION, "TransferQueue", family, name=family.name, body={"spec": queue})]
    if spec.weight_sync.name is None:
        weights = _without_defaults(spec.weight_sync.own)
        made.append(make_object(API_VERSION, "WeightSync", family, name=family.name, body={"spec": weights}))
    return tuple(map(stamped, made))


def make_leader_service(family: Family, role: RoleName) -> Manifest:
    """Return the Service of the process to which all others connect."""
    numbers = {"rpc": RPC_PORT, "http": HTTP_PORT} | ({"control": CONTROL_PORT} if role == "driver" else {})
    ports = [{"name": name, "port": number, "targetPort": name} for name, number in numbers.items()]
    return _service(family, role, {"type": "ClusterIP", "ports": ports}, **{LABEL_INDEX: "0"})


def make_gang_service(family: Family, role: RoleName) -> Manifest:
    """Return the headless Service that gives the ranks of a gang DNS names."""
    ports = [{"name": "gang", "port": GANG_PORT}]
    return _service(family, role, {"type": "ClusterIP", "clusterIP": "None", "ports": ports})


def _service(family: Family, role: RoleName, spec: Manifest, **labels: str) -> Manifest:
    selector = {**family.selector, LABEL_ROLE: role, **labels}
    body = {"spec": {**spec, "selector": selector, "publishNotReadyAddresses": True}}
    return stamped(make_object("v1", "Service", family, name=service(family.name, role), body=body))


def make_account(family: Family) -> Manifest:
    """Return a ServiceAccount without rights, whose token is not mounted into pods."""
    body = {"automountServiceAccountToken": False}
    return stamped(make_object("v1", "ServiceAccount", family, name=family.name, body=body))


def make_budget(family: Family, *, roles: Sequence[RoleName], pods: int) -> Manifest:
    """Return the budget that lets ``kubectl drain`` evict one of the ``pods`` of these roles at a time.

    Unhealthy pods may always be evicted. The budget sets ``minAvailable``, because ``maxUnavailable`` would be computed
    from the owner's scale subresource, which counts the rollouts.
    """
    selector = {
        "matchLabels": dict(family.selector),
        "matchExpressions": [{"key": LABEL_ROLE, "operator": "In", "values": list(roles)}],
    }
    body = {
        "spec": {"minAvailable": max(0, pods - 1), "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    }
    return stamped(make_object("policy/v1", "PodDisruptionBudget", family, name=family.name, body=body))


def make_egress_policy(family: Family, *, roles: Sequence[RoleName], network: bool) -> Manifest:
    """Return the policy that restricts pods that score samples to connections to the family and to DNS.

    A policy applies to a whole pod, so also to the main container, which has no other peers. Its name contains a dot
    and therefore cannot be the name of a job. roles: roles whose pods score; network: allow all connections.
    """
    inside: list[Manifest] = [
        {"to": [{"podSelector": {"matchLabels": dict(family.selector)}}]},
        {"ports": [{"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")]},
    ]
    scoring = {"key": LABEL_ROLE, "operator": "In", "values": list(roles)}
    selector = {"matchLabels": dict(family.selector), "matchExpressions": [scoring]}
    spec = {"podSelector": selector, "policyTypes": ["Egress"], "egress": [{}] if network else inside}
    name = f"{family.name}.rewards"
    return stamped(make_object("networking.k8s.io/v1", "NetworkPolicy", family, name=name, body={"spec": spec}))


def make_network_policy(
    family: Family, *, watchers: Sequence[str], stores: Sequence[RoleName] = (), open_to_namespace: bool = False
) -> Manifest:
    """Return the policy that admits connections of the family and of followers, and of ``watchers`` to read metrics.

    It applies to all pods of the family except the driver and the processes of a store, which have
    ``make_driver_policy`` and ``make_store_policy``. watchers: namespaces of the operator and of monitoring; stores:
    roles of a store; open_to_namespace: whether all pods of the namespace may call, so that only certificates restrict
    access; the family alone reaches the data ports of the store's clients, which are storage units.
    """
    peers: list[Manifest] = [{"from": [*_family(family), _followers(family)]}]
    if open_to_namespace:
        peers = [{"from": _family(family)}, {"from": [{"podSelector": {}}], "ports": _ports("rpc", "http")}]
    others = [{"key": LABEL_ROLE, "operator": "NotIn", "values": ["driver", *stores]}]
    selector = {"matchLabels": dict(family.selector), "matchExpressions": others}
    return _ingress_policy(family, family.name, selector, *peers, *_watcher_rules(watchers))


def make_driver_policy(family: Family, *, watchers: Sequence[str], operator: str) -> Manifest:
    """Return the policy of the driver: the operator's pods, in the namespace ``operator``, may send orders; the family
    and followers may call it; ``watchers`` may read metrics and status.
    """
    calls = {"from": [*_family(family), _followers(family)], "ports": _ports("rpc", "http")}
    namespace = {"matchLabels": {_NAMESPACE_NAME: operator}}
    peer = {"namespaceSelector": namespace, "podSelector": {"matchLabels": dict(_OPERATOR)}}
    orders = {"from": [peer], "ports": _ports("control")}
    selector = {"matchLabels": {**family.selector, LABEL_ROLE: "driver"}}
    return _ingress_policy(family, f"{family.name}.driver", selector, calls, orders, *_watcher_rules(watchers))


def make_store_policy(family: Family, *, watchers: Sequence[str], stores: Sequence[RoleName]) -> Manifest:
    """Return the policy of the processes of a store, which may authenticate no client: only the family may connect."""
    within = [{"key": LABEL_ROLE, "operator": "In", "values": list(stores)}]
    selector = {"matchLabels": dict(family.selector), "matchExpressions": within}
    return _ingress_policy(
        family, f"{family.name}.store", selector, {"from": _family(family)}, *_watcher_rules(watchers)
    )


def _family(family: Family) -> list[Manifest]:
    return [{"podSelector": {"matchLabels": dict(family.selector)}}]


def _followers(family: Family) -> Manifest:
    """Return the selector of pods labelled as followers of the job; certificates decide what they may read."""
    return {"podSelector": {"matchLabels": {LABEL_FOLLOWS: family.name}}}


def _watcher_rules(watchers: Sequence[str]) -> list[Manifest]:
    if not watchers:
        return []
    named = {"matchExpressions": [{"key": _NAMESPACE_NAME, "operator": "In", "values": sorted(set(watchers))}]}
    return [{"from": [{"namespaceSelector": named}], "ports": _ports("http")}]


def _ports(*names: str) -> list[Manifest]:
    return [{"protocol": "TCP", "port": name} for name in names]


def _ingress_policy(family: Family, name: str, selector: Manifest, *ingress: Manifest) -> Manifest:
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(ingress)}
    return stamped(make_object("networking.k8s.io/v1", "NetworkPolicy", family, name=name, body={"spec": spec}))
