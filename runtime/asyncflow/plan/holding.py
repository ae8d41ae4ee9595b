"""The roles that hold a queue's bytes where its units do not: Mooncake's master and holders, or Redis servers.

Invariant: every unit has a holder of its own index, with more room than the unit may fill: what was freed goes a moment
later than the unit's budget would have it, and an allocator leaves gaps. A store that others run has its own.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncflow.api.names import RoleName
from asyncflow.api.queue import QueueSpec
from asyncflow.plan.roles import Resources, Role

OVERHEAD = 256 << 20
"""Bytes of a process that holds cells, beside those."""
_GRAIN = 16 << 20
_MASTER_BYTES = 1 << 30

MakeRole = Callable[[RoleName, int, Resources, tuple[RoleName, ...]], Role]
"""Makes a role of a name, for so many processes with these resources, to be started after others."""


def held_bytes(queue: QueueSpec) -> int:
    """Give the room of one holder: a quarter more than a unit may fill, and a grain for small ones."""
    least = queue.bytes_per_unit.bytes * 5 // 4 + _GRAIN
    return -(-least // _GRAIN) * _GRAIN


def unit_bytes(queue: QueueSpec) -> int:
    """Give the memory that the process of a unit needs at least."""
    return OVERHEAD + (queue.bytes_per_unit.bytes if queue.backend == "memory" else 0)


def unit_after(queue: QueueSpec, leader: RoleName) -> tuple[RoleName, ...]:
    """Give the roles that a unit starts after. leader: whom all dial."""
    return (leader, "holder") if _has_holders(queue) else (leader,)


def holding_roles(queue: QueueSpec, leader: RoleName, make: MakeRole) -> tuple[Role, ...]:
    """Give the roles in the order in which they start."""
    if not _has_holders(queue):
        return ()
    cpu = float(queue.resources.cpu.amount) if queue.resources.cpu is not None else 1.0
    holding = Resources(cpu=cpu, memory=held_bytes(queue) + OVERHEAD)
    if queue.backend == "redis":
        return (make("holder", queue.storage_units, holding, (leader,)),)
    return (
        make("master", 1, Resources(cpu=cpu, memory=_MASTER_BYTES), (leader,)),
        make("holder", queue.storage_units, holding, ("master",)),
    )


def _has_holders(queue: QueueSpec) -> bool:
    return queue.backend != "memory" and queue.store is None
