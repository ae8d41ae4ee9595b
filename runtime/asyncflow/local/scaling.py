"""The wanted number of replicas of an elastic role, set by the user, by the built-in policy, or by the manifest.

``asyncflow scale`` writes the user's request to a file in the run's folder (``run/scale.json``), which the supervisor
polls. The policy runs in the driver, which reports the wanted number in its status.

Invariants: a request sets a level, so writing it twice has the same effect as once; it also holds for the next
supervisor of the folder. While a user's request exists, the policy is off. The wanted number lies within the role's
bounds. If the policy reports no number, since the driver is unreachable or lacks data, the number stays the same.
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
from asyncflow.local.http_client import ask
from asyncflow.plan.roles import Role

_log = logging.getLogger(__name__)

By = Literal["person", "policy", "manifest"]
AUTO: Final = "auto"
"""Value in place of a number: return the decision to the policy, or to the manifest."""
_POLL_S: Final = 2.0


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted number of replicas of one role.

    by: source of the number; asked: the number that this source requested; problem: reason why fewer are possible, ""
    if there is room for all; policy: whether the manifest enables the built-in policy.
    """

    role: str
    wanted: int
    by: By
    asked: int = 0
    policy: bool = False
    problem: str = ""

    @property
    def why(self) -> str:
        """The source of the number, as text."""
        if self.by == "person":
            off = ", which switches the built-in policy off" if self.policy else ""
            return f"requested by asyncflow scale{off}"
        return "set by the built-in policy" if self.by == "policy" else "set by the manifest"


Requests = dict[str, Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]]


def read_requests(path: Path) -> Mapping[str, int]:
    """Return the numbers that users have requested, by role. Raises ManifestError if the file cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Requests)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "Write it again with asyncflow scale DIR rollout=N"
        raise ManifestError(f"the request cannot be read: {error}", where=str(path), hint=hint) from error


def write_request(path: Path, role: str, replicas: int | None) -> None:
    """Save the user's request for a number of replicas of ``role``, or remove the request (None). Raises OSError."""
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
    """The wanted number of one elastic role.

    file: file of users' requests; policy: whether the built-in policy is enabled; before: the scale that the previous
    supervisor recorded.
    """

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
        """Return the number wanted now; if the file cannot be read, the last request that was read stays valid."""
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
        """Record the number that the driver reports, if it reports one."""
        if status is not None and status.desired_rollouts is not None:
            self._decided = status.desired_rollouts

    async def follow(self, port: int, changed: Callable[[], None]) -> None:
        """Poll the driver at ``port``; call ``changed`` when its wanted number has changed.

        Returns immediately if the manifest does not enable the policy; otherwise it runs until cancelled.
        """
        while self.policy:
            before = self._decided
            self.decide(await asyncio.to_thread(ask, port, DriverStatus))
            if self._decided != before:
                changed()
            await asyncio.sleep(_POLL_S)

    def _scale(self, wanted: int, by: By) -> Scale:
        within = max(self.role.core, min(wanted, self.role.most))
        return Scale(role=self.role.name, wanted=within, by=by, asked=wanted, policy=self.policy)
