"""Permits of a staggered update over real sockets: who waits is woken, and whoever vanishes keeps nobody waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from asyncflow.errors import DeadlineExceeded, PeerLost, Refused
from asyncflow.flow.stagger import Permits, Supply
from asyncflow.identity import Version
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member
from asyncflow.rpc.server import RpcServer
from asyncflow.weights import permits as module
from asyncflow.weights.permits import PermitService, SwapPermits


class Link:
    """The part of a membership that a worker's permits need."""

    def __init__(self, driver: RpcClient) -> None:
        self.driver = driver


class Driver:
    """A driver of which nothing is there but permits. supply: what it knows; at most ``most`` permits at once."""

    def __init__(self, *, most: int) -> None:
        self.supply = Supply(rates={}, need=0.0, ready=0, version_s=None)
        self.most = most
        self.address = "tcp://127.0.0.1:*"
        self.workers: list[str] = []
        self.server: RpcServer
        self.directory: Directory
        self.service: PermitService

    async def start(self) -> None:
        self.server, self.directory = RpcServer(name="driver", bind=self.address), Directory()
        self.service = PermitService(
            self.server, directory=self.directory, permits=Permits(most=self.most), supply=lambda: self.supply
        )
        self.address = await self.server.start()
        for index, name in enumerate(self.workers):
            self.directory.register(Member(role="rollout", index=index, incarnation=name))

    def join(self, name: str) -> None:
        self.directory.register(Member(role="rollout", index=len(self.workers), incarnation=name))
        self.workers.append(name)

    def leave(self, name: str) -> None:
        self.directory.leave(name, "it ended")


@pytest.fixture
async def driver() -> AsyncIterator[Driver]:
    made = Driver(most=1)
    await made.start()
    yield made
    await made.server.close()


@pytest.fixture
async def worker(driver: Driver) -> AsyncIterator[Callable[..., SwapPermits]]:
    async with contextlib.AsyncExitStack() as stack:

        def made(name: str, **fleet: Any) -> SwapPermits:
            driver.join(name)
            client = RpcClient(name=name, resolve=driver.address)
            stack.push_async_callback(client.close)
            return SwapPermits(membership=Link(client), worker=name, **fleet)  # type: ignore[arg-type]

        yield made


class Turn:
    """One permit of a worker, in a task of its own, from ``begun`` until ``over`` is set."""

    def __init__(self, permits: SwapPermits, version: int) -> None:
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._run(permits, Version(0, version)))

    async def _run(self, permits: SwapPermits, version: Version) -> None:
        async with permits.permit(version):
            self.begun.set()
            await self.over.wait()

    async def end(self) -> None:
        self.over.set()
        await self.task


async def test_one_after_another_the_oldest_version_first(
    driver: Driver, worker: Callable[..., SwapPermits], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=module.__name__)
    async with asyncio.timeout(20):
        first = Turn(worker("a"), 5)
        await first.begun.wait()
        waiting = {name: Turn(worker(name), version) for name, version in (("b", 5), ("c", 3), ("d", 4))}
        while len(driver.service._rollouts.asking) < 3:
            await asyncio.sleep(0.01)
        last = first
        for name in ("c", "d", "b"):
            assert not any(permit.begun.is_set() for other, permit in waiting.items() if other != name)
            await last.end()
            last = waiting.pop(name)
            await last.begun.wait()
        await last.end()
    assert driver.service._rollouts.permits.granted == frozenset()
    assert caplog.messages == [], "each rollout has a line of each change in its own log"


async def test_who_vanishes_or_gives_up_keeps_nobody_waiting(
    driver: Driver, worker: Callable[..., SwapPermits]
) -> None:
    async with asyncio.timeout(20):
        vanishes = Turn(worker("a"), 1)
        await vanishes.begun.wait()
        gives_up, waits = Turn(worker("b"), 1), Turn(worker("c"), 2)
        while len(driver.service._rollouts.asking) < 2:
            await asyncio.sleep(0.01)
        gives_up.task.cancel()
        while len(driver.service._rollouts.asking) > 1:
            await asyncio.sleep(0.01)
        vanishes.task.cancel()
        await asyncio.wait([vanishes.task, gives_up.task])
        assert not waits.begun.is_set(), "a permit lasts until it is said to be over"
        driver.leave("a")
        await waits.begun.wait()
        await waits.end()


async def test_a_request_that_comes_after_its_worker_has_left_keeps_nobody_waiting(
    driver: Driver, worker: Callable[..., SwapPermits]
) -> None:
    async with asyncio.timeout(20):
        late, waits = worker("a"), worker("b")
        driver.leave("a")
        with pytest.raises(PeerLost, match="a is not registered"):
            await late._driver.call(
                "weights.permit", module.PermitRequest(worker="a", version=1), module.PermitReply, timeout=5
            )
        turn = Turn(waits, 1)
        await turn.begun.wait()
        await turn.end()


async def test_a_driver_that_was_started_again_is_asked_again(
    driver: Driver, worker: Callable[..., SwapPermits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CALL_S", 1.0)
    async with asyncio.timeout(30):
        has, waits = Turn(worker("a"), 1), Turn(worker("b"), 2)
        await has.begun.wait()
        while not driver.service._rollouts.asking:
            await asyncio.sleep(0.01)
        await driver.server.close()
        await driver.start()
        await waits.begun.wait()
        await has.end()
        assert driver.service._rollouts.permits.granted == {"b"}, "the new driver knew of no permit of a"
        await waits.end()


async def test_the_end_of_a_permit_that_is_not_heard_at_first_is_said_again(
    driver: Driver, worker: Callable[..., SwapPermits]
) -> None:
    async with asyncio.timeout(20):
        permits = worker("a")
        has = Turn(permits, 1)
        await has.begun.wait()
        call, failures = permits._driver.call, iter([PeerLost("the line is cut"), DeadlineExceeded("no answer")])

        async def failing(*asked: Any, **how: Any) -> Any:
            if (error := next(failures, None)) is not None:
                raise error
            return await call(*asked, **how)

        permits._driver.call = failing  # type: ignore[method-assign]
        await has.end()
        assert driver.service._rollouts.permits.granted == frozenset()


async def test_who_is_not_granted_a_permit_in_time_asks_again(
    driver: Driver, worker: Callable[..., SwapPermits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAIT_S", 0.05)
    async with asyncio.timeout(20):
        has, waits = Turn(worker("a"), 1), Turn(worker("b"), 2)
        await has.begun.wait()
        seen = set()
        while len(seen) < 3:
            seen |= set(driver.service._rollouts.asking.values())
            await asyncio.sleep(0.01)
        await has.end()
        await waits.begun.wait()
        await waits.end()


async def test_followers_take_turns_by_their_fleet_and_need_none_of_the_jobs_permits(
    driver: Driver, worker: Callable[..., SwapPermits]
) -> None:
    async with asyncio.timeout(20):
        rollout = Turn(worker("rollout-0-a"), 1)
        await rollout.begun.wait()
        first, second, third = (Turn(worker(f"follower-{n}-a", fleet="a", stagger=9), 1) for n in range(3))
        other = Turn(worker("follower-7-b", fleet="b"), 1)
        await other.begun.wait()
        while driver.service._fleets["a"].members != {f"follower-{n}-a" for n in range(3)}:
            await asyncio.sleep(0.01)
        alone = [driver.service._fleets["a"].alone_s(f"follower-{n}-a") for n in range(3)]
        assert 0 < alone[0] == alone[1] < alone[2], "by themselves, too, no more than two at once"
        out = [turn for turn in (first, second, third) if turn.begun.is_set()]
        waits = next(turn for turn in (first, second, third) if not turn.begun.is_set())
        assert len(out) == 2, "however many may, one of the fleet goes on serving"
        await out[0].end()
        await waits.begun.wait()
        for turn in (rollout, other, out[1], waits):
            await turn.end()
        for name in ("follower-0-a", "follower-1-a", "follower-2-a", "follower-7-b"):
            driver.leave(name)
        assert not driver.service._fleets


async def test_a_follower_that_gets_no_answer_any_more_goes_on_by_itself_in_its_turn(
    driver: Driver, worker: Callable[..., SwapPermits], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WAIT_S", 0.05)
    monkeypatch.setattr(module, "_CALL_S", 0.5)
    monkeypatch.setattr(module, "_NO_REPLY_S", (1.0, 1.0))
    monkeypatch.setattr(module._Group, "alone_s", lambda group, name: 1.0)
    async with asyncio.timeout(20):
        has, waits = (Turn(worker(f"follower-{n}-a", fleet="a"), 1) for n in range(2))
        await has.begun.wait()
        while len(driver.service._fleets["a"].members) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await driver.server.close()
        assert not waits.begun.is_set()
        await waits.begun.wait()
        await waits.end()
        await has.end()


async def test_rollouts_of_a_job_that_is_not_staggered_are_granted_none() -> None:
    server, directory = RpcServer(name="driver"), Directory()
    PermitService(server, directory=directory)
    directory.register(Member(role="rollout", index=0, incarnation="rollout-0-a"))
    client = RpcClient(name="r", resolve=await server.start())
    request = module.PermitRequest(worker="rollout-0-a", version=1)
    try:
        with pytest.raises(Refused, match="change weights without permits"):
            await client.call("weights.permit", request, module.PermitReply, timeout=5)
    finally:
        await client.close()
        await server.close()
