"""An isolated network: one namespace for the core, and one for each guest, whose link has limited bandwidth.

    core: 10.77.0.1 on a bridge ── veth, tbf towards the guest ── 10.77.0.10 + i in namespace i

Invariants: these namespaces have no route to any other network. Their names contain this process's id. When the context
ends, all that was created is removed, even if the creation failed half-way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CORE_ADDRESS = "10.77.0.1"
NEEDED = ("ip", "tc")
_COMMAND_S = 20.0
_ENV = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
_BURST = "64kb"
_QUEUE = "50ms"


@dataclass(frozen=True, kw_only=True)
class Network:
    """The names of the namespaces. guests: one for each rollout, in order."""

    core: str
    guests: tuple[str, ...]

    @staticmethod
    def address(guest: int) -> str:
        """Return the address of guest number ``guest``."""
        return f"10.77.0.{10 + guest}"

    @staticmethod
    def within(namespace: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` in ``namespace``, in the same process: ``ip`` replaces itself by it."""
        return [_path("ip"), "netns", "exec", namespace, *argv]


def missing() -> list[str]:
    """Return the missing requirements: root's rights or programs."""
    lacks = [name for name in NEEDED if shutil.which(name, path=_ENV["PATH"]) is None]
    return lacks if os.geteuid() == 0 else ["root's rights", *lacks]


@contextlib.contextmanager
def capped_links(*, guests: int, bits_per_s: float, both_ways: bool = False, mtu: int = 1500) -> Iterator[Network]:
    """Create the network. Each link is limited to ``bits_per_s``, towards the guest or both ways.

    mtu: the size of packets in bytes. Raises CalledProcessError if a command fails.
    """
    network = Network(
        core=f"asyncflow-{os.getpid()}-core",
        guests=tuple(f"asyncflow-{os.getpid()}-{index}" for index in range(guests)),
    )
    with contextlib.ExitStack() as made:
        for name in (network.core, *network.guests):
            _run("ip", "netns", "add", name)
            made.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        core = ("ip", "-n", network.core)
        _run(*core, "link", "add", "hub", "type", "bridge")
        _run(*core, "addr", "add", f"{CORE_ADDRESS}/24", "dev", "hub")
        _run(*core, "link", "set", "hub", "up")
        limit = ("root", "tbf", "rate", f"{bits_per_s:.0f}bit", "burst", _BURST, "latency", _QUEUE)
        for index, name in enumerate(network.guests):
            port = f"to{index}"
            _run(*core, "link", "add", port, "type", "veth", "peer", "name", "link0", "netns", name)
            _run(*core, "link", "set", port, "master", "hub", "up")
            _run("ip", "-n", name, "addr", "add", f"{network.address(index)}/24", "dev", "link0")
            _run("ip", "-n", name, "link", "set", "link0", "up")
            for namespace, device in ((network.core, port), (name, "link0")):
                _run("ip", "-n", namespace, "link", "set", device, "mtu", str(mtu))
            _run("tc", "-n", network.core, "qdisc", "add", "dev", port, *limit)
            if both_ways:
                _run("tc", "-n", name, "qdisc", "add", "dev", "link0", *limit)
        yield network


def _path(program: str) -> str:
    return shutil.which(program, path=_ENV["PATH"]) or program


def _run(program: str, *arguments: str) -> None:
    subprocess.run([_path(program), *arguments], check=True, timeout=_COMMAND_S, env=_ENV)
