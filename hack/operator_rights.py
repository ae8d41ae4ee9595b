"""The rights that the chart grants to the operator: grant them to operators of tests, and compare them with their use.

Invariant: the rules are those of the chart, read from ``deploy/``. Only the subjects and the namespace of the Lease
differ, so that several operators can run at the same time and the audit log distinguishes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from kube.audit import Request
from kube.plane import ControlPlane
from kube.rest import APPLY

NAMESPACE: Final = "asyncflow-system"
_DEPLOY: Final = Path(__file__).parents[1] / "deploy"
_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
_ROLES: Final = ("Role", "RoleBinding")
_NAME: Final = "asyncflow-operator"
_LEADER: Final = f"{_NAME}-leader"
_JOBS: Final = f"{_NAME}-jobs"
_USERS: Final = f"system:serviceaccount:{NAMESPACE}:"
_OPERATORS: Final = {
    "kind": "Group",
    "apiGroup": "rbac.authorization.k8s.io",
    "name": f"system:serviceaccounts:{NAMESPACE}",
}
_APPLIED: Final = 201
_FORBIDDEN: Final = 403


class Right(NamedTuple):
    """One verb on one resource, in the terms of RBAC: ``Right("", "pods", "list")``."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def grant(plane: ControlPlane, namespace: str) -> None:
    """Grant the chart's rights to the service accounts of ``NAMESPACE``. namespace: the namespace of the Lease."""
    for kind in ("ClusterRole", "ClusterRoleBinding"):
        _apply(plane, kind, _NAME, where="")
    for kind in _ROLES:
        _apply(plane, kind, _LEADER, where=f"namespaces/{namespace}/")


def grant_in(plane: ControlPlane, namespace: str, *, account: tuple[str, str], leads: bool) -> None:
    """Grant a service account, in one namespace, the rights of an operator that is restricted to namespaces.

    account: its namespace and name; leads: whether the Lease is in this namespace.
    """
    subject = {"kind": "ServiceAccount", "namespace": account[0], "name": account[1]}
    for name in (_JOBS, *([_LEADER] if leads else ())):
        role = {"rules": _object("Role", name, file="namespaced.yaml")["rules"]}
        bound = {
            "subjects": [subject],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        }
        for kind, body in zip(_ROLES, (role, bound), strict=True):
            manifest = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": name}} | body
            path = f"{_RBAC}/namespaces/{namespace}/{kind.lower()}s/{name}"
            plane.api.patch(path, manifest, form=APPLY, query={"fieldManager": "tests"})


def revoke_in(plane: ControlPlane, namespace: str) -> None:
    """Revoke the rights that ``grant_in`` granted in a namespace without a Lease."""
    for kind in _ROLES:
        plane.api.delete(f"{_RBAC}/namespaces/{namespace}/{kind.lower()}s/{_JOBS}")


def account(plane: ControlPlane, name: str) -> Path:
    """Return the kubeconfig of the operator ``name``."""
    return plane.service_account(NAMESPACE, name)


def of(plane: ControlPlane, name: str = "") -> list[Request]:
    """Return the requests so far of the operator ``name``, or of all operators in ``NAMESPACE``."""
    if name:
        return plane.requests(user=_USERS + name)
    return [each for each in plane.requests() if each.user.startswith(_USERS)]


def granted() -> set[Right]:
    """Return every right that the chart grants."""
    return {
        Right(group, resource, verb)
        for role in (_object("ClusterRole", _NAME), _object("Role", _LEADER))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(requests: Iterable[Request]) -> set[Right]:
    """Return every right that ``requests`` needed.

    The log has a server-side apply as a patch; if it created the object (201), it also needed ``create``.
    """
    return {right for request in requests if request.code != _FORBIDDEN for right in _needed(request)}


def refused(requests: Iterable[Request]) -> set[Right]:
    """Return every right that was missing."""
    return {right for request in requests if not request.authorized for right in _needed(request)}


def _needed(request: Request) -> Iterator[Right]:
    if request.resource:
        yield Right(request.group, request.kind, request.verb)
        if request.verb == "patch" and request.code == _APPLIED:
            yield Right(request.group, request.kind, "create")


def _object(kind: str, name: str, *, file: str = "cluster.yaml") -> dict[str, Any]:
    for each in yaml.safe_load_all((_DEPLOY / file).read_text()):
        if each and each["kind"] == kind and each["metadata"]["name"] == name:
            return dict(each)
    raise LookupError(f"{file} has no {kind} {name}")


def _apply(plane: ControlPlane, kind: str, name: str, *, where: str) -> None:
    manifest = _object(kind, name) | {"metadata": {"name": name}}
    if "subjects" in manifest:
        manifest["subjects"] = [_OPERATORS]
    path = f"{_RBAC}/{where}{kind.lower()}s/{name}"
    plane.api.patch(path, manifest, form=APPLY, query={"fieldManager": "tests"})
