"""The publisher: the only role of a WeightSync whose source is a model.

Invariants: the role is a pure function of the object. All followers connect to its process, on whichever node it runs.
"""

from __future__ import annotations

from typing import Final

from asyncflow.api.durability import LimitsSpec, RestartSpec
from asyncflow.api.names import PUBLISHER
from asyncflow.api.weights import PublisherSpec, WeightSync
from asyncflow.plan.queue import serving_role
from asyncflow.plan.roles import Resources, Role

_THREADS: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def publisher_role(sync: WeightSync) -> Role:
    """Return the role of a WeightSync whose ``spec.source`` is a model."""
    spec = sync.spec.publisher or PublisherSpec()
    stated = spec.resources
    return serving_role(
        PUBLISHER,
        1,
        restart=RestartSpec(),
        limits=LimitsSpec(),
        env={**_THREADS, **{variable.name: variable.value for variable in spec.template.env}},
        resources=Resources(
            cpu=float(stated.cpu.amount) if stated.cpu is not None else 1.0,
            memory=stated.memory.bytes if stated.memory is not None else None,
            shared_memory=stated.shared_memory.bytes if stated.shared_memory is not None else None,
        ),
    )
