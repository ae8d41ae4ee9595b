"""Actions of the operator, as data: the answer of ``decide``, carried out by ``cluster``.

Invariant: carrying out a plan twice changes nothing the second time. The status is written first, so that what was
counted (a failure, an attempt) is on record before what it was counted from is deleted. Only that a Secret was written
is put on record afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from asyncflow_operator.observed import Manifest, Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Make the object ``manifest``, or change the one that is the owner's. It carries its digest as an annotation.

    needs: objects made by the same plan without which this one must not be made.
    """

    manifest: Manifest
    needs: frozenset[Ref] = frozenset()

    @property
    def ref(self) -> Ref:
        """The object."""
        return Ref(self.manifest["kind"], self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete ``ref`` if it still has this uid. why: in words; grace_s: None leaves the object's own."""

    ref: Ref
    uid: str
    why: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Leave a pod, if it still has this uid, no other scheduling gates and finalizers than these; None: as they are."""

    ref: Ref
    uid: str
    gates: tuple[str, ...] | None = None
    finalizers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Write parts of the status of ``ref``, if it still is at this resource version: null removes one."""

    ref: Ref
    version: str
    status: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOrder:
    """POST ``path`` to the job's driver, as the job's operator; the same order twice is one order."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A Kubernetes event about the owner, on a transition; the same one again only counts up."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


Action: TypeAlias = Apply | Delete | Release | Report | DriverOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Actions to take now, in order: ``status`` (None: as it is), then the stages one after another, then the notes.

    The actions of a stage are independent of each other, and those of a later one need no more than they say.
    again_in_s: when to reconcile again though nothing was seen to change; None: only when something is. records: what
    the status says once an object has been written, in its field ``secrets``; after: the status that this is added to.
    """

    status: Manifest | None = None
    stages: tuple[tuple[Action, ...], ...] = ()
    notes: tuple[Note, ...] = ()
    again_in_s: float | None = None
    records: Mapping[Ref, Manifest] = field(default_factory=lambda: MappingProxyType({}))
    after: Manifest | None = None

    def recorded(self, written: Collection[Ref]) -> Manifest | None:
        """Return the status to write once these objects have been written, None where that changes nothing."""
        records = {key: value for ref in written for key, value in self.records.get(ref, {}).items()}
        if self.after is None or not records:
            return None
        return self.after | {"secrets": self.after.get("secrets", {}) | records}
