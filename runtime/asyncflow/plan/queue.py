"""The roles of a TransferQueue that stands alone; those of a job's own queue are in the job's plan.

Invariant: process 0 of ``controller`` is the one address that all dial; it starts first, and the ledger lies with it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from asyncflow.api.durability import LimitsSpec, RestartSpec
from asyncflow.api.names import HTTP_PORT, RPC_PORT, RoleName
from asyncflow.api.placement import TemplateSpec
from asyncflow.api.queue import TransferQueue
from asyncflow.plan.holding import holding_roles, unit_after, unit_bytes
from asyncflow.plan.roles import Port, Readiness, Resources, RestartPolicy, Role

_THREADS: Final = MappingProxyType({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
_RESTARTS: Final = RestartSpec()
_PORTS: Final = (Port(name="rpc", number=RPC_PORT), Port(name="http", number=HTTP_PORT))
_READY: Final = Readiness(path="/readyz", port="http", within_s=LimitsSpec().start_seconds)


def queue_roles(queue: TransferQueue) -> tuple[Role, ...]:
    """Return the roles in the order in which they start."""
    spec = queue.spec
    cpu = float(spec.resources.cpu.amount) if spec.resources.cpu is not None else 1.0
    memory = spec.resources.memory.bytes if spec.resources.memory is not None else unit_bytes(spec)

    def holding(name: RoleName, replicas: int, resources: Resources, after: tuple[RoleName, ...]) -> Role:
        return _role(name, replicas=replicas, resources=resources, template=spec.template, after=after)

    return (
        _role(
            "controller",
            replicas=spec.controllers,
            resources=Resources(cpu=cpu),
            template=spec.template,
            durable=True,
        ),
        *holding_roles(spec, "controller", holding),
        _role(
            "storage",
            replicas=spec.storage_units,
            resources=Resources(cpu=cpu, memory=memory),
            template=spec.template,
            after=unit_after(spec, "controller"),
        ),
    )


def queue_role(queue: TransferQueue, name: RoleName) -> Role:
    """Return one role. Raises KeyError where a queue has none of that name."""
    for role in queue_roles(queue):
        if role.name == name:
            return role
    raise KeyError(name)


def _role(
    name: RoleName,
    *,
    replicas: int,
    resources: Resources,
    template: TemplateSpec,
    after: tuple[RoleName, ...] = (),
    durable: bool = False,
) -> Role:
    return Role(
        name=name,
        replicas=replicas,
        core=replicas,
        most=replicas,
        resources=resources,
        readiness=_READY,
        restart=RestartPolicy(
            max_restarts=_RESTARTS.max_restarts,
            window_s=_RESTARTS.window_seconds,
            backoff_s=_RESTARTS.backoff_seconds,
        ),
        after=after,
        durable=("ledger",) if durable else (),
        ports=_PORTS,
        env=MappingProxyType({**_THREADS, **{variable.name: variable.value for variable in template.env}}),
    )
