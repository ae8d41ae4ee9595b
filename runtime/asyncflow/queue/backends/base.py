"""The interface of a storage back end: a store of parcels, each written once.

A *parcel* is what one put brought: columns of the same rows, under a number that is never used again. The unit knows
what the rows mean and keeps the budget; the controller is the truth about what exists. So a back end needs to know
nothing but bytes.

Invariants: ``get`` gives what ``put`` was given, bit by bit; a parcel is there whole or not at all, until cells of it
are freed; when ``free`` returns, those bytes can be used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple, Self

from asyncflow.net.frames import Jagged

BACKENDS: Final = "asyncflow.storage_backends"
"""The group of entry points in which back ends are found."""


class Place(NamedTuple):
    """Where rows of a parcel lie: its number, which of its rows is the first, from 0, and how many they are."""

    parcel: int
    row: int
    rows: int = 1


class BytesLost(Exception):
    """Cells are gone from the store, although nobody freed them; ``places`` are those of their rows, one each."""

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(f"the store lost cells of {len(places)} rows")
        self.places = places


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a back end works.

    owner: whose queue it is, by a name that nobody else has who uses the same store; unit, incarnation: whose cells it
    holds; host: the address of this process; find: gives the address of process i of a role, None while there is none;
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
    def place(self) -> str:
        """How the keys of all incarnations of the unit begin."""
        return f"{self.owner}.u{self.unit}-"

    @property
    def prefix(self) -> str:
        """How the keys of this incarnation begin."""
        return f"{self.place}{self.incarnation}-"


class Backend(ABC):
    """Holds parcels by number. Whoever calls it may be cancelled wherever it awaits.

    immediate: none of its methods ever awaits anything, so that the unit may call them without a task.
    """

    immediate: ClassVar[bool] = False

    @classmethod
    def made(cls, site: Site) -> Self:  # noqa: ARG003
        """Make one for a unit."""
        return cls()

    @classmethod  # noqa: B027
    def check(cls, *, servers: bool) -> None:
        """See that this machine has what units need, and servers where those run here too. Raises ManifestError."""

    async def open(self) -> None:  # noqa: B027
        """Wait until cells can be put; what is put before that waits."""

    @abstractmethod
    async def put(self, parcel: int, columns: Mapping[str, Jagged]) -> None:
        """Store all columns, which are never changed any more, or none of them: what fails leaves nothing behind."""

    @abstractmethod
    async def get(self, places: Sequence[Place], columns: Sequence[str]) -> dict[str, Jagged]:
        """Return cells of rows (at least one) that all have these columns, in the order asked; nobody writes to them.

        Raises BytesLost when some of them are gone.
        """

    @abstractmethod
    async def free(self, places: Sequence[Place], columns: Sequence[str]) -> None:
        """Forget these columns of rows that all have them and are named once."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything."""


def each(places: Sequence[Place]) -> list[Place]:
    """Return a place for each row."""
    return [Place(parcel, row) for parcel, first, rows in places for row in range(first, first + rows)]
