"""A queue and a catalogue, real and in this process, and trainers around them, here or in processes of their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rank_process import FORKS

from asyncflow.flow.schedule import Schedule
from asyncflow.identity import Version
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.messages import Samples, Tag, TaskSpec
from asyncflow.queue.storage.unit import StorageUnit
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Directives, Member, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.batch import COLUMNS
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.ranks import GatherService, HostProcessGroup, ProcessGroup, SingleProcess
from asyncflow.training.report import TrainReport
from asyncflow.training.settings import TrainerSettings
from asyncflow.training.trainer import Trainer
from asyncflow.weights.host_transport import HostTransport
from asyncflow.weights.sender import WeightSender
from asyncflow.weights.service import CatalogueService

PARTITION = "job"
GROUPS, SIZE = 3, 2
UNITS = 2


@dataclass
class Places:
    """Addresses that a process must know to take part."""

    controller: str
    units: list[str]
    driver: str
    folder: str

    def queue(self, worker: str) -> QueueClient:
        return QueueClient(
            find=lambda role, index: self.controller if role == "controller" else self.units[index],
            units=lambda: range(len(self.units)),
            worker=worker,
        )


@dataclass
class Talk:
    """The reports of a trainer to its driver, and the driver's directives to it."""

    reports: list[TrainReport] = field(default_factory=list)
    directives: Directives = field(default_factory=Directives)


@dataclass
class JoinedTrainer:
    """A trainer that has joined its job, with what it holds open."""

    trainer: Trainer
    sender: WeightSender
    membership: Membership
    queue: QueueClient
    talk: Talk

    async def run(self) -> int:
        try:
            return await self.trainer.run()
        finally:
            await self.sender.close()
            await self.membership.close()
            await self.queue.close()


async def join_trainer(
    places: Places,
    backend: Callable[[ProcessGroup], TrainerBackend],
    *,
    attempt: int,
    group: ProcessGroup | None = None,
    schedule: Schedule,
    model: Path = Path(),
    slot_tokens: int = 64,
    checkpoint_every: int = 2,
    checkpoint_evaluated: bool = False,
    whole: bool = False,
    epochs: int = 1,
    mini_batches: int = 1,
    announced: Callable[[float], None] = lambda _: None,
    checkpoints: str = "checkpoints",
) -> JoinedTrainer:
    group = group or SingleProcess()
    worker = f"trainer-{group.rank}-{attempt}"
    member = Member(role="trainer", index=group.rank, attempt=attempt, incarnation=worker)
    membership = Membership(driver=places.driver, member=member)
    await membership.join(30)
    sender = WeightSender(
        membership=membership,
        worker=worker,
        transport=HostTransport(name=worker),
        part=group.rank,
        parts=group.world,
    )
    await sender.start()
    queue = places.queue(worker)

    talk = Talk()

    async def report(said: TrainReport) -> None:
        talk.reports.append(said)

    made = backend(group)
    made.slot_tokens = slot_tokens
    trainer = Trainer(
        queue=queue,
        sender=sender,
        backend=made,
        group=group,
        checkpoints=Checkpoints(Path(places.folder) / checkpoints),
        report=report,
        directives=lambda: talk.directives,
        settings=TrainerSettings(
            schedule=schedule,
            partition=PARTITION,
            attempt=attempt,
            whole=whole,
            epochs=epochs,
            mini_batches=mini_batches,
            decided=made.settings.loss.algorithm.writes,
            checkpoint_every=checkpoint_every,
            checkpoint_evaluated=checkpoint_evaluated,
            patience_s=20,
        ),
        folder=model,
        materialise=lambda: None,
        announced=announced,
    )
    return JoinedTrainer(trainer, sender, membership, queue, talk)


class World:
    """Controller, units and catalogue. ``async with World(folder) as world``."""

    def __init__(self, folder: Path, *, whole: bool = False) -> None:
        self.folder = folder
        self.whole = whole
        self.controller = Controller(ledger_dir=folder / "ledger")
        self.server = RpcServer(name="driver")

    async def __aenter__(self) -> World:
        self.directory = Directory()
        self.directory.attach(self.server)
        self.catalogue = CatalogueService(self.server, directory=self.directory).catalogue
        address = await self.controller.start()
        self.units = [StorageUnit(index=i, limit_bytes=1 << 24, controller=address) for i in range(UNITS)]
        self.places = Places(
            controller=address,
            units=[await unit.start() for unit in self.units],
            driver=await self.server.start(),
            folder=str(self.folder),
        )
        self.queue = self.places.queue("test")
        order = "key" if self.whole else "fifo"
        task = TaskSpec(
            partition=PARTITION, name="train", needs=[*COLUMNS, "advantage"], kind="gang", groups=True, order=order
        )
        await self.queue.declare([task], timeout=10)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.queue.close()
        for unit in self.units:
            await unit.close()
        await self.controller.close()
        await self.directory.close()
        await self.server.close()

    async def dispatch(self, first: int, last: int, *, shuffled: int | None = None) -> None:
        """Create the samples of steps, complete at once; a row's content is a function of its key."""
        groups = [(step, (step - 1) * GROUPS + g) for step in range(first, last + 1) for g in range(GROUPS)]
        for step in range(first, last + 1):
            await self.queue.open_step(partition=PARTITION, step=step, groups=GROUPS, group_size=SIZE, timeout=10)
        if shuffled is not None:
            np.random.default_rng(shuffled).shuffle(groups)
        for step, serial in groups:
            assert all(await self.put(int(serial), step=int(step)))

    async def put(self, serial: int, *, step: int) -> list[bool]:
        """Put the samples of a prompt; return whether each is new."""
        samples, tags, columns = group_rows(serial, step=step)
        put = await self.queue.put(PARTITION, columns, tags=tags, group_size=SIZE, samples=samples, timeout=10)
        return put.new

    def published(self, attempt: int, steps: int) -> list[int]:
        found = (self.catalogue.find(step) for step in range(steps + 1))
        return [version.step for version in found if version is not None and version.attempt == attempt]


def group_rows(serial: int, *, step: int) -> tuple[Samples, list[dict[str, Tag]], dict[str, Jagged]]:
    rng = np.random.default_rng(serial)
    prompt = rng.integers(0, 64, rng.integers(2, 6))
    lengths = rng.integers(1, 9, SIZE).tolist()
    samples = Samples(serials=[serial], step=step, tokens=[len(prompt)] * SIZE)
    tags: list[dict[str, Tag]] = [{"tokens": lengths[j]} for j in range(SIZE)]
    made_by = Version(0, max(0, step - 2)).packed
    columns = {
        "prompt_ids": Jagged.from_rows([prompt] * SIZE, "int32"),
        "response_ids": Jagged.from_rows([rng.integers(0, 64, n) for n in lengths], "int32"),
        "logprobs": Jagged.from_rows([rng.normal(-4, 0.2, n) for n in lengths], "float32"),
        "versions": Jagged.from_rows([np.full(n, made_by) for n in lengths], "int64"),
        "reward": Jagged.from_rows([[1.0], [0.0]], "float32"),
        "advantage": Jagged.from_rows([[0.5], [-0.5]], "float32"),
        "outcome": Jagged.from_rows([[1.0], [0.0]], "float32"),
    }
    return samples, tags, columns


def training(*, steps: int, **more: Any) -> Callable[[ProcessGroup], TrainerBackend]:
    from asyncflow.training.settings import BackendSettings, OptimizerSettings
    from asyncflow.training.torch.backend import TorchBackend

    optimizer = OptimizerSettings(learning_rate=1e-3, steps=steps, epsilon=1e-2)
    settings = BackendSettings(optimizer=optimizer, threads=1, **more)
    return lambda group: TorchBackend(settings, group=group)


def counting(*, steps: int, sleep_s: float = 0.0) -> Callable[[ProcessGroup], TrainerBackend]:
    from asyncflow.training.counting import CountingBackend
    from asyncflow.training.settings import BackendSettings, OptimizerSettings

    options = {"capacity": steps * GROUPS * SIZE, "sleep_s": sleep_s}
    settings = BackendSettings(
        optimizer=OptimizerSettings(learning_rate=1, steps=steps), group_size=SIZE, options=options
    )
    return lambda group: CountingBackend(settings, group=group)


class Process:
    """A trainer rank in a process of its own; it counts, or trains the model in the folder ``model``.

    ``FOLDER/ended-ATTEMPT-RANK`` says which step was its last. private: ranks other than 0 do not see its checkpoints.
    """

    def __init__(
        self,
        places: Places,
        *,
        attempt: int,
        steps: int,
        rank: int = 0,
        world: int = 1,
        sleep_s: float = 0.01,
        model: Path | None = None,
        checkpoint_every: int | None = None,
        epochs: int = 1,
        private: bool = False,
    ) -> None:
        told = {
            "epochs": epochs,
            "model": model,
            "places": places,
            "attempt": attempt,
            "steps": steps,
            "rank": rank,
            "world": world,
            "sleep_s": sleep_s,
            "checkpoints": f"checkpoints-{rank}" if private and rank else "checkpoints",
            "checkpoint_every": (0 if model else 2) if checkpoint_every is None else checkpoint_every,
        }
        self.process = FORKS.Process(target=_in_process, args=(told,))
        self.process.start()

    async def ended(self, timeout: float) -> int | None:
        """Return the exit status, or None if it still runs after ``timeout`` seconds."""
        await asyncio.to_thread(self.process.join, timeout)
        return self.process.exitcode


def _in_process(told: dict[str, Any]) -> None:
    sys.exit(asyncio.run(_one_rank(told)))


async def _one_rank(told: dict[str, Any]) -> int:
    places, attempt, steps = told["places"], told["attempt"], told["steps"]
    group: ProcessGroup = SingleProcess()
    address = Path(places.folder) / f"leader-{attempt}"
    server = RpcServer(name="trainer")
    if told["world"] > 1:
        if told["rank"] == 0:
            GatherService(attempt=attempt, world=told["world"], progress_s=1).attach(server)
            draft = address.with_suffix(".draft")
            draft.write_text(await server.start())
            draft.rename(address)
        group = HostProcessGroup(
            rank=told["rank"],
            world=told["world"],
            attempt=attempt,
            leader=lambda: address.read_text() if address.exists() else None,
            loop=asyncio.get_running_loop(),
            patience_s=20,
        )
    schedule = Schedule(steps=steps, lag=1, exact=True)
    backend = training(steps=steps) if told["model"] else counting(steps=steps, sleep_s=told["sleep_s"])
    joined = await join_trainer(
        places,
        backend,
        attempt=attempt,
        group=group,
        schedule=schedule,
        model=told["model"] or Path(),
        epochs=told["epochs"],
        mini_batches=min(told["epochs"], GROUPS),
        slot_tokens=16,
        checkpoint_every=told["checkpoint_every"],
        checkpoints=told["checkpoints"],
    )
    asyncio.get_running_loop().add_signal_handler(15, joined.trainer.leave)
    step = await joined.run()
    ended = address.with_name(f"ended-{attempt}-{told['rank']}")
    ended.write_text(str(step))
    await group.close()
    await asyncio.sleep(0.3 if told["world"] > 1 else 0)
    return 0 if step == steps else 3
