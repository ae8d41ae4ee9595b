"""Table of the kinds of objects that the operator reads or writes, with their API paths.

Invariants: a kind that is not in this table is neither read nor written, so the table is the upper bound of the rights
that the operator's role must grant. A Secret is written and never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from asyncflow.api.names import API_VERSION

Watched = Literal["whole", "metadata", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object.

    api_version: ``group/version`` or ``v1``; plural: its name in paths; older: the version of older clusters.
    watched: which part of an object the informer requests: ``whole`` if decisions depend on more than the metadata.
    optional: whether a cluster may lack the kind.
    """

    name: str
    api_version: str
    plural: str
    watched: Watched = "metadata"
    optional: bool = False
    namespaced: bool = True
    older: str = ""

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of an object, or of the collection if ``name`` is empty; of all namespaces by default."""
        root = "/api/v1" if self.api_version == "v1" else f"/apis/{self.api_version}"
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        parts = (root + within, self.plural, name, subresource)
        return "/".join(part for part in parts if part)

    def at(self, version: str) -> Kind:
        """Return the same kind in another ``group/version``."""
        return replace(self, api_version=version)

    def written(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``manifest`` in this version: an older Workload names its priority class by other fields."""
        if manifest["apiVersion"] == self.api_version:
            return dict(manifest)
        older = {**manifest, "apiVersion": self.api_version}
        if reference := (manifest.get("spec") or {}).get("priorityClassRef"):
            spec = {key: value for key, value in manifest["spec"].items() if key != "priorityClassRef"}
            source = f"{reference['group']}/{reference['kind'].lower()}"
            older["spec"] = spec | {"priorityClassName": reference["name"], "priorityClassSource": source}
        return older


def _custom(name: str) -> Kind:
    return Kind(name=name, api_version=API_VERSION, plural=f"{name.lower()}s", watched="whole")


def _kueue(name: str, *, watched: Watched = "never", optional: bool = False, namespaced: bool = True) -> Kind:
    plural = "workloadpriorityclasses" if name == "WorkloadPriorityClass" else f"{name.lower()}s"
    newest, older = "kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1"
    return Kind(
        name=name,
        api_version=newest,
        plural=plural,
        watched=watched,
        optional=optional,
        namespaced=namespaced,
        older=older,
    )


RLJOB: Final = _custom("RLJob")
QUEUE: Final = _custom("TransferQueue")
SYNC: Final = _custom("WeightSync")
CUSTOM_KINDS: Final = (RLJOB, QUEUE, SYNC)

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
    _kueue("Workload", watched="whole", optional=True),
)
REFERRED: Final = (
    _kueue("ResourceFlavor", namespaced=False),
    _kueue("WorkloadPriorityClass", namespaced=False),
    Kind(
        name="PriorityClass",
        api_version="scheduling.k8s.io/v1",
        plural="priorityclasses",
        watched="never",
        namespaced=False,
    ),
)
"""Cluster-scoped kinds of objects that jobs refer to; they are read by name when a job refers to one."""

BY_NAME: Final = {kind.name: kind for kind in (*CUSTOM_KINDS, *_OWNED)}
"""All kinds that a plan may name."""
MEMBERS: Final = tuple(kind for kind in _OWNED if kind.watched != "never")
"""Kinds that the informers watch: the kinds of the objects that the operator creates for custom resources."""
