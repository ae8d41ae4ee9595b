"""Definitions of what others define and we write: just the fields that we write, so that a wrong one is refused."""

from typing import Any

from kube.plane import ControlPlane

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
QUANTITIES = {"type": "object", "additionalProperties": {"x-kubernetes-int-or-string": True}}
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
POD_SET = {
    "type": "object",
    "required": ["name", "count", "template"],
    "properties": {
        "name": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "count": {"type": "integer", "minimum": 0},
        "template": {"type": "object", "properties": {"spec": ANYTHING}},
    },
}


def definition(group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Give a definition with this spec, and any status as a subresource."""
    properties = {"spec": {"type": "object", "properties": spec}, "status": ANYTHING}
    schema = {"type": "object", "properties": properties}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test's"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [version | {"subresources": {"status": {}}}],
        },
    }


FOREIGN = (
    definition(
        "scheduling.volcano.sh",
        "PodGroup",
        {"minMember": {"type": "integer"}, "minResources": QUANTITIES, "queue": {"type": "string"}},
    ),
    definition(
        "kueue.x-k8s.io",
        "Workload",
        {
            "active": {"type": "boolean"},
            "queueName": {"type": "string"},
            "podSets": {"type": "array", "maxItems": 8, "items": POD_SET},
        },
    ),
)


def install(plane: ControlPlane) -> None:
    """Have ``plane`` know the kinds of Volcano and Kueue."""
    for each in FOREIGN:
        path = f"{DEFINITIONS}/{each['metadata']['name']}"
        if not plane.api.exists(path):
            plane.api.create(DEFINITIONS, each)
        plane.wait_until(lambda path=path: _established(plane.api.get(path)), f"{path} to be established")


def _established(definition: dict[str, Any]) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
