"""The roles that hold a queue's bytes, and all roles of a standalone TransferQueue.

Mooncake's master and holders, or Redis servers, hold the bytes of units with that backend, both in a job and in a
standalone queue. The other roles of a job's own queue are in the job's plan.

Invariants: all processes of a standalone queue connect to process 0 of ``controller``, which starts first and has the
ledger. If there are holders, each unit uses the holder of its own index. A holder has more room than its unit may fill,
since bytes are freed a little after the unit's budget counts them as free, and since an allocator leaves gaps. A store
that AsyncFlow does not run has no holders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from asyncflow.api.durability import LimitsSpec, RestartSpec
from asyncflow.api.names import HTTP_PORT, RPC_PORT, RoleName
from asyncflow.api.queue import QueueSpec, TransferQueue
from asyncflow.plan.roles import Port, Readiness, Resources, RestartPolicy, Role

OVERHEAD = 256 << 20
"""Bytes that a process that holds cells needs in addition to the cells."""
_GRAIN = 16 << 20
_MASTER_BYTES = 1 << 30
_HOLDING: Final[Mapping[str, tuple[RoleName, ...]]] = {"mooncake": ("master", "holder"), "redis": ("holder",)}
"""Roles that hold the bytes, by backend, in the order in which they start. Other backends have no such roles."""

MakeRole = Callable[[RoleName, int, Resources, tuple[RoleName, ...]], Role]
"""A function that makes a role from its name, number of processes, resources, and the roles that start before it."""


def held_bytes(queue: QueueSpec) -> int:
    """Return the bytes of one holder: a quarter more than a unit may fill, and at least 16 MiB more."""
    least = queue.bytes_per_unit.bytes * 5 // 4 + _GRAIN
    return -(-least // _GRAIN) * _GRAIN


def unit_bytes(queue: QueueSpec) -> int:
    """Return the least memory of a unit's process, which includes the cells unless a store or a holder holds them."""
    elsewhere = queue.store is not None or queue.backend in _HOLDING
    return OVERHEAD + (0 if elsewhere else queue.bytes_per_unit.bytes)


def _cores(queue: QueueSpec) -> float:
    return float(queue.resources.cpu.amount) if queue.resources.cpu is not None else 1.0


def holders(queue: QueueSpec) -> dict[RoleName, int]:
    """Return the number of processes of each role that holds bytes, in the order in which the roles start."""
    roles = _HOLDING.get(queue.backend, ()) if queue.store is None else ()
    return {role: queue.storage_units if role == "holder" else 1 for role in roles}


def unit_after(queue: QueueSpec, leader: RoleName) -> tuple[RoleName, ...]:
    """Return the roles that start before a unit. leader: the role to which all processes connect."""
    return (leader, "holder") if holders(queue) else (leader,)


def holding_roles(queue: QueueSpec, leader: RoleName, make: MakeRole) -> tuple[Role, ...]:
    """Return the roles of ``holders``. Each starts after the one before it, and the first after the leader."""
    memory: dict[RoleName, int] = {"master": _MASTER_BYTES, "holder": held_bytes(queue) + OVERHEAD}
    made: list[Role] = []
    after = leader
    for name, count in holders(queue).items():
        made.append(make(name, count, Resources(cpu=_cores(queue), memory=memory[name]), (after,)))
        after = name
    return tuple(made)


_LEADER_S: Final = 7.0
"""Seconds that a leader may take to end after the processes that it ordered to end."""
_THREADS: Final = MappingProxyType({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})


def queue_roles(queue: TransferQueue) -> tuple[Role, ...]:
    """Return the roles of a standalone queue, in the order in which they start."""
    spec = queue.spec
    memory = spec.resources.memory.bytes if spec.resources.memory is not None else unit_bytes(spec)
    env = {**_THREADS, **{variable.name: variable.value for variable in spec.template.env}}

    def role(name: RoleName, replicas: int, resources: Resources, after: tuple[RoleName, ...], **more: Any) -> Role:
        more = {"resources": resources, "after": after, **more}
        return serving_role(name, replicas, restart=RestartSpec(), limits=LimitsSpec(), env=env, **more)

    unit = Resources(cpu=_cores(spec), memory=memory)
    return (
        role("controller", spec.controllers, Resources(cpu=_cores(spec)), (), durable=("ledger",)),
        *holding_roles(spec, "controller", role),
        role("storage", spec.storage_units, unit, unit_after(spec, "controller")),
    )


def queue_role(queue: TransferQueue, name: RoleName) -> Role:
    """Return the role ``name``. Raises KeyError if a queue has no such role."""
    return {role.name: role for role in queue_roles(queue)}[name]


def serving_role(
    name: RoleName,
    replicas: int,
    *,
    restart: RestartSpec,
    limits: LimitsSpec,
    env: Mapping[str, str],
    ports: tuple[Port, ...] = (),
    **more: Any,
) -> Role:
    """Return a role whose processes serve calls and HTTP, and start and end within ``limits``.

    ports: additional ports; more: other fields of ``Role``; the default of ``core`` and ``most`` is ``replicas``.
    """
    return Role(
        name=name,
        replicas=replicas,
        readiness=Readiness(path="/readyz", port="http", within_s=limits.start_seconds),
        restart=RestartPolicy(
            max_restarts=restart.max_restarts,
            window_s=restart.window_seconds,
            backoff_s=restart.backoff_seconds,
            dismissed_s=limits.stop_seconds + _LEADER_S,
        ),
        ports=(Port(name="rpc", number=RPC_PORT), Port(name="http", number=HTTP_PORT), *ports),
        env=MappingProxyType(dict(env)),
        **{"core": replicas, "most": replicas, **more},
    )
