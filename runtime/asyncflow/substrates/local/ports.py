"""Loopback ports that stay free for one job, however often its driver restarts.

Invariants: a port lies below the range from which the kernel picks ports for outgoing connections, so that no
connection takes it while the driver is down; and no two supervisors of one machine hold the same port: each holds an
abstract Unix socket named after it, which the kernel takes back when the supervisor ends, however it ends.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from asyncflow.errors import AsyncFlowError

_LOWEST = 15000
_WITHOUT_RANGE = 32768


class PortReservation:
    """Some free TCP ports of 127.0.0.1, as a context: entering gives them, leaving gives them up."""

    def __init__(self, count: int, *, first: int = 0) -> None:
        """Reserve ``count`` ports, of which the first is ``first`` unless that is 0.

        Raises AsyncFlowError where too few are free, or that one is not.
        """
        self.ports: list[int] = []
        self._held: list[socket.socket] = []
        if first:
            self._try(first)
            if not self.ports:
                raise AsyncFlowError(
                    f"port {first} of 127.0.0.1 is taken", hint="Give another port; 0 takes a free one"
                )
        below = _ephemeral_low()
        candidates = list(range(min(_LOWEST, below // 2), below))
        random.shuffle(candidates)
        for port in candidates:
            if len(self.ports) == count:
                return
            self._try(port)
        if len(self.ports) < count:
            self.close()
            raise AsyncFlowError(f"fewer than {count} free loopback ports below {below}", hint="End other servers")

    def __enter__(self) -> list[int]:
        return self.ports

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the ports."""
        for held in self._held:
            held.close()
        self._held.clear()

    def _try(self, port: int) -> None:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0asyncflow-port-{port}")
            _listen_once(port)
        except OSError:
            claim.close()
            return
        self._held.append(claim)
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
