"""The addresses of a family: that of its leader, and names for the ranks of a gang.

Invariant: an address is there as soon as its process is, ready or not: who dials in decides when somebody is ready, and
who asks why nobody is must be able to ask.
"""

from __future__ import annotations

from asyncflow.api.names import GANG_PORT, HTTP_PORT, LABEL_INDEX, LABEL_ROLE, RPC_PORT, RoleName, service
from asyncflow_operator.desired.objects import Family, make_object, stamped
from asyncflow_operator.observed import Manifest


def make_leader_service(family: Family, role: RoleName) -> Manifest:
    """Return the Service of the process that all others dial."""
    numbers = {"rpc": RPC_PORT, "http": HTTP_PORT}
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
