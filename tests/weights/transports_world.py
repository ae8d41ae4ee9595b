"""Transports of every kind, alone and with the host network behind them, and what happens to one in the middle."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from asyncflow.errors import AsyncFlowError
from asyncflow.weights.fast_transport import FastTransport, WithHost
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.ipc_transport import IpcTransport
from asyncflow.weights.mooncake_transport import MooncakeTransport
from asyncflow.weights.pairs_transport import PairsTransport
from asyncflow.weights.transport import Transport

FAST: dict[str, type[FastTransport]] = {"ipc": IpcTransport, "pairs": PairsTransport, "mooncake": MooncakeTransport}
QUICK_S = 4.0
"""Deadline where a peer is to be found dead."""


def fast(kind: str, name: str, **options: Any) -> FastTransport:
    return FAST[kind](name=name, **options)


def with_host(kind: str, name: str, **options: Any) -> WithHost:
    return WithHost(fast(kind, name, **options), HostTransport(name=name, patience_s=QUICK_S))


def strike(transport: Transport, *, after: int, blow: Callable[[], None]) -> list[tuple[float, AsyncFlowError | None]]:
    """Have ``blow`` happen when the pulls of ``transport`` have brought that many regions.

    The list that is returned gets, for each pull, the seconds from the blow to its end, and how it failed.
    """
    pull = transport.pull
    left = after
    struck_at = 0.0
    ended: list[tuple[float, AsyncFlowError | None]] = []

    async def struck(asked, *, sink):
        def counted(region, data, *, sent=None):
            nonlocal left, struck_at
            sink(region, data, sent=sent)
            left -= 1
            if left == 0:
                struck_at = time.monotonic()
                blow()

        failed = None
        try:
            await pull(asked, sink=counted)
        except AsyncFlowError as error:
            failed = error
            raise
        finally:
            ended.append((time.monotonic() - struck_at, failed))

    transport.pull = struck
    return ended


def spoil(transport: FastTransport) -> None:
    """Change a byte of every chunk that a fast transport brings."""
    made = transport.line

    def line(*given, **more):
        good = made(*given, **more)
        bring = good.bring

        async def bad(regions):
            chunk = await bring(regions)
            return chunk._replace(frames=[_changed(frame) for frame in chunk.frames])

        good.bring = bad
        return good

    transport.line = line


def _changed(frame: memoryview) -> memoryview:
    changed = bytearray(frame)
    changed[0] ^= 1
    return memoryview(changed)
