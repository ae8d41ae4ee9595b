"""The table that says which role may call which method, and on whose behalf.

A caller is the process that its certificate names (on one host, where a socket says that the same user calls, the one
that it says it is). Many calls name a process, a worker or a rank that they are about: those a role makes only on its
own behalf, so that a rollout cannot claim, register or hand back for another one. A worker is named after its process,
``ROLE-INDEX-...``, and a lease after the process that holds it, ``ID@ROLE-INDEX``, which alone uses it.

A client directs a queue that stands alone; in a job the driver and the trainer do, and clients little (``job_table``).

Invariant: what the table does not allow is refused, and a method that is not in it cannot be served at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from asyncflow.api.names import CLIENT, FOLLOWER, OPERATOR, PUBLISHER, TASK, TRAIN, VIEWER, kind_of_role
from asyncflow.errors import Refused
from asyncflow.identity import ProcessIdentity

_PEOPLE: Final = (CLIENT, OPERATOR, VIEWER)
_WORKERS: Final = ("driver", "rollout", "reference", "reward", TASK)
_QUEUE: Final = (*_WORKERS, "controller", "storage", "trainer", *_PEOPLE)
_ALL: Final = (*_QUEUE, "critic", "master", "holder", PUBLISHER, FOLLOWER)
_SHARED: Final = (_PEOPLE, (FOLLOWER,))
_WEIGHTS: Final = ("weights.fetch", "weights.place", "weights.pair", "weights.send")
HELD_BY: Final = "@"
"""Between the id of a lease and the process that holds it, in the name of a lease: ``1f@rollout-3``."""
_PROCESS = r"([a-z]+(?:-[a-z][a-z0-9]*)?)-(0|[1-9][0-9]{0,18})"
_WORKER, _LEASE = re.compile(rf"{_PROCESS}-.+", re.DOTALL), re.compile(f"[0-9a-f]+{HELD_BY}{_PROCESS}")

Place: TypeAlias = tuple[str, int]
"""A role and an index."""
Named: TypeAlias = Callable[[Any], Iterable[Place | None]]
"""The places that a request names as those it is made for; None for a name that stands for none."""


def worker_name(role: str, index: int, incarnation: str) -> str:
    """Return the name under which an incarnation of a process works, and under which it is a member of its job."""
    return f"{role}-{index}-{incarnation}"


def place_of(worker: str) -> Place | None:
    """Return the place of the process after which a worker is named; None where it is named after none."""
    found = _WORKER.fullmatch(worker)
    return None if found is None else (found[1], int(found[2]))


def holder_of(lease: str) -> Place | None:
    """Return the place of the process that the name of a lease names as its holder; None where it names none.

    The name is a claim: whoever granted the lease knows no lease of that name where another process holds it.
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
"""Fields of requests that name a process, and which one."""


def _own(*fields: str) -> Named:
    """Return what finds the places that these fields of a request name."""
    return lambda request: [place for field in fields for place in _PLACES[field](getattr(request, field))]


def _member(request: Any) -> Iterable[Place | None]:
    return (request.role, request.index), place_of(request.incarnation)


_nobody = _own()


def _may(named: Named, *roles: str) -> dict[str, Named]:
    return dict.fromkeys(roles, named)


def _table() -> dict[str, dict[str, Named]]:
    claims = _may(_own("worker"), *_WORKERS) | _may(_nobody, CLIENT)
    leases = _may(_own("leases"), *_WORKERS) | _may(_nobody, CLIENT)
    lease = _may(_own("lease"), *_WORKERS) | _may(_nobody, CLIENT)
    looks = _may(_nobody, *_QUEUE)
    directs = _may(_nobody, "driver", CLIENT)
    trains = _may(_nobody, "trainer", CLIENT)
    ranks = _may(_own("rank"), "trainer") | _may(_nobody, CLIENT)
    publishes = _may(_nobody, "trainer")
    receives = _may(_own("worker"), "rollout", "trainer", PUBLISHER, FOLLOWER)
    units = _may(_own("session"), "storage")
    between = _may(_nobody, "controller")
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
        **dict.fromkeys(_WEIGHTS, _may(_nobody, "rollout", "trainer", PUBLISHER, FOLLOWER)),
        "queue.begin": trains,
        "queue.slot": ranks,
        "queue.step_done": ranks,
        "queue.commit": trains,
        "queue.open_step": directs,
        "queue.exchange": directs,
        "queue.wanted": directs,
        "queue.take_over": directs,
        "queue.clear": directs,
        "queue.close": directs,
        "queue.declare": directs | between,
        "queue.claim": claims,
        "queue.withdraw": claims,
        "queue.abandon": claims,
        "queue.renew": leases,
        "queue.end": lease,
        "queue.expire": directs,
        "queue.sync": directs | trains,
        "queue.stats": looks,
        "queue.snapshot": looks,
        "queue.show": looks,
        "queue.audit": looks,
        "queue.units": looks,
        "queue.where": looks,
        "queue.drain": _may(_own("unit"), "storage") | _may(_nobody, CLIENT, OPERATOR),
        "open.list": looks,
        "open.find": looks,
        "open.peek": looks,
        "open.partitions": looks,
        "open.progress": looks,
        "open.reset": directs | between,
        "open.expect": directs,
        "open.clear": directs,
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
        "unit.put": directs,
        "unit.write": lease,
        "unit.fetch": _may(_nobody, *_WORKERS, "trainer", "storage", *_PEOPLE),
        "unit.take": _may(_nobody, "storage"),
    }


ACCESS: Final[Mapping[str, Mapping[str, Named]]] = MappingProxyType(_table())
"""Method, the roles that may call it, and for each the places in a request that must be the caller's own."""


def job_table(left: Collection[str]) -> Mapping[str, Mapping[str, Named]]:
    """Return the table of a job: clients do as operators do, put prompts, and work on the tasks ``left`` to them."""

    def claims(request: Any) -> Iterable[Place | None]:
        if request.task not in left or request.partition != TRAIN:
            hint = f"The job leaves to clients: {', '.join(sorted(left)) or 'no task'}"
            raise Refused(f"the task {request.task} is done by the job's own processes", hint=hint)
        return [place_of(request.worker)]

    lease, worker = _own("lease"), _own("worker")
    work = {"queue.claim": claims, "queue.withdraw": worker, "queue.abandon": worker}
    work |= {"queue.renew": _own("leases"), "queue.end": lease, "unit.write": lease}
    shared = {method: roles[CLIENT] for method, roles in ACCESS.items() if {CLIENT, OPERATOR} <= roles.keys()}
    client = {"driver.put_prompts": _nobody, **shared, **work}
    return {
        method: {role: of for role, of in roles.items() if role != CLIENT}
        | ({CLIENT: client[method]} if method in client else {})
        for method, roles in ACCESS.items()
    }


class Access:
    """Decisions about the callers of one server.

    ranks: processes of one trainer replica, which share a certificate; unnamed: the role of a caller of this host that
    runs as the same user and does not say who it is; table: see ``ACCESS``.
    """

    def __init__(
        self, *, ranks: int = 1, unnamed: str = OPERATOR, table: Mapping[str, Mapping[str, Named]] = ACCESS
    ) -> None:
        self.table = table
        self.unnamed = unnamed
        self._ranks = ranks

    def check(self, caller: ProcessIdentity, method: str, request: Any) -> None:
        """Raise Refused where ``caller`` may not make that call of a method of the table."""
        named = self.table[method].get(kind_of_role(caller.role))
        if named is None:
            may = ", ".join(sorted(self.table[method]))
            raise Refused(f"{caller} may not call {method}", hint=f"The certificate of this role does: {may}")
        for place in named(request):
            if not self._is_own(caller, place):
                words = "what is named after no process" if place is None else f"{place[0]}-{place[1]}"
                hint = "A process speaks for itself only"
                raise Refused(f"{caller} may not call {method} on behalf of {words}", hint=hint)

    def _is_own(self, caller: ProcessIdentity, place: Place | None) -> bool:
        if place is None:
            return False
        role, index = place
        if roles := next((shared for shared in _SHARED if caller.role in shared), ()):
            return role in roles
        return (role, index // self._ranks if role == "trainer" else index) == (caller.role, caller.index)
