"""The wanted number of replicas of an elastic role, and who says so: a person, the built-in policy, or the manifest.

A person's request lies in the run's folder (``run/scale.json``), where ``asyncflow scale`` writes it and the supervisor
looks at it again and again. What the policy wants is decided by the driver, which shows it in its status.

Invariants: a request is a level: written twice it counts once, and it counts for the next supervisor of the folder
too; a person's request switches the policy off for as long as it is there; what is wanted lies within the role's
bounds. A policy that says nothing, since the driver is away or has seen too little, changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from asyncflow.api.status import DriverStatus
from asyncflow.durable import write_whole
from asyncflow.errors import ManifestError
from asyncflow.local.asking import ask
from asyncflow.plan.roles import Role

_log = logging.getLogger(__name__)

By = Literal["person", "policy", "manifest"]
AUTO: Final = "auto"
"""In place of a number: let the policy, or the manifest, say again."""
_ASK_S: Final = 2.0


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one role that are wanted.

    by: who says so; asked: how many that one asked for; problem: why fewer are wanted, "" where there is room for all;
    policy: whether the manifest has switched the built-in policy on.
    """

    role: str
    wanted: int
    by: By
    asked: int = 0
    policy: bool = False
    problem: str = ""

    @property
    def why(self) -> str:
        """Words for who wants that number."""
        if self.by == "person":
            off = ", which switches the built-in policy off" if self.policy else ""
            return f"asked for by asyncflow scale{off}"
        return "the built-in policy" if self.by == "policy" else "the manifest says so"


Requests = dict[str, Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]]


def read_requests(path: Path) -> Mapping[str, int]:
    """Return what persons have asked for, by role. Raises ManifestError where the file cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Requests)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "Write it anew with asyncflow scale DIR rollout=N"
        raise ManifestError(f"what was asked for cannot be read: {error}", where=str(path), hint=hint) from error


def write_request(path: Path, role: str, replicas: int | None) -> None:
    """Write down that a person wants so many replicas of ``role``, or leaves it to others (None). Raises OSError."""
    try:
        requests = dict(read_requests(path))
    except ManifestError:
        requests = {}
    requests.pop(role, None)
    if replicas is not None:
        requests[role] = replicas
    write_whole(path, msgspec.json.encode(requests))


@dataclass(kw_only=True)
class Scaling:
    """The wanted number of one elastic role. file: of persons' requests; before: what the last supervisor had."""

    role: Role
    file: Path
    policy: bool = False
    before: Scale | None = None

    def __post_init__(self) -> None:
        before = self.before
        self._decided = before.wanted if before is not None and before.by == "policy" else None
        self._request: int | None = None
        self._unreadable = False

    def wanted(self) -> Scale:
        """Return what is wanted now; a file that cannot be read leaves a person's request as it was."""
        try:
            self._request = read_requests(self.file).get(self.role.name)
            self._unreadable = False
        except ManifestError as error:
            (_log.debug if self._unreadable else _log.warning)("%s", error)
            self._unreadable = True
        if self._request is not None:
            return self._scale(self._request, "person")
        if self.policy and self._decided is not None:
            return self._scale(self._decided, "policy")
        return self._scale(self.role.replicas, "manifest")

    def decide(self, status: DriverStatus | None) -> None:
        """Take in what the driver says; nothing where it says nothing."""
        if status is not None and status.desired_rollouts is not None:
            self._decided = status.desired_rollouts

    async def follow(self, port: int, changed: Callable[[], None]) -> None:
        """Ask the driver, who serves at ``port``, again and again; call ``changed`` when it wants another number.

        Returns at once where the manifest has not switched the policy on, and never otherwise.
        """
        while self.policy:
            before = self._decided
            self.decide(await asyncio.to_thread(ask, port, DriverStatus))
            if self._decided != before:
                changed()
            await asyncio.sleep(_ASK_S)

    def _scale(self, wanted: int, by: By) -> Scale:
        within = max(self.role.core, min(wanted, self.role.most))
        return Scale(role=self.role.name, wanted=within, by=by, asked=wanted, policy=self.policy)
