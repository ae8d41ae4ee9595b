"""What members of a job tell each other about themselves: the messages of the directory.

Invariant: plain data only; an incarnation (uuid hex) names one run of one process for ever, and is its worker id
everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

REGISTER = "directory.register"
HEARTBEAT = "directory.heartbeat"
LEAVE = "directory.leave"

Scalar: TypeAlias = str | int | float | bool
Status: TypeAlias = dict[str, Any]
"""What a member says of itself in each heartbeat: JSON scalars, lists and dicts under names of its role's choice."""

AGE = "age_s"
"""In the status of a role: seconds since its process began."""

_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Text = Annotated[str, Meta(max_length=1024)]


class Member(Struct, frozen=True, kw_only=True):
    """One running process of a job.

    role, index: its place; incarnation: this run of it (uuid hex); attempt: of the role, fences older ones;
    address: where its calls are answered, empty if nowhere; http: its metrics URL, empty if none; info: what else
    others must know of it.
    """

    role: _Name
    index: Annotated[int, Meta(ge=0)]
    incarnation: _Name
    attempt: Annotated[int, Meta(ge=0)] = 0
    address: _Text = ""
    http: _Text = ""
    info: Annotated[dict[str, Scalar], Meta(max_length=256)] = {}

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


class Best(Struct, frozen=True, kw_only=True):
    """The version with the best evaluation. by: name of the figure that is compared; value: what it was."""

    step: Annotated[int, Meta(ge=0)]
    by: Literal["accuracy", "greedy", "reward"]
    value: float


class Directives(Struct, frozen=True, kw_only=True):
    """What the driver wants of a member, as a level: repeated in every heartbeat until it changes.

    stop: leave now; drain: take nothing new, hand back, then leave; checkpoint: number of checkpoints asked for so far
    (a larger number than before means: write one); judged: the step up to which every evaluation is recorded, or can
    not be any more; best: the version whose evaluation was the best of those.
    """

    stop: bool = False
    drain: bool = False
    checkpoint: int = 0
    judged: int = -1
    best: Best | None = None


class Registered(Struct, frozen=True, kw_only=True):
    """Answer to a registration: the members now (the new one included), the revision of that list, and the rhythm."""

    revision: int
    peers: list[Member]
    heartbeat_s: float
    lost_after_s: float


class Beat(Struct, frozen=True, kw_only=True):
    """A heartbeat: who, which revision of the members it knows, and how it does."""

    incarnation: _Name
    revision: int
    status: Status = {}


class Beaten(Struct, frozen=True, kw_only=True):
    """Answer to a heartbeat. known: False asks the member to register again; peers: None where nothing changed."""

    known: bool
    revision: int = 0
    peers: list[Member] | None = None
    directives: Directives = Directives()


class Leave(Struct, frozen=True, kw_only=True):
    """A member goes on purpose."""

    incarnation: _Name
    reason: _Text


class Left(Struct, frozen=True, kw_only=True):
    """Answer to a leave."""
