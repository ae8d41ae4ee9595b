"""The end of an operator: whatever ends it, the next one need not wait for its Lease."""

import asyncio
from pathlib import Path
from typing import Any, Never

import pytest

from asyncflow_operator import operator as process
from asyncflow_operator.settings import Settings
from asyncflow_operator.telemetry import Metrics
from asyncflow_operator.watch import ClusterWatch, WatchEnded


class Leases:
    """An API server with one Lease and nothing else."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] = {"metadata": {}, "spec": {}}
        self.taken = asyncio.Event()

    async def get(self, *_: object) -> dict[str, Any]:
        return self.lease

    async def replace(self, _kind: object, _namespace: str, _name: str, body: dict[str, Any], **_: object) -> None:
        self.lease = body
        self.taken.set()


async def test_one_whose_watch_has_ended_gives_its_lease_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = Leases()

    async def kopf(*_: object, stop: asyncio.Event, ready: asyncio.Event, **__: object) -> None:
        ready.set()
        await stop.wait()

    async def ended(_: object) -> Never:
        await leases.taken.wait()
        raise WatchEnded

    async def nothing(_: object) -> None:
        return

    async def for_ever(_: object) -> None:
        await asyncio.Event().wait()

    for name, instead in (("run_kopf", kopf), ("until_a_watch_ends", ended)):
        monkeypatch.setattr(process, name, instead)
    for name, instead in (("run", for_ever), ("resync", for_ever), ("synced", nothing)):
        monkeypatch.setattr(ClusterWatch, name, instead)
    settings = Settings(key_file=tmp_path / "key", http_host="127.0.0.1", http_port=0, identity="me")
    made: Any = {"namespaces": (), "leases": leases, "master": b"m" * 32, "metrics": Metrics()}
    async with asyncio.timeout(10):
        with pytest.raises(WatchEnded):
            await process.Operator(settings, leases, **made).run(take_signals=lambda: None)  # type: ignore[arg-type]
    assert leases.lease["spec"]["holderIdentity"] == ""
