"""The part of an object that all Kubernetes kinds share.

Invariant: a job's name fits into every name that is derived from it (pods, services, claims: at most 63 characters).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from asyncflow.api.base import NAME, Annotations, Labels, Name, Rule, Spec

ObjectName = Annotated[str, StringConstraints(pattern=NAME, max_length=40)]


class ObjectMeta(Spec):
    """Name, namespace, labels and annotations of an object."""

    name: ObjectName
    """Name of the object, a DNS label of at most 40 characters."""
    namespace: Name = "default"
    """Namespace of the object; of no meaning on one machine."""
    labels: Labels = Field(default_factory=dict)
    """Labels, given on to everything that is made for the object."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations, for tools."""
    uid: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Identity that the API server gives; absent on one machine. It names the job's partition."""

    rules: ClassVar[tuple[Rule, ...]] = ()
