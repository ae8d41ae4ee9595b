"""The kinds of objects that the operator reads or writes, and where the API server keeps them.

Invariant: a kind that is not in this table is neither read nor written, so the table is the upper bound of what the
operator's role must grant. A Secret is written and never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from asyncflow.api.base import API_VERSION

Watched = Literal["whole", "metadata", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object.

    api_version: ``group/version`` or ``v1``; plural: its name in paths; watched: what the informer asks for, ``whole``
    where the status decides something; optional: whether a cluster may lack it.
    """

    name: str
    api_version: str
    plural: str
    watched: Watched = "metadata"
    optional: bool = False
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Give the path of an object, or without a name of the collection; all namespaces' without a namespace."""
        root = "/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        parts = (root + within, self.plural, name, subresource)
        return "/".join(part for part in parts if part)


def _ours(name: str) -> Kind:
    return Kind(name=name, api_version=API_VERSION, plural=f"{name.lower()}s", watched="whole")


RLJOB: Final = _ours("RLJob")
QUEUE: Final = _ours("TransferQueue")
SYNC: Final = _ours("WeightSync")
OURS: Final = (RLJOB, QUEUE, SYNC)

POD: Final = Kind(name="Pod", api_version="v1", plural="pods", watched="whole")
NODE: Final = Kind(name="Node", api_version="v1", plural="nodes", watched="never", namespaced=False)
EVENT: Final = Kind(name="Event", api_version="v1", plural="events", watched="never")
LEASE: Final = Kind(name="Lease", api_version="coordination.k8s.io/v1", plural="leases", watched="never")

CONFIG: Final = Kind(name="ConfigMap", api_version="v1", plural="configmaps")

_OWNED: Final = (
    POD,
    CONFIG,
    Kind(name="Secret", api_version="v1", plural="secrets", watched="never"),
    Kind(name="Service", api_version="v1", plural="services"),
    Kind(name="ServiceAccount", api_version="v1", plural="serviceaccounts"),
    Kind(name="PersistentVolumeClaim", api_version="v1", plural="persistentvolumeclaims", watched="whole"),
    Kind(name="PodDisruptionBudget", api_version="policy/v1", plural="poddisruptionbudgets"),
    Kind(name="NetworkPolicy", api_version="networking.k8s.io/v1", plural="networkpolicies"),
    Kind(
        name="PodGroup",
        api_version="scheduling.volcano.sh/v1beta1",
        plural="podgroups",
        watched="whole",
        optional=True,
    ),
    Kind(
        name="Workload",
        api_version="kueue.x-k8s.io/v1beta1",
        plural="workloads",
        watched="whole",
        optional=True,
    ),
)

BY_NAME: Final = {kind.name: kind for kind in (*OURS, *_OWNED)}
"""Every kind that a plan may name."""
MEMBERS: Final = tuple(kind for kind in _OWNED if kind.watched != "never")
"""What the informers watch: everything of ours that is made for one of our objects."""
