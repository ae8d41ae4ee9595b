"""Actions of the operator as data: the result of ``decide``, carried out by ``cluster``.

Invariant: carrying out a plan a second time changes nothing. The status is written first, so that a counted failure or
attempt is recorded before the pod from which it was counted is deleted. Only the fact that a Secret was written is
recorded afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from asyncflow_operator.observed import Manifest, Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Creation of the object ``manifest``, or its change if the owner already has it. Its digest is an annotation.

    needs: objects of the same plan that must exist before this one is created.
    """

    manifest: Manifest
    needs: frozenset[Ref] = frozenset()

    @property
    def ref(self) -> Ref:
        """The object."""
        return Ref(self.manifest["kind"], self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Deletion of ``ref`` if it still has this UID. why: the reason in words; grace_s: None keeps the object's own."""

    ref: Ref
    uid: str
    why: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Replacement of a pod's scheduling gates and finalizers if it still has this UID; None leaves them unchanged."""

    ref: Ref
    uid: str
    gates: tuple[str, ...] | None = None
    finalizers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Write of parts of the status of ``ref`` if it still has this resource version; null removes a part."""

    ref: Ref
    version: str
    status: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOrder:
    """POST request of ``path`` to the job's driver, with the operator's certificate; a repeated order has no effect."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A Kubernetes event about the owner, on a transition; repeating the same event only increases its count."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action: TypeAlias = Apply | Delete | Release | Report | DriverOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Actions to take now, in order: the write of ``status`` (None: unchanged), each stage in turn, then the notes.

    The actions of a stage are independent of each other. An action of a later stage depends only on its ``needs``.
    again_in_s: when to reconcile again without an observed change; None: only after a change. records: entries to add
    to ``secrets`` of the status ``after`` once an object has been written, by object.
    """

    status: Manifest | None = None
    stages: tuple[tuple[Action, ...], ...] = ()
    notes: tuple[Note, ...] = ()
    again_in_s: float | None = None
    records: Mapping[Ref, Manifest] = field(default_factory=lambda: MappingProxyType({}))
    after: Manifest | None = None

    def recorded(self, written: Collection[Ref]) -> Manifest | None:
        """Return the status to write after these objects have been written, None if it does not change."""
        records = {key: value for ref in written for key, value in self.records.get(ref, {}).items()}
        if self.after is None or not records:
            return None
        return self.after | {"secrets": self.after.get("secrets", {}) | records}
