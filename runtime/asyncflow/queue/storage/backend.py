"""The interface of a storage back end, a store of blobs, each written once; and of a key-value store that holds them.

A *blob* is what one put brought: columns of the same rows, under a number that is never used again. The unit knows
what the rows mean and keeps the budget; the controller is the truth about what exists. So a back end needs to know
nothing but bytes. Cells may be freed while they are read, and are not asked for after that.

Invariants: ``get`` returns what ``put`` was given, bit by bit; a blob is there whole or not at all, until cells of it
are freed; when ``free`` returns, those bytes can be used again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, Self, TypeVar

import numpy as np

from asyncflow.rpc.columns import Array, Jagged
from asyncflow.rpc.retry import delays

BACKENDS: Final = "asyncflow.storage_backends"
"""The group of entry points in which back ends are found."""


class Place(NamedTuple):
    """Where a row of a blob lies: the blob's number, and the row's index in it, from 0."""

    blob: int
    row: int


class BytesLost(Exception):
    """Cells are gone from the store, although nobody freed them; ``places`` are those of their rows."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(f"the store lost cells of {len(places)} rows")
        self.places = places


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a back end works.

    owner: whose queue it is, by a name that nobody else has who uses the same store; unit, incarnation: whose cells it
    holds; host: the address of this process; find: returns the address of process i of a role, None if there is none;
    password: of the store, "" for none; lasting: whether the store outlives the queue, which must leave nothing there.
    """

    owner: str = ""
    unit: int
    incarnation: str
    host: str
    find: Callable[[str, int], str | None]
    password: str = field(default="", repr=False)
    lasting: bool = False

    @property
    def unit_prefix(self) -> str:
        """The prefix of the keys of all incarnations of the unit."""
        return f"{self.owner}.u{self.unit}-"

    @property
    def prefix(self) -> str:
        """The prefix of the keys of this incarnation."""
        return f"{self.unit_prefix}{self.incarnation}-"


class Backend(ABC):
    """Holds blobs by number. Several calls may be under way, and each may be cancelled wherever it awaits."""

    @classmethod
    def made(cls, site: Site) -> Self:  # noqa: ARG003
        """Return a back end for a unit."""
        return cls()

    @classmethod  # noqa: B027
    def check(cls, *, servers: bool) -> None:
        """Raise ManifestError where this machine lacks what units need, or servers where those run here too."""

    async def open(self) -> None:  # noqa: B027
        """Wait until cells can be put; what is put before that waits."""

    @abstractmethod
    async def put(self, blob: int, columns: Mapping[str, Jagged]) -> None:
        """Store all columns, which are never changed any more, or none of them: what fails leaves nothing behind."""

    @abstractmethod
    async def get(self, places: Sequence[Place], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return cells of rows (at least one, none twice) that all have these columns, in the order asked.

        Nobody writes to them. Raises BytesLost when some are gone, PeerLost while the store is away.
        """

    @abstractmethod
    async def free(self, places: Sequence[Place], columns: Sequence[str]) -> None:
        """Forget these columns of rows that all have them and are named once."""

    @abstractmethod
    async def close(self) -> None:
        """Drop everything."""


T = TypeVar("T")


class Outcome(Enum):
    """The result of a call for one key. ``PackedBackend`` repeats what did not succeed, so a store never does."""

    DONE = auto()
    LOST = auto()
    """It is not there, or has another size: a read gives it up."""
    FULL = auto()
    """Nothing was stored, because there is no room now: a write waits."""
    FAILED = auto()
    """The store answers, but could not move or remove these bytes now: a read gives it up after a few tries."""
    AWAY = auto()
    """The store did not answer, so that it may have been done or not."""


async def answer_of(ask: Callable[[], Awaitable[T | None]]) -> T:
    """Return the first answer of ``ask`` that is not None; None means that the store is away, and it is asked again."""
    waits = delays()
    while (answer := await ask()) is None:
        await asyncio.sleep(next(waits))
    return answer


def split(values: Array, sizes: Sequence[int]) -> list[Array]:
    """Return the values of these sizes that lie back to back in a buffer."""
    return np.split(values, np.cumsum(sizes)[:-1])


class Store(ABC):
    """Immutable values by key, each of at least a byte; those of a call lie back to back in a buffer of that size.

    most_keys, most_bytes: of one call; a single larger value goes alone.
    """

    most_keys: int = 512
    most_bytes: int = 16 << 20

    @abstractmethod
    async def open(self) -> None:
        """Wait until the store can be used, and remove what the unit's predecessors have left there."""

    @abstractmethod
    async def write(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """Store values of these sizes."""

    @abstractmethod
    async def read(self, keys: Sequence[str], sizes: Sequence[int], values: Array) -> Sequence[Outcome]:
        """Read values of these sizes, no key twice, into a buffer. The caller checks that they are what was stored."""

    @abstractmethod
    async def gone(self, unmoved: Sequence[str], others: Sequence[str]) -> list[str]:
        """Return those of ``others`` that are gone, or lie with one of ``unmoved``, which could not be moved."""

    @abstractmethod
    async def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """Remove values; one that is not there is done."""

    @abstractmethod
    async def close(self) -> None:
        """Close the store."""
