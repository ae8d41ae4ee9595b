"""Reader of the API server's audit log: requests, their users, and the status of the answers.

Invariant: each request gives one record. This includes watches, which the server logs at their start and at their end.
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
    """One request, in the terms of RBAC.

    at: the time of arrival; answered: the time of the last stage that was logged; path: the path of the URL; code: the
    HTTP status; authorized: whether RBAC allowed it, even if something else refused it.
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
        """Return whether the request was a write."""
        return self.verb in WRITES

    @property
    def kind(self) -> str:
        """The resource as RBAC names it, such as ``pods/eviction``; the path if the request was not for a resource."""
        if not self.resource:
            return self.path
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    @classmethod
    def parse(cls, event: dict[str, Any]) -> Self:
        """Return the request that one line of the log describes."""
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
    """Return the requests in the log, of all users or of one, in order of arrival."""
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
