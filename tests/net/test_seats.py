"""Answers that nobody asked for go to who has the seat, and to nobody who does not read them."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
from msgspec import Struct

from asyncflow.errors import Refused
from asyncflow.net.arena import memfd
from asyncflow.net.rpc import RpcServer, wire
from asyncflow.net.rpc.blocking_link import BlockingLink
from asyncflow.net.rpc.seats import Seats

BIG = 1 << 20


class Size(Struct, frozen=True):
    bytes: int


def fill(request: Size, frames: Sequence[memoryview]) -> tuple[Size, list[bytes]]:
    if request.bytes < 0:
        raise Refused("no such size")
    return request, [b"x" * request.bytes]


@contextmanager
def linked(server: RpcServer, seat: int | None) -> Iterator[BlockingLink]:
    with closing(BlockingLink(server.address, keys=None, max_message=1 << 30, seat=seat)) as link:
        yield link


async def said(link: BlockingLink, call: int, size: int) -> list[memoryview]:
    """Make a call, and give what comes."""
    deadline = time.monotonic() + 10
    await asyncio.to_thread(link.send, call, "fill", Size(size), (), deadline=deadline)
    return await asyncio.to_thread(link.receive, 10)


def test_a_peer_has_one_seat_and_a_seat_one_peer() -> None:
    seats = Seats()
    for seat in range(1000):
        seats.sit(1, seat)
    seats.sit(2, 7)
    assert (len(seats), seats.at(999), seats.at(998), seats.at(7)) == (2, 1, None, 2)
    seats.sit(3, 7)
    assert (len(seats), seats.at(7)) == (2, 3)
    for peer in (2, 3, 1, 1):
        seats.rise(peer)
    assert (len(seats), seats.at(7), seats.at(999)) == (0, None, None)


async def test_an_answer_goes_to_who_has_the_seat(server: RpcServer, way: str) -> None:
    server.route_now("fill", Size, fill)
    with linked(server, 5) as mine, linked(server, 6) as other, linked(server, None) as nobody:
        for link in (mine, other, nobody):
            assert wire.read_answer(await said(link, 0, 1), where="")[0] == 0
        for size in (3, BIG):
            server.answer_unasked(5, 40 + size, "fill", Size(size))
            parts = await asyncio.to_thread(mine.receive, 10)
            assert wire.read_answer(parts, where="") == (40 + size, None)
            assert parts[2].nbytes == size
        server.answer_unasked(5, 9, "fill", Size(-1))
        call, error = wire.read_answer(await asyncio.to_thread(mine.receive, 10), where="")
        assert (call, type(error)) == (9, Refused)
        assert await asyncio.to_thread(other.receive, 0) == await asyncio.to_thread(nobody.receive, 0) == []


async def test_nothing_is_done_for_a_seat_that_nobody_has(server: RpcServer) -> None:
    server.route_now("fill", Size, fill)
    with linked(server, 5) as link:
        await said(link, 0, 1)
        server.answer_unasked(6, 1, "fill", Size(1))
    async with asyncio.timeout(10):
        while server._streams is not None and server._streams.reader(5) is not None:
            await asyncio.sleep(0.001)
    server.answer_unasked(5, 1, "fill", Size(1))
    assert (server.counters.calls, server.counters.dropped["ahead"]) == ({"fill": 1}, 2)


async def test_who_does_not_read_is_sent_no_more(server: RpcServer, way: str) -> None:
    server.route_now("fill", Size, fill)
    with linked(server, 5) as link:
        await said(link, 0, 1)
        for number in range(1, 500):
            server.answer_unasked(5, number, "fill", Size(BIG))
        assert server.counters.calls["fill"] < memfd.SIZE // BIG + 100
        assert server.counters.calls["fill"] + server.counters.dropped["ahead"] == 500
        await asyncio.to_thread(link.send, 1000, "fill", Size(2), (), deadline=time.monotonic() + 10)
        numbers: list[int] = []
        while 1000 not in numbers:
            numbers.append(wire.read_answer(await asyncio.to_thread(link.receive, 10), where="")[0])
        assert numbers == [*range(1, len(numbers)), 1000]


@pytest.mark.parametrize("seat", [-1, 1 << 63, 1.5, "5", None])
def test_what_is_no_seat_is_no_message(seat: object) -> None:
    assert wire.to_server(wire.encode(["s1", 5])) == wire.Seat(5)
    with pytest.raises(wire.MALFORMED):
        wire.to_server(wire.encode(["s1", seat]))
