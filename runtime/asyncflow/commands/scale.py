"""``asyncflow scale DIR [ROLE=N]``: how many replicas of a role a run on this machine has, and how many it shall have.

Invariant: what is asked for is refused at once where it could not be done, and else is a level in the run's folder,
which the supervisor follows, and the next one as well.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from asyncflow.api.load import load_job
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, QUEUE, Record, record_of, requests_of
from asyncflow.local.lifecycle import ProcessState
from asyncflow.local.scaling import AUTO, Scale, read_requests, write_request
from asyncflow.plan.job import plan
from asyncflow.plan.roles import Role

_WHERE = "asyncflow scale"
_NOW = {
    ProcessState.RUNNING: "run",
    ProcessState.WAITING: "start",
    ProcessState.DOWN: "start",
    ProcessState.LEAVING: "leave",
    ProcessState.DONE: "are done",
}


def scale(directory: Path, request: str | None) -> None:
    """Write down ``request`` (``ROLE=N``, or ``ROLE=auto``; None: nothing) for the run in ``directory``, and print how
    many are wanted and there. Raises ManifestError where no run goes on there or the request cannot be done.
    """
    if (directory / QUEUE).is_file() and not (directory / JOB).is_file():
        hint = "asyncflow queue drain takes the rows of a unit to others"
        raise ManifestError("it is a queue, whose number of units stays", where=str(directory), hint=hint)
    record = record_of(directory)
    job = load_job(directory / JOB)
    elastic = {role.name: role for role in plan(job).roles if role.elastic and not role.gang}
    if request is not None:
        name, asked = _asked(request)
        if name not in elastic:
            raise _cannot(name, {role.name: role for role in plan(job).roles})
        if asked is not None:
            _check_bounds(asked, elastic[name])
        write_request(requests_of(directory), name, asked)
    for role in elastic.values():
        click.echo(_words(role, record, asked=read_requests(requests_of(directory)).get(role.name)))


def _asked(request: str) -> tuple[str, int | None]:
    """Return role and number, None for ``auto``. Raises ManifestError."""
    name, equals, number = request.partition("=")
    if equals and name and (number == AUTO or (number.isascii() and number.isdecimal() and len(number) < 7)):
        return name, None if number == AUTO else int(number)
    raise ManifestError(f"{request!r} is not ROLE=NUMBER", where=_WHERE, hint="Give e.g. rollout=4, or rollout=auto")


def _cannot(name: str, roles: dict[str, Role]) -> ManifestError:
    """Return why the role called ``name`` cannot be scaled."""
    if name not in roles:
        return ManifestError(f"there is no role {name!r}", where=_WHERE, hint=f"The job has {', '.join(roles)}")
    role = roles[name]
    if name == "rollout":
        what = f"rollout.minReplicas and rollout.maxReplicas are both {role.core}"
        return ManifestError(what, where=_WHERE, hint="Continue with --resume --set rollout.maxReplicas=N")
    if role.gang:
        what, hint = f"{name}: its ranks compute together", f"Continue with --resume --set {name}.replicas=N"
        return ManifestError(f"{what}, so their number stays while it runs", where=_WHERE, hint=hint)
    return ManifestError(f"{name}: its number stays while the job runs", where=_WHERE, hint="Scale rollout")


def _check_bounds(asked: int, role: Role) -> None:
    if asked < role.core:
        what = f"{role.name}={asked} is below rollout.minReplicas, {role.core}"
        raise ManifestError(what, where=_WHERE, hint=f"Give {role.core} to {role.most}")
    if asked > role.most:
        what = f"{role.name}={asked} is above rollout.maxReplicas, {role.most}"
        hint = f"Give {role.core} to {role.most}, or continue with --resume --set rollout.maxReplicas={asked}"
        raise ManifestError(what, where=_WHERE, hint=hint)


def _words(role: Role, record: Record, *, asked: int | None) -> str:
    """Return how many are wanted, why, and how many there are. asked: by a person, perhaps only just now."""
    followed = next((scale for scale in record.scales if scale.role == role.name), None)
    usual = Scale(role=role.name, wanted=role.replicas, least=role.core, most=role.most, by="manifest")
    shown = usual if followed is None else followed
    if asked is not None and (shown.by, shown.wanted) != ("person", asked) and not shown.problem:
        shown = Scale(role=role.name, wanted=asked, least=role.core, most=role.most, by="person", policy=shown.policy)
    states = Counter(ProcessState(placed.state) for placed in record.processes if placed.role == role.name)
    there = ", ".join(f"{states[state]} {words}" for state, words in _NOW.items() if states[state]) or "none is there"
    trouble = f"\n  {shown.problem}" if shown.problem else ""
    return f"{role.name}: {shown.wanted} wanted of {role.core} to {role.most} ({shown.why}); {there}{trouble}"
