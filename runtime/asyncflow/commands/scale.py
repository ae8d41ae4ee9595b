"""``asyncflow scale DIR [ROLE=N]``: how many replicas of a role a run on this machine has, and how many it shall have.

Invariant: what is asked for is refused at once where it could not be done, and else is a level in the run's folder,
which the supervisor follows, and the next one as well; what is printed is what the supervisor says.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Final

import click

from asyncflow.api.load import load_job
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, QUEUE, Record, check_run, record_of, requests_of
from asyncflow.local.lifecycle import ProcessState
from asyncflow.local.scaling import AUTO, Scale, write_request
from asyncflow.plan.job import plan
from asyncflow.plan.roles import Role

_WHERE = "asyncflow scale"
TAKEN_UP_S: Final = 2.0
"""Seconds within which a run is to have taken up what was asked for."""
_LOOK_S: Final = 0.1
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
    check_run(directory)
    roles: dict[str, Role] = {role.name: role for role in plan(load_job(directory / JOB)).roles}
    if request is None:
        click.echo(_words(roles["rollout"], record))
        return
    name, asked = _asked(request)
    role = roles.get(name)
    if role is None or not role.elastic:
        raise _cannot(name, roles)
    if asked is not None:
        _check_bounds(asked, role)
    write_request(requests_of(directory), name, asked)
    click.echo(_answer(directory, role, asked))


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
        return ManifestError(_fixed(role), where=_WHERE, hint="Continue with --resume --set rollout.maxReplicas=N")
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


def _answer(directory: Path, role: Role, request: int | None) -> str:
    """Return what the run makes of a request, as soon as it has taken it up, at the latest after ``TAKEN_UP_S``."""
    deadline = time.monotonic() + TAKEN_UP_S
    while not _taken_up(record := record_of(directory), role, request):
        if time.monotonic() > deadline:
            asked = AUTO if request is None else request
            return f"{_words(role, record)}\n  {role.name}={asked} is noted, and not taken up after {TAKEN_UP_S:g} s"
        time.sleep(_LOOK_S)
    return _words(role, record)


def _taken_up(record: Record, role: Role, request: int | None) -> bool:
    shown = _followed(record, role)
    return (shown.asked if shown.by == "person" else None) == request


def _followed(record: Record, role: Role) -> Scale:
    """Return the number that the run goes by."""
    usual = Scale(role=role.name, wanted=role.replicas, by="manifest", asked=role.replicas)
    return next((scale for scale in record.scales if scale.role == role.name), usual)


def _words(role: Role, record: Record) -> str:
    """Return how many are wanted, why, and how many there are."""
    states = Counter(ProcessState(placed.state) for placed in record.processes if placed.role == role.name)
    there = ", ".join(f"{states[state]} {words}" for state, words in _NOW.items() if states[state]) or "none is there"
    if not role.elastic:
        return f"{role.name}: {role.replicas}, which is fixed ({_fixed(role)}); {there}"
    shown = _followed(record, role)
    trouble = f"\n  {shown.problem}" if shown.problem else ""
    return f"{role.name}: {shown.wanted} wanted of {role.core} to {role.most} ({shown.why}); {there}{trouble}"


def _fixed(role: Role) -> str:
    return f"rollout.minReplicas and rollout.maxReplicas are both {role.core}"
