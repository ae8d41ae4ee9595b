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
    """Return the room of one holder: a quarter more than a unit may fill, and a grain for small ones."""
    least = queue.bytes_per_unit.bytes * 5 // 4 + _GRAIN
    return -(-least // _GRAIN) * _GRAIN


def unit_bytes(queue: QueueSpec) -> int:
    """Return the memory that the process of a unit needs at least."""
    return OVERHEAD + (queue.bytes_per_unit.bytes if queue.backend == "memory" else 0)


def holders(queue: QueueSpec) -> dict[RoleName, int]:
    """Return how many processes of which roles hold the bytes, in the order in which they start."""
    if queue.backend == "memory" or queue.store is not None:
        return {}
    masters: dict[RoleName, int] = {"master": 1} if queue.backend == "mooncake" else {}
    return {**masters, "holder": queue.storage_units}


def unit_after(queue: QueueSpec, leader: RoleName) -> tuple[RoleName, ...]:
    """Return the roles that a unit starts after. leader: whom all dial."""
    return (leader, "holder") if holders(queue) else (leader,)


def holding_roles(queue: QueueSpec, leader: RoleName, make: MakeRole) -> tuple[Role, ...]:
    """Return the roles of ``holders``, each started after the one before it, the first after the leader."""
    cpu = float(queue.resources.cpu.amount) if queue.resources.cpu is not None else 1.0
    memory: dict[RoleName, int] = {"master": _MASTER_BYTES, "holder": held_bytes(queue) + OVERHEAD}
    made: list[Role] = []
    after = leader
    for name, count in holders(queue).items():
        made.append(make(name, count, Resources(cpu=cpu, memory=memory[name]), (after,)))
        after = name
    return tuple(made)
