"""A kind that the cluster lacks, until it has it."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncflow_operator.cluster.client import Expired, Refusal, Unreachable
from asyncflow_operator.cluster.informer import Informer
from asyncflow_operator.cluster.kinds import MEMBERS
from asyncflow_operator.cluster.store import ObjectStore
from asyncflow_operator.cluster.views import object_view

WORKLOAD = next(kind for kind in MEMBERS if kind.optional)


class Server:
    """Says that there is no such kind until it is installed; then it lists, and a watch hears nothing."""

    def __init__(self) -> None:
        self.installed = False
        self.asked = 0

    async def settle(self, _: object) -> None:
        return

    async def pages(self, *_: object, **__: object) -> AsyncIterator[dict[str, Any]]:
        self.asked += 1
        if not self.installed:
            raise Refusal("no such kind", where="list", status=404)
        yield {"metadata": {"resourceVersion": "7"}, "items": []}

    async def watch(self, *_: object, **__: object) -> AsyncIterator[list[dict[str, Any]]]:
        await asyncio.Event().wait()
        yield []


async def test_a_kind_that_was_not_there_is_followed_as_soon_as_an_object_of_it_is_written() -> None:
    server = Server()
    store = ObjectStore(lambda kind, raw, _: object_view(raw, kind=kind), lambda *_: None)
    informer = Informer(server, store, WORKLOAD)
    following = asyncio.create_task(informer.run())
    async with asyncio.timeout(10):
        await informer.synced.wait()
        assert server.asked == 1
        server.installed = True
        informer.exists()
        while server.asked < 2:
            await asyncio.sleep(0.01)
    following.cancel()


class Hasty(Server):
    """Ends every watch at once, with an error or without, until it has been asked too often."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.installed = True
        self.error = error

    async def watch(self, *_: object, **__: object) -> AsyncIterator[list[dict[str, Any]]]:
        self.asked += 1
        if self.asked > 20:
            raise asyncio.CancelledError
        if self.error is not None:
            raise self.error
        return
        yield


@pytest.mark.parametrize("error", [None, Expired("too old", where="watch")])
async def test_a_watch_that_ends_at_once_is_begun_again_after_a_pause_that_grows(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []

    def pause(failed: int, **_: object) -> float:
        failures.append(failed)
        return 0.0

    monkeypatch.setattr("asyncflow_operator.cluster.informer.backoff", pause)
    store = ObjectStore(lambda kind, raw, _: object_view(raw, kind=kind), lambda *_: None)
    with pytest.raises(asyncio.CancelledError):
        await Informer(Hasty(error), store, WORKLOAD).run()
    assert failures[:3] == [1, 2, 3]


class Away(Server):
    """Answers nothing: each question takes its deadline, and after an hour the test is over."""

    now = 0.0

    async def pages(self, *_: object, **__: object) -> AsyncIterator[dict[str, Any]]:
        self.now += 30.0
        if self.now > 3600.0:
            raise asyncio.CancelledError
        raise Unreachable("no answer", where="list")
        yield


async def test_an_informer_moves_while_the_server_is_away_though_it_hears_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncflow_operator.cluster.informer.backoff", lambda *_, **__: 0.0)
    server, store = Away(), ObjectStore(lambda kind, raw, _: object_view(raw, kind=kind), lambda *_: None)
    informer = Informer(server, store, WORKLOAD, clock=lambda: server.now)
    assert informer.last_activity == math.inf, "it has yet to begin, as while the definitions are not installed"
    with pytest.raises(asyncio.CancelledError):
        await informer.run()
    assert (informer.last_message, informer.last_activity) == (0.0, 3600.0)
