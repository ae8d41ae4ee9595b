"""Failures of calls to the API server, sorted by what the operator does about them.

Invariant: every failed call ends as one of these; what was asked for and why it failed are in its words, no secret is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow.errors import AsyncFlowError

_ENDING = "NamespaceTerminating"


class ApiError(AsyncFlowError):
    """A call to the API server failed."""

    code = "api"


class Unreachable(ApiError):
    """Nobody answered in time, or only that it is too busy; the call was tried again until its deadline."""

    code = "api_unreachable"


class TooLarge(ApiError):
    """An answer is larger than any that is read."""

    code = "api_too_large"


class NotLeading(ApiError):
    """Nothing was sent: another operator may write now."""

    code = "api_not_leading"


class Expired(ApiError):
    """A watch or a page continues from a version that the server no longer has: list again."""

    code = "api_expired"


class Refusal(ApiError):
    """The server understood and said no. status: of HTTP; reason: Kubernetes' one word."""

    code = "api_refusal"

    def __init__(self, what: str, *, where: str, status: int, reason: str = "", causes: tuple[str, ...] = ()) -> None:
        super().__init__(what, where=where)
        self.status = status
        self.reason = reason
        self.causes = causes

    @property
    def absent(self) -> bool:
        """Whether the object, or the whole kind, does not exist."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """Whether someone else was faster, or owns a field that was not forced."""
        return self.status == 409

    @property
    def exists(self) -> bool:
        """Whether there is an object of that name already."""
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def replaced(self) -> bool:
        """Whether the object with the UID that was named is no more, or has changed since."""
        return self.conflict or (self.status == 422 and "metadata.uid" in self.what)

    @property
    def namespace_ends(self) -> bool:
        """Whether nothing can be made there any more."""
        return _ENDING in self.causes


def refusal(status: int, answer: Mapping[str, Any], *, where: str) -> ApiError:
    """Return the error for an answer of the server, a ``Status`` object or anything else."""
    details = answer.get("details") or {}
    causes = tuple(str(cause.get("reason", "")) for cause in details.get("causes") or ())
    what = str(answer.get("message") or f"HTTP {status}")
    if status == 410:
        return Expired(what, where=where)
    return Refusal(what, where=where, status=status, reason=str(answer.get("reason", "")), causes=causes)
