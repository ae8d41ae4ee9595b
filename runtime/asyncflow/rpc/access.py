"""The access table: which role may call which method, and on behalf of which process.

The caller is the process that its certificate names. On one host, where the socket proves that the caller runs as the
same user, it is the process that the caller claims to be. Many requests name a process, a worker or a rank. A role may
make them only on its own behalf, so a rollout cannot claim, register or return rows for another rollout. The name of a
worker begins with the name of its process, ``ROLE-INDEX-...``. The name of a lease ends with the process that holds it,
``ID@ROLE-INDEX``, and only that process may use it.

A client controls a standalone queue. In a job the driver and the trainer control it, clients do little (``job_table``).

Invariant: a call that the table does not allow is refused, and a method that is not in the table cannot be served.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from asyncflow.api.names import CLIENT, FOLLOWER, OPERATOR, PUBLISHER, TASK, TRAIN, VIEWER, kind_of_role
from asyncflow.errors import Refused
from asyncflow.identity import ProcessIdentity

_CLIENTS: Final = (CLIENT, OPERATOR, VIEWER)
_WORKERS: Final = ("driver", "rollout", "reference", "reward", TASK)
_QUEUE: Final = (*_WORKERS, "controller", "storage", "trainer", *_CLIENTS)
_ALL: Final = (*_QUEUE, "critic", "master", "holder", PUBLISHER, FOLLOWER)
_SHARED: Final = (_CLIENTS, (FOLLOWER,))
_WEIGHTS: Final = ("weights.fetch", "weights.place", "weights.pair", "weights.send")
HOLDER_SEPARATOR: Final = "@"
"""Separates the id of a lease from the process that holds it, in the name of a lease: ``1f@rollout-3``."""
_PROCESS = r"([a-z]+(?:-[a-z][a-z0-9]*)?)-(0|[1-9][0-9]{0,18})"
_WORKER, _LEASE = re.compile(rf"{_PROCESS}-.+", re.DOTALL), re.compile(f"[0-9a-f]+{HOLDER_SEPARATOR}{_PROCESS}")

Place: TypeAlias = tuple[str, int]
"""A role and an index."""
Named: TypeAlias = Callable[[Any], Iterable[Place | None]]
"""Returns the places on whose behalf a request is made; None for a name that does not name a place."""


def worker_name(role: str, index: int, incarnation: str) -> str:
    """Return the name of an incarnation of a process: its worker name, and its member name in the job."""
    return f"{role}-{index}-{incarnation}"


def place_of(worker: str) -> Place | None:
    """Return the place of the process that a worker name begins with; None if it begins with no process name."""
    found = _WORKER.fullmatch(worker)
    return None if found is None else (found[1], int(found[2]))


def holder_of(lease: str) -> Place | None:
    """Return the place of the process that a lease name gives as its holder; None if it gives none.

    The name is only a claim. The process that granted the lease knows no lease of this name for another holder.
    """
    found = _LEASE.fullmatch(lease)
    return None if found is None else (found[1], int(found[2]))


_PLACES: Final[Mapping[str, Callable[[Any], Iterable[Place | None]]]] = {
    "worker": lambda name: [place_of(name)],
    "incarnation": lambda name: [place_of(name)],
    "lease": lambda name: [holder_of(name)],
    "leases": lambda names: map(holder_of, names),
    "rank": lambda rank: [("trainer", rank)],
    "part": lambda part: [("trainer", part)],
    "unit": lambda unit: [("storage", unit)],
    "session": lambda session: [("storage", session.unit)],
    "replica": lambda index: [("controller", index)],
}
"""Fields of requests that name a process, and the place of that process."""


def _own(*fields: str) -> Named:
    """Return a function that returns the places in these fields of a request."""
    return lambda request: [place for field in fields for place in _PLACES[field](getattr(request, field))]


def _member(request: Any) -> Iterable[Place | None]:
    return (request.role, request.index), place_of(request.incarnation)


_no_place = _own()


def _may(named: Named, *roles: str) -> dict[str, Named]:
    return dict.fromkeys(roles, named)


def _table() -> dict[str, dict[str, Named]]:
    claims = _may(_own("worker"), *_WORKERS) | _may(_no_place, CLIENT)
    leases = _may(_own("leases"), *_WORKERS) | _may(_no_place, CLIENT)
    lease = _may(_own("lease"), *_WORKERS) | _may(_no_place, CLIENT)
    reads = _may(_no_place, *_QUEUE)
    controls = _may(_no_place, "driver", CLIENT)
    trains = _may(_no_place, "trainer", CLIENT)
    ranks = _may(_own("rank"), "trainer") | _may(_no_place, CLIENT)
    publishes = _may(_no_place, "trainer")
    receives = _may(_own("worker"), "rollout", "trainer", PUBLISHER, FOLLOWER)
    units = _may(_own("session"), "storage")
    controllers = _may(_no_place, "controller")
    return {
        "directory.register": _may(_member, *_ALL),
        "directory.heartbeat": _may(_own("incarnation"), *_ALL),
        "directory.leave": _may(_own("incarnation"), *_ALL),
        "driver.report": publishes,
        "driver.put_prompts": trains,
        "trainer.gather": _may(_own("rank"), "trainer"),
        "trainer.leave": _may(_own("rank"), "trainer"),
        "trainer.left": publishes,
        **dict.fromkeys(("critic.values", "critic.learn"), _may(_own("rank"), "trainer")),
        **{f"critic.{order}": publishes for order in ("meet", "load", "settle", "update", "copy", "write")},
        "weights.publish": _may(_own("part", "worker"), "trainer") | _may(_own("worker"), PUBLISHER),
        "weights.locate": receives,
        "weights.held": receives,
        "weights.permit": _may(_own("worker"), "rollout", FOLLOWER),
        "weights.changed": _may(_own("worker"), "rollout", FOLLOWER),
        **dict.fromkeys(_WEIGHTS, _may(_no_place, "rollout", "trainer", PUBLISHER, FOLLOWER)),
        "queue.begin": trains,
        "queue.slot": ranks,
        "queue.step_done": ranks,
        "queue.commit": trains,
        "queue.open_step": controls,
        "queue.exchange": controls,
        "queue.wanted": controls,
        "queue.take_over": controls,
        "queue.clear": controls,
        "queue.close": controls,
        "queue.declare": controls | controllers,
        "queue.claim": claims,
        "queue.withdraw": claims,
        "queue.abandon": claims,
        "queue.renew": leases,
        "queue.end": lease,
        "queue.expire": controls,
        "queue.sync": controls | trains,
        "queue.stats": reads,
        "queue.snapshot": reads,
        "queue.show": reads,
        "queue.audit": reads,
        "queue.units": reads,
        "queue.where": reads,
        "queue.drain": _may(_own("unit"), "storage") | _may(_no_place, CLIENT, OPERATOR),
        "open.list": reads,
        "open.find": reads,
        "open.peek": reads,
        "open.partitions": reads,
        "open.progress": reads,
        "open.reset": controls | controllers,
        "open.expect": controls,
        "open.clear": controls,
        "units.hello": _may(_own("unit"), "storage"),
        "units.announce": units,
        "units.admit": units,
        "units.lost": units,
        "units.move": units,
        "units.watch": units,
        "replicas.follow": _may(_own("replica"), "controller"),
        "replicas.type": _may(_own("replica"), "controller"),
        "replicas.drop": _may(_own("replica"), "controller"),
        "replicas.reach": _may(lambda _: [("controller", 0)], "controller"),
        "replicas.admit": _may(_own("unit"), "storage"),
        "unit.put": controls,
        "unit.write": lease,
        "unit.fetch": _may(_no_place, *_WORKERS, "trainer", "storage", *_CLIENTS),
        "unit.take": _may(_no_place, "storage"),
    }


ACCESS: Final[Mapping[str, Mapping[str, Named]]] = MappingProxyType(_table())
"""For each method the roles that may call it, and for each role the places in a request that must be the caller's."""


def job_table(client_tasks: Collection[str]) -> Mapping[str, Mapping[str, Named]]:
    """Return the table of a job: clients may do what operators may, put prompts, and work on ``client_tasks``."""

    def claims(request: Any) -> Iterable[Place | None]:
        if request.task not in client_tasks or request.partition != TRAIN:
            hint = f"Tasks of this job that clients may do: {', '.join(sorted(client_tasks)) or 'none'}"
            raise Refused(f"the task {request.task} is done by the job's own processes", hint=hint)
        return [place_of(request.worker)]

    lease, worker = _own("lease"), _own("worker")
    work = {"queue.claim": claims, "queue.withdraw": worker, "queue.abandon": worker}
    work |= {"queue.renew": _own("leases"), "queue.end": lease, "unit.write": lease}
    shared = {method: roles[CLIENT] for method, roles in ACCESS.items() if {CLIENT, OPERATOR} <= roles.keys()}
    client = {"driver.put_prompts": _no_place, **shared, **work}
    return {
        method: {role: of for role, of in roles.items() if role != CLIENT}
        | ({CLIENT: client[method]} if method in client else {})
        for method, roles in ACCESS.items()
    }


class Access:
    """Access decisions for the callers of one server.

    ranks: number of processes of one trainer replica, which share a certificate; unnamed: the role of a caller on this
    host that runs as the same user and does not identify itself; table: see ``ACCESS``.
    """

    def __init__(
        self, *, ranks: int = 1, unnamed: str = OPERATOR, table: Mapping[str, Mapping[str, Named]] = ACCESS
    ) -> None:
        self.table = table
        self.unnamed = unnamed
        self._ranks = ranks

    def check(self, caller: ProcessIdentity, method: str, request: Any) -> None:
        """Raise Refused if ``caller`` may not make this call. The method must be in the table."""
        named = self.table[method].get(kind_of_role(caller.role))
        if named is None:
            may = ", ".join(sorted(self.table[method]))
            raise Refused(f"{caller} may not call {method}", hint=f"Roles that may call it: {may}")
        for place in named(request):
            if not self._is_own(caller, place):
                words = "an unknown process" if place is None else f"{place[0]}-{place[1]}"
                hint = "A process can act only on its own behalf"
                raise Refused(f"{caller} may not call {method} on behalf of {words}", hint=hint)

    def _is_own(self, caller: ProcessIdentity, place: Place | None) -> bool:
        if place is None:
            return False
        role, index = place
        if roles := next((shared for shared in _SHARED if caller.role in shared), ()):
            return role in roles
        return (role, index // self._ranks if role == "trainer" else index) == (caller.role, caller.index)
