"""The event loop of roles: what it does otherwise than asyncio's, and that all else goes on as there."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from asyncflow.errors import DeadlineExceeded
from asyncflow.net.loop import Loop
from asyncflow.net.rpc import RpcClient, RpcServer


class Number(Struct, frozen=True, kw_only=True):
    value: int


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def run() -> Iterator[Run]:
    with asyncio.Runner(loop_factory=Loop) as runner:
        yield runner.run


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def test_a_reader_is_called_until_it_is_removed(run: Run, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair

    async def main() -> list[tuple[str, bytes]]:
        loop, heard, came = asyncio.get_running_loop(), [], asyncio.Event()

        def read(name: str) -> None:
            heard.append((name, ours.recv(1)))
            came.set()

        async def one() -> None:
            await came.wait()
            came.clear()

        loop.add_reader(ours, read, "first")
        theirs.send(b"abc")
        await one()
        loop.add_reader(ours.fileno(), read, "second")
        await one()
        assert loop.remove_reader(ours)
        assert not loop.remove_reader(ours)
        await asyncio.sleep(0.05)
        return heard

    assert run(main()) == [("first", b"a"), ("second", b"b")]


def test_a_socket_that_was_closed_under_its_reader_is_no_obstacle(run: Run) -> None:
    async def main() -> None:
        loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
        number = ours.fileno()
        loop.add_reader(ours, lambda: None)
        ours.close()
        with pytest.raises(OSError, match="descriptor"):
            loop.add_reader(number, lambda: None)
        assert loop.remove_reader(number)
        theirs.close()

    run(main())


def test_of_those_ready_at_once_none_is_called_that_another_removed(run: Run) -> None:
    async def main() -> int:
        loop, called, pairs = asyncio.get_running_loop(), [], [socket.socketpair() for _ in range(3)]

        def read() -> None:
            called.append(True)
            for ours, _ in pairs:
                loop.remove_reader(ours)

        for ours, theirs in pairs:
            loop.add_reader(ours, read)
            theirs.send(b"x")
        await asyncio.sleep(0.05)
        for end in (end for ends in pairs for end in ends):
            end.close()
        return len(called)

    assert run(main()) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), asyncio.CancelledError("oh")])
def test_a_reader_that_fails_is_logged_and_harms_no_other(
    run: Run, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    async def main() -> bytes:
        loop, came = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        pairs = [socket.socketpair() for _ in range(2)]

        def fail() -> None:
            loop.remove_reader(pairs[0][0])
            raise error

        def read() -> None:
            loop.remove_reader(pairs[1][0])
            came.set_result(pairs[1][0].recv(9))

        for (ours, theirs), reader in zip(pairs, (fail, read), strict=True):
            loop.add_reader(ours, reader)
            theirs.send(b"here")
        async with asyncio.timeout(10):
            heard: bytes = await came
        for end in (end for ends in pairs for end in ends):
            end.close()
        return heard

    with caplog.at_level(logging.ERROR):
        assert run(main()) == b"here"
    assert f"{type(error).__name__}: oh" in caplog.text


def test_a_reader_may_close_what_can_be_written_at_the_same_time(run: Run) -> None:
    async def main() -> list[str]:
        loop, called, (ours, theirs) = asyncio.get_running_loop(), [], socket.socketpair()

        def read() -> None:
            called.append("read")
            loop.remove_reader(ours)
            loop.remove_writer(ours)
            ours.close()

        theirs.send(b"x")
        loop.add_writer(ours, called.append, "written")
        loop.add_reader(ours, read)
        await asyncio.sleep(0.05)
        theirs.close()
        return called

    assert run(main()) == ["read"]


@pytest.mark.parametrize("asks", ["soon", "later", "thread", "future", "stop"])
def test_what_a_reader_asks_for_is_done_though_readers_never_rest(run: Run, asks: str) -> None:
    async def main() -> bool:
        loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
        done, calls = loop.create_future(), 0

        def finish() -> None:
            if not done.done():
                done.set_result(True)

        def read() -> None:
            nonlocal calls
            calls += 1
            if calls != 100:
                return
            if asks == "soon":
                loop.call_soon(finish)
            elif asks == "later":
                loop.call_later(0.01, finish)
            elif asks == "thread":
                threading.Thread(target=loop.call_soon_threadsafe, args=(finish,)).start()
            elif asks == "future":
                finish()
            else:
                loop.stop()
                loop.call_soon(finish)

        theirs.send(b"never read")
        loop.add_reader(ours, read)
        try:
            async with asyncio.timeout(10):
                return bool(await done)
        finally:
            loop.remove_reader(ours)
            ours.close()
            theirs.close()

    if asks == "stop":
        with pytest.raises(RuntimeError, match="stopped before"):
            run(main())
    else:
        assert run(main())


def test_a_timer_rings_though_readers_never_rest(run: Run, pair: tuple[socket.socket, socket.socket]) -> None:
    async def main() -> None:
        ours, theirs = pair
        theirs.send(b"never read")
        asyncio.get_running_loop().add_reader(ours, lambda: None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.Event().wait()

    run(main())


def test_timers_threads_signals_processes_and_transports_go_on_as_in_any_loop(run: Run) -> None:
    async def main() -> None:
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(threading.get_ident) != threading.get_ident()
            loop.add_signal_handler(signal.SIGUSR1, told.set)
            loop.call_later(0.01, os.kill, os.getpid(), signal.SIGUSR1)
            await told.wait()
            loop.remove_signal_handler(signal.SIGUSR1)
            command = [sys.executable, "-c", "print('said')"]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            assert await process.communicate() == (b"said\n", None)
            server = await asyncio.start_server(lambda _, writer: writer.write_eof(), "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            assert await reader.read() == b""
            writer.close()
            server.close()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()

    run(main())


@pytest.mark.usefixtures("way")
def test_calls_small_and_large_parked_and_given_up(run: Run) -> None:
    async def main() -> None:
        server = RpcServer(name="server")
        parked: list[asyncio.Future[Number]] = []

        def park(request: Number, frames: Any) -> asyncio.Future[Number]:
            parked.append(asyncio.get_running_loop().create_future())
            return parked[-1]

        server.route_now("echo", Number, lambda request, frames: (request, frames))
        server.route_now("park", Number, park)
        client = RpcClient(name="client", resolve=await server.start())
        large = np.random.default_rng(0).integers(0, 255, 9_000_000, np.uint8)
        sizes = [[], [b"small"], [large.data], [b"small", large.data, large[:100_000].data]]
        calls = [client.call_frames("echo", Number(value=0), Number, timeout=20, frames=frames) for frames in sizes * 3]
        for (_, came), frames in zip(await asyncio.gather(*calls), sizes * 3, strict=True):
            assert [bytes(frame) for frame in came] == [bytes(frame) for frame in frames]
        with pytest.raises(DeadlineExceeded):
            await client.call("park", Number(value=1), Number, timeout=0.05)
        async with asyncio.timeout(10):
            await asyncio.wait(parked)
        assert parked[0].cancelled()
        await client.close()
        await server.close()

    run(main())
