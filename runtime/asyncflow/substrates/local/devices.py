"""Devices of this machine: what ``profile: auto`` stands for, and which ones each process sees.

Invariant: the shares of a device sum to at most 1, no two ranks of a gang have the same device, and a process has the
same devices however often it starts again. Devices that a template names are nobody else's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from asyncflow.api.accelerators import PROFILES, Profile
from asyncflow.api.check import inspect
from asyncflow.api.job import RLJob
from asyncflow.api.placement import AUTO
from asyncflow.api.problems import refusal
from asyncflow.api.workers import ON_CPU
from asyncflow.errors import ManifestError
from asyncflow.plan.roles import Role
from asyncflow.substrates.local.crew import Seat

_ROUNDING = 1e-9


def devices_of(
    profile: Profile, *, environ: Mapping[str, str] = os.environ, folder: Path = Path("/dev")
) -> tuple[str, ...]:
    """Return this machine's devices by the names that go into ``profile.visible``.

    Where the environment has that variable, these are the devices that it names; else all, numbered from 0 as the
    vendor's runtime does.
    """
    if profile.visible in environ:
        return _named(environ[profile.visible])
    return tuple(map(str, range(len(list(folder.glob(profile.files))))))


def resolve(job: RLJob, *, find: Callable[[Profile], Sequence[str]] = devices_of) -> tuple[RLJob, list[str]]:
    """Return ``job`` with the kind of device of this machine in place of ``profile: auto``, and notes that say which.

    Without a count a role has one device where there are some and it can use them, else it computes on the CPU; with a
    count it asks for devices, and never gets the CPU instead. Raises ManifestError where the job that comes out is
    against a rule.
    """
    data, notes = job.model_dump(mode="json", by_alias=True, exclude_none=True), []
    for name, worker, plugin in (
        ("trainer", job.spec.trainer, job.spec.trainer.backend.name),
        ("rollout", job.spec.rollout, job.spec.rollout.engine.name),
    ):
        if worker.accelerator.profile != AUTO:
            continue
        asked = worker.accelerator.count
        usual = job.spec.trainer.local_ranks if name == "trainer" else 1
        profile = _found(asked or usual, find)
        count = asked or usual if profile is not None else asked
        if plugin in ON_CPU and not asked:
            profile, count, why = "cpu", 0, f"{plugin} computes on the CPU"
        elif profile is not None:
            why = f"{PROFILES[profile].title} devices of this machine: {len(find(PROFILES[profile]))}"
        else:
            profile, why = "nvidia" if asked else "cpu", "this machine has no device"
        data["spec"][name]["accelerator"] |= {"profile": profile, "count": count}
        notes.append(f"spec.{name}.accelerator: auto is {{profile: {profile}, count: {count}}}: {why}")
    built, problems = inspect(RLJob, data)
    if built is None or problems:
        raise refusal(problems, source=job.name)
    return built, notes


def _found(count: int, find: Callable[[Profile], Sequence[str]]) -> str | None:
    """Return the profile of the devices here, if there are any; of several rows for them one that allows ``count``."""
    here = [name for name, facts in PROFILES.items() if facts.files and find(facts)]
    return next((name for name in here if count in PROFILES[name].legal_counts), here[0] if here else None)


def hand_out(
    roles: Sequence[Role], *, find: Callable[[Profile], Sequence[str]] = devices_of
) -> dict[Seat, dict[str, str]]:
    """Return the variables by which each process that asks for devices sees its own.

    A role whose template names its devices has those, and nobody else is given them. Raises ManifestError where the
    machine or a template has too few, or where a template names the same devices for all processes of a gang.
    """
    asking = [role for role in roles if role.resources.accelerators]
    room = {facts.visible: dict.fromkeys(find(facts), 1.0) for facts in map(_facts, asking)}
    for role in asking:
        visible = _facts(role).visible
        if visible in role.env:
            room[visible].update(dict.fromkeys(_own(role), 0.0))
    given: dict[Seat, dict[str, str]] = {}
    for role in sorted(asking, key=lambda role: -role.resources.share * role.resources.accelerators):
        visible, wanted, taken = _facts(role).visible, role.resources, set[str]()
        for index in range(role.replicas if visible not in role.env else 0):
            chosen = _roomiest(room[visible], count=wanted.accelerators, share=wanted.share, without=taken)
            if len(chosen) < wanted.accelerators:
                raise _too_few(role, asking, found=len(room[visible]))
            taken.update(chosen if role.gang else ())
            for device in chosen:
                room[visible][device] -= wanted.share
            given[Seat(role.name, index)] = {visible: ",".join(chosen)}
    return given


def _own(role: Role) -> tuple[str, ...]:
    """Return the devices that the role's template names. Raises ManifestError where they cannot serve it."""
    visible, where = _facts(role).visible, f"spec.{role.name}.template.env"
    named, wanted = _named(role.env[visible]), role.resources.accelerators
    if role.spread:
        raise ManifestError(
            f"{visible} = {role.env[visible]!r}: all {role.replicas} replicas would see the same devices",
            where=where,
            hint=f"Leave it out, and set {visible} where `asyncflow run` is started",
        )
    if len(named) < wanted:
        raise ManifestError(
            f"{visible} = {role.env[visible]!r} names {len(named)} of the {wanted} devices that a process asks for",
            where=where,
            hint=f"Name {wanted}, or lower spec.{role.name}.accelerator.count",
        )
    return named


def _facts(role: Role) -> Profile:
    return PROFILES[role.resources.profile]


def _named(variable: str) -> tuple[str, ...]:
    """Return the devices that a variable names, up to the first that is none, as CUDA reads it."""
    names = (name.strip() for name in variable.split(","))
    return tuple(takewhile(lambda name: name and not name.startswith("-"), names))


def _roomiest(room: Mapping[str, float], *, count: int, share: float, without: Collection[str]) -> list[str]:
    fitting = [device for device, left in room.items() if left >= share - _ROUNDING and device not in without]
    order = list(room)
    return sorted(sorted(fitting, key=lambda device: -room[device])[:count], key=order.index)


def _too_few(role: Role, asking: Sequence[Role], *, found: int) -> ManifestError:
    facts = _facts(role)
    wanted = [each for each in asking if _facts(each).visible == facts.visible]
    asked = ", ".join(f"{each.name} {each.replicas} x {_amount(each)}" for each in wanted)
    alone = (
        "; ranks of a trainer never share one" if any(each.gang and each.resources.share < 1 for each in wanted) else ""
    )
    return ManifestError(
        f"this machine has {found} {facts.title} device{'' if found == 1 else 's'}, too few for {asked}{alone}",
        where=f"spec.{role.name}.accelerator",
        hint="Lower replicas or count, or let roles share a device (accelerator.share); where devices are missing from "
        f"this count, name them in {facts.visible}",
    )


def _amount(role: Role) -> str:
    count, share = role.resources.accelerators, role.resources.share
    return f"{count}" if share == 1 else f"{share:g} of one"
