"""Placement on this machine: the devices, loopback ports and command line of each process.

This module adds to the plan the facts that only this machine knows: paths, ports, devices, the interpreter, and the
kind of device that ``profile: auto`` selects.

Invariants:

* A process keeps its devices and ports over all its restarts, however many replicas join.
* The shares of a device sum to at most 1, and no two ranks of a gang have the same device. Devices that a template
  names are assigned to no other role.
* A port lies below the range from which the kernel picks ports for outgoing connections, so that no connection takes
  it while the driver is down.
* No two supervisors of one machine hold the same port: each holds an abstract Unix socket named after the port, which
  the kernel releases when the supervisor ends, for whatever reason.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import takewhile
from operator import getitem
from pathlib import Path

from asyncflow.api.check import inspect, refusal
from asyncflow.api.document import Place
from asyncflow.api.graph import CRITIC, REWARD
from asyncflow.api.job import RLJob, RLJobSpec
from asyncflow.api.names import TASK, TLS_ENV, TOKEN_FILE_ENV, kind_of_role, module_of_role
from asyncflow.api.placement import AUTO, PROFILES, Profile
from asyncflow.api.tasks import ProcessSpec
from asyncflow.api.workers import ON_CPU, RolloutSpec, TrainerSpec
from asyncflow.errors import AsyncFlowError, ManifestError
from asyncflow.local.folder import RunFolder
from asyncflow.local.issuer import Issuer
from asyncflow.local.lifecycle import LocalReplica
from asyncflow.plan.job import READ_LATE, critic_role
from asyncflow.plan.roles import Role

COMMANDS = "asyncflow.cli"
"""Module of the command line, by name, since this module must not import it."""
_LOWEST = 15000
_WITHOUT_RANGE = 32768

_ROUNDING = 1e-9


class PortReservation:
    """A reservation of free TCP ports of 127.0.0.1, as a context manager that returns the ports and releases them."""

    def __init__(self, count: int, *, first: int = 0) -> None:
        """Reserve ``count`` ports; the first one is ``first`` unless that is 0.

        Raises AsyncFlowError if ``first`` is taken or too few ports are free.
        """
        self.ports: list[int] = []
        self._locks: list[socket.socket] = []
        if first:
            self._try(first)
            if not self.ports:
                raise AsyncFlowError(f"port {first} of 127.0.0.1 is taken", hint="Use another port; 0 takes a free one")
        self._below = _ephemeral_low()
        self._candidates = list(range(min(_LOWEST, self._below // 2), self._below))
        random.shuffle(self._candidates)
        try:
            while len(self.ports) < count:
                self.another()
        except AsyncFlowError:
            self.close()
            raise

    def another(self) -> int:
        """Reserve one more port, and return it. Raises AsyncFlowError if none is free."""
        before = len(self.ports)
        while self._candidates:
            self._try(self._candidates.pop())
            if len(self.ports) > before:
                return self.ports[-1]
        what = f"fewer than {before + 1} free loopback ports below {self._below}"
        raise AsyncFlowError(what, hint="End other servers")

    def __enter__(self) -> list[int]:
        return self.ports

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the ports."""
        for lock in self._locks:
            lock.close()
        self._locks.clear()

    def _try(self, port: int) -> None:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0asyncflow-port-{port}")
            _listen_once(port)
        except OSError:
            lock.close()
            return
        self._locks.append(lock)
        self.ports.append(port)


def _listen_once(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen(1)


def _ephemeral_low() -> int:
    """Return the first port of the kernel's range for outgoing connections (``ip_local_port_range``)."""
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _WITHOUT_RANGE
    return low if low > 2048 else _WITHOUT_RANGE


def devices_of(
    profile: Profile, *, environ: Mapping[str, str] = os.environ, folder: Path = Path("/dev")
) -> tuple[str, ...]:
    """Return the names of this machine's devices, as the environment variable ``profile.visible`` lists them.

    If the environment has that variable, these are the devices that it names; otherwise all devices, numbered from 0
    as the vendor's runtime does.
    """
    if profile.visible in environ:
        return _named(environ[profile.visible])
    return tuple(map(str, range(len(list(folder.glob(profile.files))))))


def resolve(job: RLJob, *, find: Callable[[Profile], Sequence[str]] = devices_of) -> tuple[RLJob, list[str]]:
    """Return ``job`` with this machine's kind of device in place of ``profile: auto``, and notes about each choice.

    A role without a count gets one device for each local rank if the machine has devices and the role can use them;
    otherwise it computes on the CPU. A role with a count requires devices and never gets the CPU instead. Raises
    ManifestError if the resulting job violates a rule.
    """
    data, notes = job.model_dump(mode="json", by_alias=True, exclude_none=True), []
    for place, worker, plugin in _computing(job.spec):
        if worker.accelerator.profile != AUTO:
            continue
        requested = worker.accelerator.count
        default = job.spec.trainer.local_ranks if place == ("trainer",) else 1
        profile = _available_profile(requested or default, find)
        count = requested or default if profile is not None else requested
        if plugin in ON_CPU and not requested:
            profile, count, why = "cpu", 0, f"{plugin} computes on the CPU"
        elif profile is not None:
            why = f"{PROFILES[profile].title} devices of this machine: {len(find(PROFILES[profile]))}"
        else:
            profile, why = "nvidia" if requested else "cpu", "this machine has no device"
        reduce(getitem, place, data["spec"])["accelerator"] |= {"profile": profile, "count": count}
        notes.append(
            f"spec.{'.'.join(map(str, place))}.accelerator: auto is {{profile: {profile}, count: {count}}}: {why}"
        )
    built, problems = inspect(RLJob, data)
    if built is None or problems:
        raise refusal(problems, source=job.name)
    return built, notes


def _computing(spec: RLJobSpec) -> Iterator[tuple[Place, TrainerSpec | RolloutSpec | ProcessSpec, str]]:
    """Yield each section that may have devices: its path in the spec, the section, and its plug-in ("" for none)."""
    yield ("trainer",), spec.trainer, spec.trainer.backend.name
    yield ("rollout",), spec.rollout, spec.rollout.engine.name
    if spec.reference is not None:
        yield ("reference",), spec.reference, ""
    if (critic := critic_role(spec)) is not None:
        yield ("critic", "role"), critic, ""
    if spec.reward.role is not None:
        yield ("reward", "role"), spec.reward.role, ""
    yield from ((("tasks", index), task, "") for index, task in enumerate(spec.tasks) if task.function is not None)


def _available_profile(count: int, find: Callable[[Profile], Sequence[str]]) -> str | None:
    """Return the profile of this machine's devices, None if it has none; prefer a profile that allows ``count``."""
    names = [name for name, facts in PROFILES.items() if facts.files and find(facts)]
    return next((name for name in names if count in PROFILES[name].legal_counts), names[0] if names else None)


class DeviceAllocator:
    """Assignment of this machine's devices to the processes that request some.

    assigned: the variables that name the devices of each replica. A role whose template names its devices has those,
    and they are assigned to no other role.
    """

    def __init__(self, roles: Sequence[Role], *, find: Callable[[Profile], Sequence[str]] = devices_of) -> None:
        """Assign devices to every replica of ``roles``.

        Raises ManifestError if the machine or a template has too few devices, or if a template names the same devices
        for all processes of a gang.
        """
        self._roles: dict[str, Role] = {role.name: role for role in roles if role.resources.accelerators}
        self._free = {facts.visible: dict.fromkeys(find(facts), 1.0) for facts in map(_facts, self._roles.values())}
        self.assigned: dict[LocalReplica, dict[str, str]] = {}
        for role in self._roles.values():
            visible = _facts(role).visible
            if visible in role.env:
                self._free[visible].update(dict.fromkeys(_own(role), 0.0))
        for role in sorted(self._roles.values(), key=lambda role: -role.resources.share * role.resources.accelerators):
            for index in range(role.replicas):
                self.assign(LocalReplica(role.name, index))

    def assign(self, replica: LocalReplica) -> None:
        """Assign devices to a replica that has none yet. Raises ManifestError if there are too few."""
        role = self._roles.get(replica.role)
        if role is None or replica in self.assigned or _facts(role).visible in role.env:
            return
        visible, wanted = _facts(role).visible, role.resources
        free, peers = self._free[visible], [each for each in self.assigned if role.linked and each.role == role.name]
        taken = {device for peer in peers for device in self.assigned[peer][visible].split(",")}
        chosen = _most_free(free, count=wanted.accelerators, share=wanted.share, without=taken)
        if len(chosen) < wanted.accelerators:
            grown = replace(role, replicas=max(role.replicas, replica.index + 1))
            requesting = [grown if each.name == role.name else each for each in self._roles.values()]
            raise _too_few(role, requesting, found=len(free))
        for device in chosen:
            free[device] -= wanted.share
        self.assigned[replica] = {visible: ",".join(chosen)}


def _own(role: Role) -> tuple[str, ...]:
    """Return the devices that the role's template names. Raises ManifestError if they do not fit the role."""
    visible, where = _facts(role).visible, f"{_section(role)}.template.env"
    named, wanted = _named(role.env[visible]), role.resources.accelerators
    if role.linked:
        raise ManifestError(
            f"{visible} = {role.env[visible]!r}: all {role.replicas} replicas would see the same devices",
            where=where,
            hint=f"Leave it out, and set {visible} where `asyncflow run` is started",
        )
    if len(named) < wanted:
        raise ManifestError(
            f"{visible} = {role.env[visible]!r} names {len(named)} of the {wanted} devices that a process requests",
            where=where,
            hint=f"Name {wanted}, or lower {_section(role)}.accelerator.count",
        )
    return named


def _section(role: Role) -> str:
    """Return the section of the manifest that sets the devices of a role; a task is identified by its name."""
    if kind_of_role(role.name) == TASK:
        return f"spec.tasks[{role.name.removeprefix(f'{TASK}-')}]"
    return f"spec.{role.name}.role" if role.name in (REWARD, CRITIC) else f"spec.{role.name}"


def _facts(role: Role) -> Profile:
    return PROFILES[role.resources.profile]


def _named(variable: str) -> tuple[str, ...]:
    """Return the devices that a variable names, up to the first empty or negative entry, as CUDA reads it."""
    names = (name.strip() for name in variable.split(","))
    return tuple(takewhile(lambda name: name and not name.startswith("-"), names))


def _most_free(free: Mapping[str, float], *, count: int, share: float, without: Collection[str]) -> list[str]:
    fitting = [device for device, left in free.items() if left >= share - _ROUNDING and device not in without]
    order = list(free)
    return sorted(sorted(fitting, key=lambda device: -free[device])[:count], key=order.index)


def _too_few(role: Role, requesting: Sequence[Role], *, found: int) -> ManifestError:
    facts = _facts(role)
    wanted = [each for each in requesting if _facts(each).visible == facts.visible]
    demand = ", ".join(f"{each.name} {each.replicas} x {_amount(each)}" for each in wanted)
    alone = (
        "; ranks of a trainer never share one" if any(each.gang and each.resources.share < 1 for each in wanted) else ""
    )
    return ManifestError(
        f"this machine has {found} {facts.title} device{'' if found == 1 else 's'}, too few for {demand}{alone}",
        where=f"{_section(role)}.accelerator",
        hint="Lower replicas or count, or let roles share a device (accelerator.share); if this count lacks a device, "
        f"name all devices in {facts.visible}",
    )


def _amount(role: Role) -> str:
    count, share = role.resources.accelerators, role.resources.share
    return f"{count}" if share == 1 else f"{share:g} of one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Command line of one replica and attempt, and environment variables in addition to the inherited ones.

    http: URL of its /metrics, "" if unknown; imports: modules that the fork server must have imported before it may
    fork the process, None if it must be spawned.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    http: str = ""
    imports: tuple[str, ...] | None = None


def replicas_of(roles: Sequence[Role]) -> list[LocalReplica]:
    """Return every replica of ``roles``, in plan order."""
    return [LocalReplica(role.name, index) for role in roles for index in range(role.replicas)]


def modules_of(role: Role) -> tuple[str, ...]:
    """Return the modules that a process of ``role`` imports before it is ready."""
    return (COMMANDS, module_of_role(role.name), *role.imports)


class Places:
    """Port and devices of each replica.

    ports: port of each replica of ``roles`` for /metrics, and of the first one also for its status; another_port:
    reserves a port for a replica that joins. Raises ManifestError if this machine has too few devices.
    """

    def __init__(
        self, roles: Sequence[Role], *, ports: Mapping[LocalReplica, int], another_port: Callable[[], int]
    ) -> None:
        self._ports = dict(ports)
        self._another_port = another_port
        self._devices = DeviceAllocator(roles)

    def assign(self, replica: LocalReplica) -> None:
        """Assign a port and devices to a replica that has none yet. Raises AsyncFlowError if too few are free."""
        self._devices.assign(replica)
        if replica not in self._ports:
            self._ports[replica] = self._another_port()

    def port(self, replica: LocalReplica) -> int:
        """Return the port for /metrics of a replica that has a place."""
        return self._ports[replica]

    def devices(self, replica: LocalReplica) -> Mapping[str, str]:
        """Return the environment variables that name the devices of a replica."""
        return self._devices.assigned.get(replica, {})


def launcher(
    roles: Sequence[Role],
    *,
    folder: RunFolder,
    issuer: Issuer,
    driver: str,
    places: Places,
    control_port: int | None = None,
) -> Callable[[LocalReplica, int], Launch]:
    """Return the function that makes the ``Launch`` of a replica that has a place, as an attempt.

    issuer: issues the certificates of all replicas; driver: address to which all processes connect; control_port: port
    of the driver's control service. A role is spawned, not forked, if it has devices or if the user sets variables
    that its libraries may read when they are imported.
    """
    common = {TOKEN_FILE_ENV: str(folder.token), "PYTHONSAFEPATH": "1"}
    named: dict[str, Role] = {role.name: role for role in roles}

    def launch(replica: LocalReplica, attempt: int) -> Launch:
        role, port = named[replica.role], places.port(replica)
        argv = role.command(
            index=replica.index,
            attempt=attempt,
            driver=driver,
            job=str(folder.job),
            workdir=str(folder.path),
            http_port=port,
            control_port=control_port if replica.role == "driver" else None,
            python=sys.executable,
        )
        tls = {TLS_ENV: str(issuer.issue(replica.role, replica.index))}
        env = {**common, **tls, **places.devices(replica), **role.env}
        must_spawn = role.resources.accelerators or role.env.keys() - READ_LATE
        imports = None if must_spawn else modules_of(role)
        return Launch(argv=argv, env=env, http=f"http://127.0.0.1:{port}", imports=imports)

    return launch
