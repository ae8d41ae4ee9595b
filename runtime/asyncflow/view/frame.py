"""One moment of a run, as far as it is shown. Invariant: plain immutable values; whoever renders them does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncflow.api.status import DriverStatus
from asyncflow.substrates.local.record import Placed


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A moment.

    name: of the job; folder: where its files are; elapsed_s: since the run began; status: the driver's last answer,
    None before the first; reachable: whether that answer is of now; placed: the processes, in plan order.
    """

    name: str
    folder: str
    elapsed_s: float
    status: DriverStatus | None
    reachable: bool
    placed: Sequence[Placed]
