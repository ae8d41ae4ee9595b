"""Objects beside the pods of a family: its manifest, its queue and versions, its addresses, and its policies.

The manifest is what the spec says, without what the API server and the operator add to an object, and with the fields
of a WeightSync that a job names in place of the name. It is written as JSON, which is YAML too and is made in a
fraction of the time. What has its default value is left out, so that a job that began with an older image can read what
a newer operator wrote: no field is there that it does not know.

Invariants: the manifest changes only when the spec does, and a job that is suspended has the same as one that runs; a
job that names an existing WeightSync makes none; an address is there as soon as its process is, ready or not, because
peers that dial in decide when it is ready, and a probe that asks why it is not must reach it; pods have no right at the
API server, and no pod but those of their family, and those that by their label follow it, reaches more of them than the
port with metrics and status. Orders to
the driver come from the operator: no other pod reaches that port, not even one of the family.
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
"""Characters that JSON leaves as they are and YAML takes for line breaks, or refuses."""
_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
_OPERATOR: Final = MappingProxyType({"app.kubernetes.io/name": FIELD_MANAGER})
"""Label of the operator's pods, as the chart sets it."""
_DNS_PORTS: Final = (53, 5353)
"""Port of a DNS service, and of the pods behind it on OpenShift: policies see the address after its translation."""


def make_config(manifest: RLJob | TransferQueue | WeightSync, family: Family, *, name: str = "") -> Manifest:
    """Return the ConfigMap with the manifest, and with what of a job the container that scores reads, alone.

    name: its name, by default the family's.
    """
    data = {_key(JOB_FILE): _text(_whole(manifest, family))}
    if isinstance(manifest, RLJob):
        data[_key(REWARD_FILE)] = _text(_judging(manifest.spec.reward))
        if manifest.spec.environment is not None:
            data[_key(ENVIRONMENT_FILE)] = _text(_stated(manifest.spec.environment))
    return stamped(make_object("v1", "ConfigMap", family, name=name or family.name, body={"data": data}))


def _whole(manifest: RLJob | TransferQueue | WeightSync, family: Family) -> Manifest:
    spec = _stated(manifest.spec)
    spec.pop("suspend", None)
    if (weights := spec.get("weightSync")) is not None:
        weights.pop("name", None)
    metadata = {"name": family.name, "namespace": family.namespace, "uid": family.owner.uid}
    return {"apiVersion": manifest.api_version, "kind": manifest.kind, "metadata": metadata, "spec": spec}


def _stated(spec: Spec) -> Manifest:
    """Return a spec without what has its default value: older definitions in the cluster may lack a field."""
    return spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)


def _judging(spec: RewardSpec) -> Manifest:
    """Return what the container that scores reads: of a role of its own only that there is one, and its devices."""
    stated = _stated(spec)
    if "role" in stated:
        stated["role"] = {name: value for name, value in stated["role"].items() if name == "accelerator"}
    return stated


def _key(path: str) -> str:
    return path.rpartition("/")[2]


def _text(data: Manifest) -> str:
    text = json.dumps(data, ensure_ascii=False, indent=1)
    return _BREAKS.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def make_children(job: RLJob, family: Family) -> tuple[Manifest, ...]:
    """Return the job's own queue and versions."""
    spec = job.spec
    queue = _stated(spec.transfer_queue) | {"ledger": _stated(spec.storage.ledger), "template": _stated(spec.template)}
    queue["storageUnits"] = spec.transfer_queue.storage_units
    made = [make_object(API_VERSION, "TransferQueue", family, name=family.name, body={"spec": queue})]
    if spec.weight_sync.name is None:
        weights = _stated(spec.weight_sync.own)
        made.append(make_object(API_VERSION, "WeightSync", family, name=family.name, body={"spec": weights}))
    return tuple(map(stamped, made))


def make_leader_service(family: Family, role: RoleName) -> Manifest:
    """Return the Service of the process that all others dial."""
    numbers = {"rpc": RPC_PORT, "http": HTTP_PORT} | ({"control": CONTROL_PORT} if role == "driver" else {})
    ports = [{"name": name, "port": number, "targetPort": name} for name, number in numbers.items()]
    return _service(family, role, {"type": "ClusterIP", "ports": ports}, **{LABEL_INDEX: "0"})


def make_gang_service(family: Family, role: RoleName) -> Manifest:
    """Return the headless Service by which the ranks of a gang have names."""
    ports = [{"name": "gang", "port": GANG_PORT}]
    return _service(family, role, {"type": "ClusterIP", "clusterIP": "None", "ports": ports})


def _service(family: Family, role: RoleName, spec: Manifest, **labels: str) -> Manifest:
    selector = {**family.selector, LABEL_ROLE: role, **labels}
    body = {"spec": {**spec, "selector": selector, "publishNotReadyAddresses": True}}
    return stamped(make_object("v1", "Service", family, name=service(family.name, role), body=body))


def make_account(family: Family) -> Manifest:
    """Return a ServiceAccount that nothing is granted to, and whose token no pod gets."""
    body = {"automountServiceAccountToken": False}
    return stamped(make_object("v1", "ServiceAccount", family, name=family.name, body=body))


def make_budget(family: Family, *, roles: Sequence[RoleName], pods: int) -> Manifest:
    """Return the budget by which ``kubectl drain`` takes one of the ``pods`` of these roles at a time, or broken ones.

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


def make_egress_policy(family: Family, *, roles: Sequence[RoleName], network: bool) -> Manifest:
    """Return the policy by which pods that score samples dial the family and DNS only; with network, anything.

    A policy is of a pod, so it holds for the process beside too, which has no other peers. Its name cannot be that of
    a job, which has no dot. roles: those whose pods score.
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


def make_network_policy(family: Family, *, watchers: Sequence[str], open_to_namespace: bool = False) -> Manifest:
    """Return the policy by which a family's pods reach each other, followers reach those that have weights, and the
    namespaces ``watchers`` read metrics.

    That of a driver is ``make_driver_policy``. watchers: namespaces of the operator and of monitoring;
    open_to_namespace: whether all pods of the namespace may talk to them, where certificates decide who is heard.
    """
    peers = [{"podSelector": {}}] if open_to_namespace else [*_family(family), _followers(family)]
    others = [{"key": LABEL_ROLE, "operator": "NotIn", "values": ["driver"]}]
    selector = {"matchLabels": dict(family.selector), "matchExpressions": others}
    return _ingress_policy(family, family.name, selector, {"from": peers}, *_watching(watchers))


def make_driver_policy(family: Family, *, watchers: Sequence[str], operator: str) -> Manifest:
    """Return the policy by which the operator, in the namespace of that name, gives orders to the driver, and nobody
    else; the family calls it, and ``watchers`` read metrics and status.
    """
    called = {"from": [*_family(family), _followers(family)], "ports": _ports("rpc", "http")}
    place = {"matchLabels": {_NAMESPACE_NAME: operator}}
    peer = {"namespaceSelector": place, "podSelector": {"matchLabels": dict(_OPERATOR)}}
    ordered = {"from": [peer], "ports": _ports("control")}
    selector = {"matchLabels": {**family.selector, LABEL_ROLE: "driver"}}
    return _ingress_policy(family, f"{family.name}.driver", selector, called, ordered, *_watching(watchers))


def _family(family: Family) -> list[Manifest]:
    return [{"podSelector": {"matchLabels": dict(family.selector)}}]


def _followers(family: Family) -> Manifest:
    """Return the pods of the namespace that say they follow the job: certificates decide what they are told."""
    return {"podSelector": {"matchLabels": {LABEL_FOLLOWS: family.name}}}


def _watching(watchers: Sequence[str]) -> list[Manifest]:
    if not watchers:
        return []
    named = {"matchExpressions": [{"key": _NAMESPACE_NAME, "operator": "In", "values": sorted(set(watchers))}]}
    return [{"from": [{"namespaceSelector": named}], "ports": _ports("http")}]


def _ports(*names: str) -> list[Manifest]:
    return [{"protocol": "TCP", "port": name} for name in names]


def _ingress_policy(family: Family, name: str, selector: Manifest, *ingress: Manifest) -> Manifest:
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(ingress)}
    return stamped(make_object("networking.k8s.io/v1", "NetworkPolicy", family, name=name, body={"spec": spec}))
