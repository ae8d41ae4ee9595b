"""Which namespaces an operator of single ones serves, by what the server says about each."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from asyncflow_operator.cluster.client import Refusal, Unreachable
from asyncflow_operator.rights import served, until_namespaces_change

ALL = ("a", "b", "c")


class Server:
    """Forbids lists in some namespaces, and answers none in others."""

    def __init__(self, *, forbids: str = "", silent: str = "") -> None:
        self.forbids, self.silent = forbids, silent
        self.asked = 0

    async def pages(self, *_: object, namespace: str, **__: object) -> AsyncIterator[dict[str, Any]]:
        self.asked += 1
        if namespace in self.silent:
            raise Unreachable("no answer", where="list")
        if namespace in self.forbids:
            raise Refusal("no", where="list", status=403)
        yield {"items": []}


async def test_namespaces_without_rights_are_left_out() -> None:
    assert await served(Server(), ALL, current=ALL) == ALL
    assert await served(Server(forbids="b"), ALL, current=ALL) == ("a", "c")


async def test_where_the_server_does_not_answer_everything_stays() -> None:
    assert await served(Server(silent="abc"), ALL, current=("a", "c")) == ("a", "c")
    assert await served(Server(silent="a", forbids="c"), ALL, current=ALL) == ("a", "b")


async def test_without_any_rights_all_are_waited_for() -> None:
    assert await served(Server(forbids="abc"), ALL, current=("a", "c")) == ALL


async def test_a_change_counts_when_it_lasts() -> None:
    server = Server()
    waiting = asyncio.create_task(until_namespaces_change(server, ALL, current=ALL, every_s=0.0))
    for forbids in ("b", "", "b", ""):
        server.forbids = forbids
        before = server.asked
        while server.asked < before + len(ALL):
            await asyncio.sleep(0)
        assert not waiting.done()
    server.forbids = "b"
    async with asyncio.timeout(20):
        await waiting
