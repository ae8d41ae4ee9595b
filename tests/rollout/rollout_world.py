"""A queue, a catalogue and a publisher over real sockets in one process, and rollouts that dial them."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from asyncflow.api.names import LOSS_MASK
from asyncflow.api.rewards import RewardSpec
from asyncflow.data.base import Prompt
from asyncflow.environments.pool import Environments
from asyncflow.flow.instance import Instance
from asyncflow.flow.stagger import Permits, Supply
from asyncflow.identity import NEWEST, Version
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.messages import LeasedRow, Samples, TaskSpec
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rollout.engines import open_engine
from asyncflow.rollout.job import RolloutSettings
from asyncflow.rollout.loading import Weights
from asyncflow.rollout.worker import RolloutWorker, next_version_of
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import RolloutMetrics
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.permits import PermitService, SwapPermits
from asyncflow.weights.receiver import WeightReceiver
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.service import CatalogueService

MADE = ("response_ids", "logprobs", "versions", "reward")
OF_TURNS = (*MADE, LOSS_MASK)
VOCAB = 97
CALL_S = 20.0


def word_tokenizer() -> Tokenizer:
    core = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    core.pre_tokenizer = WhitespaceSplit()
    return Tokenizer(core, eos_ids=[1], pad_id=1)


@dataclass
class Rollout:
    worker: RolloutWorker
    receiver: WeightReceiver
    instance: Instance
    queue: QueueClient
    running: asyncio.Task[None]

    async def leave(self) -> None:
        self.worker.drain()
        await self.running


@dataclass
class World:
    folder: Path
    lease_s: float = 20.0
    columns: tuple[str, ...] = MADE
    controller: Controller | None = None
    controller_address: str | None = None
    units: dict[int, StorageUnit] = field(default_factory=dict)
    unit_addresses: dict[int, str] = field(default_factory=dict)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    rollouts: list[Rollout] = field(default_factory=list)

    async def start(self) -> None:
        await self.start_controller()
        for index in range(2):
            await self.start_unit(index)
        self.driver = RpcServer(name="driver")
        directory = Directory()
        directory.attach(self.driver)
        self.stack.push_async_callback(directory.close)
        self.catalogue = CatalogueService(self.driver, directory=directory)
        self.permits = Permits(most=1)
        supply = Supply(rates={}, need=0.0, ready=0, version_s=None)
        PermitService(self.driver, directory=directory, permits=self.permits, supply=lambda: supply)
        self.driver_address = await self.driver.start()
        self.stack.push_async_callback(self.driver.close)
        self.queue = self.client("driver")
        self.sender = WeightSender(
            membership=await self.member("trainer"), worker="trainer", transport=HostTransport(name="trainer")
        )
        await self.sender.start()
        self.stack.push_async_callback(self.sender.close)
        tasks = [
            TaskSpec(
                partition=p,
                name="rollout",
                needs=["prompt_ids", "task"],
                writes=list(self.columns),
                groups=True,
                lease_s=self.lease_s,
            )
            for p in ("train", "eval")
        ]
        tasks += [TaskSpec(partition=p, name="read", needs=["prompt_ids", *self.columns]) for p in ("train", "eval")]
        await self.queue.declare(tasks, timeout=CALL_S)

    async def start_controller(self) -> None:
        self.controller = Controller(ledger_dir=self.folder / "ledger")
        self.controller_address = await self.controller.start()

    async def stop_controller(self) -> None:
        self.controller_address = None
        await self.controller.close()

    async def start_unit(self, index: int) -> None:
        unit = StorageUnit(index=index, limit_bytes=1 << 24, controller=lambda: self.controller_address)
        self.units[index] = unit
        self.unit_addresses[index] = await unit.start()

    async def stop_unit(self, index: int) -> None:
        del self.unit_addresses[index]
        await self.units.pop(index).close()

    def client(self, worker: str) -> QueueClient:
        client = QueueClient(
            find=lambda role, index: (
                self.controller_address if role == "controller" else self.unit_addresses.get(index)
            ),
            units=lambda: sorted(self.unit_addresses),
            worker=worker,
        )
        self.stack.push_async_callback(client.close)
        return client

    async def member(self, worker: str) -> Membership:
        place = Member(role="rollout", index=zlib.crc32(worker.encode()), incarnation=worker)
        membership = Membership(driver=self.driver_address, member=place)
        await membership.join(CALL_S)
        self.stack.push_async_callback(membership.close)
        return membership

    async def publish(self, step: int, weights: dict[str, np.ndarray] | None = None, *, attempt: int = 0) -> None:
        tensors = weights or {"step": np.full(64, step, np.float32)}
        await self.sender.publish(Version(attempt, step), tensors, timeout=CALL_S)

    async def put(
        self,
        serials: Sequence[int],
        *,
        step: int,
        oldest: int,
        newest: int | None = None,
        group: int = 4,
        purpose: str = "train",
        tags: dict[str, Any] | None = None,
    ) -> None:
        tasks = [np.frombuffer(Prompt(question=f"q{s}", answer=f"{s}").packed(), np.uint8) for s in serials]
        columns = {
            "prompt_ids": Jagged.from_rows([[2 + s % 50, 3, 4] for s in serials for _ in range(group)], np.int32),
            "task": Jagged.from_rows([task for task in tasks for _ in range(group)], np.uint8),
        }
        samples = Samples(
            serials=list(serials),
            step=step,
            purpose=purpose,
            oldest=oldest,
            newest=oldest if newest is None else newest,
        )
        own = [tags or {}] * (len(samples.serials) * group)
        put = await self.queue.put(purpose, columns, tags=own, group_size=group, samples=samples, timeout=CALL_S)
        assert all(put.new)

    async def made(self, count: int, *, purpose: str = "train") -> tuple[list[LeasedRow], dict[str, list[np.ndarray]]]:
        """Wait until ``count`` finished rows were read; rows in the order of keys, columns by name."""
        rows: list[LeasedRow] = []
        async with asyncio.timeout(30):
            while len(rows) < count:
                claimed = await self.queue.claim(partition=purpose, task="read", max_rows=1000, timeout=1.0)
                rows += claimed.rows
        rows.sort(key=lambda row: row.meta.key)
        columns = await self.queue.fetch(rows, self.columns, timeout=CALL_S)
        return rows, {name: [column.row(i) for i in range(len(rows))] for name, column in columns.items()}

    async def rollout(
        self,
        name: str,
        *,
        swap_at: str = "quota",
        slots: int = 8,
        reward: str = "rollout_reward:one",
        reward_s: float = 2.0,
        engine: str = "simulated",
        model: Path | None = None,
        max_tokens: int = 12,
        merge: Callable[[Weights], Weights] | None = None,
        staggered: bool = False,
        environment: Environments | None = None,
        stop_ids: tuple[int, ...] = (1,),
        **options: Any,
    ) -> Rollout:
        instance = Instance(swap_at=swap_at, slots=slots, staggered=staggered)
        queue = self.client(name)
        membership = await self.member(name)
        receiver = WeightReceiver(
            membership=membership, worker=name, transport=HostTransport(name=name), want=next_version_of(instance)
        )
        await receiver.start()
        self.stack.push_async_callback(receiver.close)
        settings = RolloutSettings(
            temperature=1.0,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            seed=7,
            group_sizes={"train": 4},
            lease_s=self.lease_s,
            call_s=2.0,
            load_s=5.0,
            drain_s=5.0,
            mixes=swap_at == "token",
            max_turns=1 if environment is None else 3,
        )
        generator = open_engine(engine, folder=model, slots=slots, max_length=64, options=options)
        await generator.start()
        self.stack.push_async_callback(generator.close)
        judged = RewardSpec(function=reward, timeout_seconds=reward_s)
        rewards = WeightedRewards.of(judged, workdir=Path(__file__).parent)
        await rewards.start()
        self.stack.push_async_callback(rewards.close)
        worker = RolloutWorker(
            queue=queue,
            receiver=receiver,
            engine=generator,
            rewards=rewards,
            tokenizer=word_tokenizer(),
            instance=instance,
            settings=settings,
            metrics=RolloutMetrics(),
            merge=merge,
            environment=environment,
            permits=SwapPermits(membership=membership, worker=name) if staggered else None,
        )
        running = asyncio.create_task(worker.run())
        rollout = Rollout(worker, receiver, instance, queue, running)
        self.rollouts.append(rollout)
        return rollout

    async def close(self) -> None:
        for rollout in self.rollouts:
            if not rollout.running.done():
                await rollout.leave()
        await self.stack.aclose()
        for unit in self.units.values():
            await unit.close()
        if self.controller_address is not None:
            await self.controller.close()


@contextlib.asynccontextmanager
async def running_world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    world = World(folder, **settings)
    await world.start()
    try:
        yield world
    finally:
        await world.close()


async def until(predicate: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not predicate():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited for: {what}") from None


ANY = NEWEST
