"""The requests to the API server, who made them, and the answers: its audit log, read back.

Invariant: one record for one request, also for a watch, which the server logs when it begins and again when it ends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

WRITES: Final = frozenset(("create", "update", "patch", "delete", "deletecollection"))


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request, in the words of RBAC.

    at: when it arrived; answered: when the latest that was logged of it happened; path: what was asked for when that
    was no resource; code: the HTTP status; authorized: whether its user had the
    right, whatever else refused it.
    """

    at: datetime
    answered: datetime
    user: str
    agent: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    path: str
    code: int
    authorized: bool = True

    @property
    def is_write(self) -> bool:
        """Return whether it was to change something."""
        return self.verb in WRITES

    @property
    def kind(self) -> str:
        """The resource as RBAC names it, such as ``pods/eviction``; a bare path for what is no resource."""
        if not self.resource:
            return self.path
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    @classmethod
    def parse(cls, event: dict[str, Any]) -> Self:
        """Read one line of the log."""
        target = event.get("objectRef", {})
        return cls(
            at=datetime.fromisoformat(event["requestReceivedTimestamp"]),
            answered=datetime.fromisoformat(event["stageTimestamp"]),
            user=event["user"]["username"],
            agent=event.get("userAgent", ""),
            verb=event["verb"],
            group=target.get("apiGroup", ""),
            resource=target.get("resource", ""),
            subresource=target.get("subresource", ""),
            namespace=target.get("namespace", ""),
            name=target.get("name", ""),
            path=event["requestURI"].partition("?")[0],
            code=event.get("responseStatus", {}).get("code", 0),
            authorized=event.get("annotations", {}).get("authorization.k8s.io/decision") != "forbid",
        )


def read(log: Path, *, user: str | None = None) -> list[Request]:
    """Return every request of the log in the order of their arrival, or those of one user."""
    found: dict[str, Request] = {}
    name = b"" if user is None else json.dumps(user).encode()
    with log.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            if name not in line:
                continue
            event = json.loads(line)
            if user is None or event["user"]["username"] == user:
                found[event["auditID"]] = Request.parse(event)
    return sorted(found.values(), key=lambda request: request.at)
