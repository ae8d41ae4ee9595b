"""Which devices of this machine each process sees.

Invariant: the shares of a device sum to at most 1, no two ranks of a gang have the same device, and a process has the
same devices however often it starts again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from asyncflow.api.accelerators import PROFILES, Profile
from asyncflow.errors import ManifestError
from asyncflow.plan.roles import Role
from asyncflow.substrates.local.crew import Seat

_ROUNDING = 1e-9


def devices_of(
    profile: Profile, *, environ: Mapping[str, str] = os.environ, folder: Path = Path("/dev")
) -> tuple[str, ...]:
    """Return this machine's devices by the names that go into ``profile.visible``.

    Where the environment has that variable, these are the devices that it names, up to the first that is none (as CUDA
    reads it); else all, numbered from 0 as the vendor's runtime does.
    """
    if profile.visible in environ:
        names = (name.strip() for name in environ[profile.visible].split(","))
        return tuple(takewhile(lambda name: name and not name.startswith("-"), names))
    return tuple(map(str, range(len(list(folder.glob(profile.files))))))


def hand_out(
    roles: Sequence[Role], *, find: Callable[[Profile], Sequence[str]] = devices_of
) -> dict[Seat, dict[str, str]]:
    """Return the variables by which each process of ``roles`` sees its devices, and no others.

    A role whose template names its devices itself is left as it is. Raises ManifestError where the machine has too few.
    """
    free: dict[str, dict[str, float]] = {}
    given: dict[Seat, dict[str, str]] = {}
    for role in sorted(roles, key=lambda role: -role.resources.share * role.resources.accelerators):
        wanted, facts = role.resources, PROFILES[role.resources.profile]
        if not wanted.accelerators or facts.visible in role.env:
            continue
        room = free.setdefault(facts.visible, dict.fromkeys(find(facts), 1.0))
        taken: set[str] = set()
        for index in range(role.replicas):
            chosen = _roomiest(room, count=wanted.accelerators, share=wanted.share, without=taken if role.gang else ())
            if len(chosen) < wanted.accelerators:
                raise _too_few(role, roles, found=len(room))
            taken.update(chosen)
            for device in chosen:
                room[device] -= wanted.share
            given[Seat(role.name, index)] = {facts.visible: ",".join(chosen)}
    return given


def _roomiest(room: Mapping[str, float], *, count: int, share: float, without: Collection[str]) -> list[str]:
    fitting = [device for device, left in room.items() if left >= share - _ROUNDING and device not in without]
    order = list(room)
    return sorted(sorted(fitting, key=lambda device: -room[device])[:count], key=order.index)


def _too_few(role: Role, roles: Sequence[Role], *, found: int) -> ManifestError:
    facts = PROFILES[role.resources.profile]
    wanted = [each for each in roles if PROFILES[each.resources.profile].visible == facts.visible]
    asked = ", ".join(f"{each.name} {each.replicas} x {_amount(each)}" for each in wanted)
    return ManifestError(
        f"this machine has {found} {facts.title} device{'' if found == 1 else 's'}, and the job asks for more: {asked}",
        where=f"spec.{role.name}.accelerator",
        hint=f"Lower replicas or count, let roles share a device (accelerator.share), see what {facts.visible} says, "
        "or set profile: cpu and count: 0",
    )


def _amount(role: Role) -> str:
    count, share = role.resources.accelerators, role.resources.share
    return f"{count}" if share == 1 else f"{share:g} of one"
