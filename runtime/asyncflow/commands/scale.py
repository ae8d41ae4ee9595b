"""``asyncflow scale DIR [ROLE=N]``: show or set the number of replicas of a role in a run on this machine.

Invariants: an impossible request is refused immediately. Any other request is saved in the run's folder, where it
applies to the current supervisor and to the following ones. The printed numbers come from the supervisor's record.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Final

import click

from asyncflow.api.load import load_job
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, QUEUE, check_run, record_of, requests_of
from asyncflow.local.lifecycle import ProcessState
from asyncflow.local.record import Record
from asyncflow.local.scaling import AUTO, Scale, write_request
from asyncflow.plan.job import plan
from asyncflow.plan.roles import Role

_WHERE = "asyncflow scale"
TAKEN_UP_S: Final = 2.0
"""Seconds to wait until the supervisor has applied a request."""
_POLL_S: Final = 0.1
_NOW = {
    ProcessState.RUNNING: "run",
    ProcessState.WAITING: "start",
    ProcessState.DOWN: "start",
    ProcessState.LEAVING: "leave",
    ProcessState.DONE: "are done",
}


def scale(directory: Path, request: str | None) -> None:
    """Save ``request`` (``ROLE=N`` or ``ROLE=auto``), if any, for the run in ``directory``; print the current numbers.

    Raises ManifestError if the folder has no active run, or if the request is impossible.
    """
    if (directory / QUEUE).is_file() and not (directory / JOB).is_file():
        hint = "asyncflow queue drain moves the rows of a unit to other units"
        raise ManifestError("it is a queue, whose number of units is fixed", where=str(directory), hint=hint)
    record = record_of(directory)
    check_run(directory)
    roles: dict[str, Role] = {role.name: role for role in plan(load_job(directory / JOB)).roles}
    if request is None:
        click.echo(_summary(roles["rollout"], record))
        return
    name, replicas = _parse(request)
    role = roles.get(name)
    if role is None or not role.elastic:
        raise _not_scalable(name, roles)
    if replicas is not None:
        _check_bounds(replicas, role)
    write_request(requests_of(directory), name, replicas)
    click.echo(_await_summary(directory, role, replicas))


def _parse(request: str) -> tuple[str, int | None]:
    """Return role and number, None for ``auto``. Raises ManifestError."""
    name, equals, number = request.partition("=")
    if equals and name and (number == AUTO or (number.isascii() and number.isdecimal() and len(number) < 7)):
        return name, None if number == AUTO else int(number)
    raise ManifestError(f"{request!r} is not ROLE=NUMBER", where=_WHERE, hint="Pass e.g. rollout=4, or rollout=auto")


def _not_scalable(name: str, roles: dict[str, Role]) -> ManifestError:
    """Return the error that says why the role ``name`` cannot be scaled."""
    if name not in roles:
        return ManifestError(f"there is no role {name!r}", where=_WHERE, hint=f"The job has {', '.join(roles)}")
    role = roles[name]
    if name == "rollout":
        return ManifestError(_fixed(role), where=_WHERE, hint="Continue with --resume --set rollout.maxReplicas=N")
    if role.gang:
        what, hint = f"{name}: its ranks compute together", f"Continue with --resume --set {name}.replicas=N"
        return ManifestError(f"{what}, so their number is fixed while it runs", where=_WHERE, hint=hint)
    return ManifestError(f"{name}: its number is fixed while the job runs", where=_WHERE, hint="Scale rollout")


def _check_bounds(replicas: int, role: Role) -> None:
    if replicas < role.core:
        what = f"{role.name}={replicas} is below rollout.minReplicas, {role.core}"
        raise ManifestError(what, where=_WHERE, hint=f"Use {role.core} to {role.most}")
    if replicas > role.most:
        what = f"{role.name}={replicas} is above rollout.maxReplicas, {role.most}"
        hint = f"Use {role.core} to {role.most}, or continue with --resume --set rollout.maxReplicas={replicas}"
        raise ManifestError(what, where=_WHERE, hint=hint)


def _await_summary(directory: Path, role: Role, request: int | None) -> str:
    """Return the numbers once the supervisor has applied a request, or after ``TAKEN_UP_S`` seconds."""
    deadline = time.monotonic() + TAKEN_UP_S
    while not _taken_up(record := record_of(directory), role, request):
        if time.monotonic() > deadline:
            wanted = AUTO if request is None else request
            pending = f"{role.name}={wanted} is saved, but not applied after {TAKEN_UP_S:g} s"
            return f"{_summary(role, record)}\n  {pending}"
        time.sleep(_POLL_S)
    return _summary(role, record)


def _taken_up(record: Record, role: Role, request: int | None) -> bool:
    scale = _current_scale(record, role)
    return (scale.asked if scale.by == "person" else None) == request


def _current_scale(record: Record, role: Role) -> Scale:
    """Return the wanted number that the supervisor follows."""
    usual = Scale(role=role.name, wanted=role.replicas, by="manifest", asked=role.replicas)
    return next((scale for scale in record.scales if scale.role == role.name), usual)


def _summary(role: Role, record: Record) -> str:
    """Return the wanted number, its source, and the existing replicas by state, as text."""
    states = Counter(ProcessState(placed.state) for placed in record.processes if placed.role == role.name)
    existing = ", ".join(f"{states[state]} {verb}" for state, verb in _NOW.items() if states[state]) or "none exists"
    if not role.elastic:
        return f"{role.name}: {role.replicas}, which is fixed ({_fixed(role)}); {existing}"
    scale = _current_scale(record, role)
    problem = f"\n  {scale.problem}" if scale.problem else ""
    return f"{role.name}: {scale.wanted} wanted of {role.core} to {role.most} ({scale.why}); {existing}{problem}"


def _fixed(role: Role) -> str:
    return f"rollout.minReplicas and rollout.maxReplicas are both {role.core}"
