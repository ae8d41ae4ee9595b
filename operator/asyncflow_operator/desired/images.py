"""Choice of a pod's image: the user's, else the one that the job began with, else the operator's own version.

Invariant: an operator of another version changes no image of a job that has begun; a pin holds only as long as it names
the image that the role's devices need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncflow.api.accelerators import PROFILES
from asyncflow.api.placement import TemplateSpec
from asyncflow.plan.roles import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Location of the operator's own images: ``prefix/runtime-cpu:tag``."""

    prefix: str
    tag: str

    def image(self, name: str) -> str:
        """Return the full name of an image."""
        return f"{self.prefix}/{name}:{self.tag}" if self.prefix else f"{name}:{self.tag}"


def image_of(role: Role, *, templates: Sequence[TemplateSpec], pinned: Mapping[str, str], registry: Registry) -> str:
    """Return the image of a role. templates: the user's, the later wins; pinned: by role, from the job's status."""
    stated = [template.image for template in templates if template.image is not None]
    if stated:
        return stated[-1]
    needed = PROFILES[role.resources.profile].image
    pin = pinned.get(role.name, "")
    return pin if re.fullmatch(rf"(.*/)?{re.escape(needed)}([:@].*)?", pin) else registry.image(needed)
