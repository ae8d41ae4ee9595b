"""The critic as a role of its own: what the ranks of a trainer, and the critic's process, say to each other.

    meet       are all there, and where do several replicas meet: at the first of them
    load       the state of a checkpoint, or the weights of the model: only then the other calls are answered
    values     of the states in which response tokens were chosen, by the critic as it was before the step
    learn      a batch with its values and returns: its gradient is added, while the trainer computes the policy's
    settle     the figures of what was learned, and the norm of the gradient, which is of all replicas then
    update     a step of the critic's optimizer, or none where the policy makes none either
    copy, write   the state, aside, and then into the folder of the checkpoint that the trainer writes

Invariants: the critic belongs to the gang of the trainer: it moves with the policy, its state of step k is in
checkpoint k, and both begin anew from the same one. A call of another attempt than that which loaded it is refused, so
a trainer whose critic was started again ends, and goes on from its checkpoint. What a rank has learned or forgotten
counts once, however often its call comes. Calls are carried out in their order, by one thread. Replicas have the same
weights: each learns what its ranks send, and all make the same update of the sum of their gradients.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from asyncflow.api.names import LOSS_MASK
from asyncflow.errors import DiskError, ManifestError, PeerLost, ProtocolError, Refused
from asyncflow.identity import SampleKey
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import BatchHeader, Jagged, decode_batch, encode_batch
from asyncflow.rpc.framing import MAX_MESSAGE
from asyncflow.rpc.retry import retry
from asyncflow.rpc.server import RpcServer
from asyncflow.rpc.tls import Credentials
from asyncflow.telemetry.metrics import BusyClock
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.timeline.tracks import Kind
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import Checkpoints

T = TypeVar("T")
CRITIC_FILE: Final = "critic-model.safetensors"
CRITIC_STATE_FILE: Final = "critic-optimizer.safetensors"
"""Files of a checkpoint with the critic, wherever that is."""
NORM: Final = "critic_norm"
"""The figure of the gradient's norm."""
_VALUES: Final = "values"
_SPANS: Final[Mapping[str, Kind]] = {
    "load": "starting",
    "values": "forward",
    "learn": "compute",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
}
"""How what the critic is busy with is recorded."""


class LoadCritic(msgspec.Struct, frozen=True, kw_only=True):
    """Begin with the checkpoint of that name, "" for the model, at the word of an attempt of the trainer.

    world: the number of replicas; host, port: where they meet, if there are several.
    """

    attempt: int
    checkpoint: str
    world: int = 1
    host: str = ""
    port: int = 0


class CriticBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a rank. number: of what the rank has the critic learn, 0 where that is nothing; header: its columns.

    None to forget what was learned since the last update.
    """

    attempt: int
    rank: int
    number: int = 0
    header: BatchHeader | None = None


class CriticOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order of rank 0. step, number: of the update; divisor, moves: see ``CriticModel.update``; folder: to write to,
    in that of the checkpoints.
    """

    attempt: int
    step: int = 0
    number: int = 0
    divisor: float = 1.0
    moves: bool = True
    folder: str = ""


class CriticReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. header: of its columns; sums: figures by name; files: what was written; host, port: to meet at."""

    header: BatchHeader | None = None
    sums: dict[str, float] = {}
    files: list[str] = []
    host: str = ""
    port: int = 0


class Meeting(NamedTuple):
    """The place where the replicas of a critic meet. listener: the socket at host and port, which rank 0 brings."""

    rank: int
    world: int
    host: str
    port: int
    listener: socket.socket | None


class CriticModel(Protocol):
    """The critic of one process. All methods block, and are called from one thread. files: what ``copy`` writes."""

    files: tuple[str, ...]

    def load(self, checkpoint: Path | None, meeting: Meeting | None = None) -> None:
        """Take the state of a checkpoint, None for the weights of the model.

        meeting: with the other replicas, whose gradients ``settle`` adds up; blocks until all have come.
        """

    def values(self, batch: MicroBatch) -> Jagged:
        """Return the value of the state in which each response token was chosen; 0 where it does not count."""
        ...

    def learn(self, batch: MicroBatch) -> None:
        """Add the gradient of a batch that has values and returns."""

    def forget(self) -> None:
        """Forget the gradient and the figures since the last update."""

    def settle(self) -> dict[str, float]:
        """Return the sums of this replica's figures since the last update, and ``critic_norm``, the norm of the sum of
        all replicas' gradients; the same again until something is learned. Collective. Raises PeerLost.
        """
        ...

    def update(self, step: int, *, divisor: float, moves: bool) -> None:
        """Make one step of the gradient divided by ``divisor``; only forget it unless it ``moves``."""

    def copy(self) -> Callable[[Path], None]:
        """Return what writes the state as it is now into a folder, in another thread."""
        ...


_Answer: TypeAlias = tuple[CriticReply, list[memoryview]]


class CriticLink:
    """The critic as one rank of a trainer calls it, from the threads that compute and write, never the event loop's.

    find: gives the address of a replica, None while there is none; replicas: their number; loop: runs the calls;
    patience_s: how long the critic may take to come up, or to carry out a call. A rank's samples go to one replica;
    rank 0 gives its orders to all of them at once.
    """

    def __init__(
        self,
        *,
        rank: int,
        attempt: int,
        find: Callable[[int], str | None],
        loop: asyncio.AbstractEventLoop,
        replicas: int = 1,
        credentials: Credentials | None = None,
        patience_s: float = 600.0,
    ) -> None:
        self._rank = rank
        self._attempt = attempt
        self._clients = [
            RpcClient(
                name=f"trainer-{rank}", resolve=partial(find, replica), credentials=credentials, expects=("critic",)
            )
            for replica in range(replicas)
        ]
        self._own = rank % replicas
        self._loop = loop
        self._patience_s = patience_s
        self._numbers = self._updates = 0

    def load(self, checkpoint: Path | None) -> None:
        """Have the critic begin where the trainer does; rank 0 alone. Waits until it is there.

        Raises ManifestError where it does not see the checkpoints, CheckpointError where none of it fits.
        """
        name, world = "" if checkpoint is None else checkpoint.name, len(self._clients)

        async def begin() -> None:
            """Once, for all replicas: where one is lost meanwhile, none has begun."""
            place = CriticReply()
            if world > 1:
                place, *_ = await self._all(self._once, "critic.meet", CriticOrder(attempt=self._attempt))
            order = LoadCritic(attempt=self._attempt, checkpoint=name, world=world, host=place.host, port=place.port)
            await self._all(self._once, "critic.load", order)

        self._wait(retry(begin, what="asking for the critic to begin", timeout=self._patience_s))

    def values(self, batch: MicroBatch) -> Jagged:
        """See ``CriticModel``."""
        header, frames = _encoded(batch, learns=False)
        asked = CriticBatch(attempt=self._attempt, rank=self._rank, header=header)
        reply, found = self._ask(self._own, "critic.values", asked, what="values of the critic", frames=frames)
        columns = _decoded(reply.header, found)
        if _VALUES not in columns or not np.array_equal(columns[_VALUES].lengths, batch.responses.lengths):
            raise ProtocolError("the values of the critic are not one a response token", where="critic.values")
        return columns[_VALUES]

    def learn(self, batch: MicroBatch) -> None:
        """Have the critic learn a batch with values and returns; returns before it has."""
        header, frames = _encoded(batch, learns=True)
        self._teach(header, frames)

    def forget(self) -> None:
        """Have the critic forget what it learned since the last update."""
        self._teach(None, [])

    def settle(self, step: int) -> dict[str, float]:
        """See ``CriticModel``; what all ranks had it learn is in it."""
        order = CriticOrder(attempt=self._attempt, step=step)
        what = f"what the critic has learned in step {step}"
        told = self._order("critic.settle", order, what=what)
        sums: defaultdict[str, float] = defaultdict(float)
        for reply in told:
            for name, value in reply.sums.items():
                sums[name] = value if name == NORM else sums[name] + value
        return dict(sums)

    def update(self, step: int, *, divisor: float, moves: bool) -> None:
        """See ``CriticModel``; returns before it is done."""
        self._updates += 1
        order = CriticOrder(attempt=self._attempt, step=step, number=self._updates, divisor=divisor, moves=moves)
        self._order("critic.update", order, what=f"step {step} of the critic")

    def copy(self) -> None:
        """Have the critic set its state aside; one at a time, until ``write``."""
        self._ask(0, "critic.copy", CriticOrder(attempt=self._attempt), what="the critic to set its state aside")

    def write(self, folder: Path) -> None:
        """Have what was set aside written into ``folder``, a checkpoint's. Raises DiskError where it is not there."""
        order = CriticOrder(attempt=self._attempt, folder=folder.name)
        written = self._ask(0, "critic.write", order, what="the critic to write its state")[0].files
        if absent := [name for name in written if not (folder / name).is_file()]:
            raise DiskError(f"the critic has written {', '.join(absent)} elsewhere", where=str(folder))

    async def close(self) -> None:
        """Hang up."""
        for client in self._clients:
            await client.close()

    def _teach(self, header: BatchHeader | None, frames: Sequence[Any]) -> None:
        self._numbers += 1
        asked = CriticBatch(attempt=self._attempt, rank=self._rank, number=self._numbers, header=header)
        self._ask(self._own, "critic.learn", asked, what="the critic to learn", frames=frames)

    def _ask(
        self, replica: int, method: str, request: msgspec.Struct, *, what: str, frames: Sequence[Any] = ()
    ) -> _Answer:
        return self._wait(self._again(what, replica, method, request, frames=frames))

    def _order(self, method: str, order: msgspec.Struct, *, what: str) -> list[CriticReply]:
        """Send an order to all replicas, and wait until all have carried it out."""
        return self._wait(self._all(partial(self._again, what), method, order))

    async def _all(
        self,
        send: Callable[[int, str, msgspec.Struct], Coroutine[Any, Any, _Answer]],
        method: str,
        order: msgspec.Struct,
    ) -> list[CriticReply]:
        try:
            async with asyncio.TaskGroup() as calls:
                tasks = [calls.create_task(send(replica, method, order)) for replica in range(len(self._clients))]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result()[0] for task in tasks]

    async def _again(
        self, what: str, replica: int, method: str, request: msgspec.Struct, *, frames: Sequence[Any] = ()
    ) -> _Answer:
        attempt = partial(self._once, replica, method, request, frames=frames)
        return await retry(attempt, what=f"asking for {what}", timeout=self._patience_s)

    async def _once(self, replica: int, method: str, request: msgspec.Struct, *, frames: Sequence[Any] = ()) -> _Answer:
        client = self._clients[replica]
        return await client.call_frames(method, request, CriticReply, timeout=self._patience_s, frames=frames)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class CriticService:
    """Answers the calls of a trainer. model: made by ``make`` in its thread; checkpoints: their folder; rank, host: of
    this process among replicas; spans: records what it does.

    busy: values, learn, optimizer, checkpoint.
    """

    def __init__(
        self,
        make: Callable[[], CriticModel],
        *,
        checkpoints: Path,
        rank: int = 0,
        host: str = "127.0.0.1",
        spans: Spans = NO_SPANS,
    ) -> None:
        self.busy = BusyClock()
        self._spans = spans
        self.step = 0
        self._make = make
        self._checkpoints = checkpoints
        self._rank = rank
        self._host = host
        self._listener: socket.socket | None = None
        self._model: CriticModel | None = None
        self._attempt = -1
        self._learned: dict[int, int] = {}
        self._updates = 0
        self._late: list[Future[None]] = []
        self._kept: Callable[[Path], None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def attach(self, server: RpcServer) -> None:
        """Answer the calls there."""
        server.route("critic.meet", CriticOrder, self._on_meet)
        server.route("critic.load", LoadCritic, self._on_load)
        server.route("critic.values", CriticBatch, self._on_values)
        server.route("critic.learn", CriticBatch, self._on_learn)
        server.route("critic.settle", CriticOrder, self._on_settle)
        server.route("critic.update", CriticOrder, self._on_update)
        server.route("critic.copy", CriticOrder, self._on_copy)
        server.route("critic.write", CriticOrder, self._on_write)

    def close(self) -> None:
        """End the threads; what has not begun is not done."""
        if self._listener is not None:
            self._listener.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)

    async def _on_meet(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        self._newest(order.attempt)
        if self._rank:
            return CriticReply()
        if self._listener is not None:
            self._listener.close()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family)
        return CriticReply(host=self._host, port=self._listener.getsockname()[1])

    def _newest(self, attempt: int) -> None:
        if attempt < self._attempt:
            raise Refused(f"attempt {attempt} of the trainer was replaced by attempt {self._attempt}")

    async def _on_load(self, order: LoadCritic, _frames: Sequence[memoryview]) -> CriticReply:
        self._newest(order.attempt)
        listener, self._listener = self._listener, None
        meeting = Meeting(self._rank, order.world, order.host, order.port, listener) if order.world > 1 else None
        await self._do("load", self._load, order, meeting)
        return CriticReply()

    def _load(self, order: LoadCritic, meeting: Meeting | None) -> None:
        seen = Checkpoints(self._checkpoints).newest_attempt()
        if seen != order.attempt:
            what = f"the critic sees the checkpoints of attempt {seen} of the trainer, which is attempt {order.attempt}"
            hint = "Both need one folder: a claim with accessMode ReadWriteMany (spec.storage.checkpoints)"
            raise ManifestError(what, where=str(self._checkpoints), hint=hint)
        self._model = self._model or self._make()
        self._model.load(self._checkpoint(order.checkpoint) if order.checkpoint else None, meeting)
        self._attempt, self._learned, self._updates, self._late, self._kept = order.attempt, {}, 0, [], None

    async def _on_values(self, asked: CriticBatch, frames: Sequence[memoryview]) -> tuple[CriticReply, Sequence[Any]]:
        model, batch = self._of(asked.attempt), _read(asked, frames)
        found = await self._do("values", model.values, batch)
        header, made = encode_batch({_VALUES: found})
        return CriticReply(header=header), made

    async def _on_learn(self, asked: CriticBatch, frames: Sequence[memoryview]) -> CriticReply:
        model = self._of(asked.attempt)
        if asked.number > self._learned.get(asked.rank, 0):
            self._learned[asked.rank] = asked.number
            if asked.header is None:
                self._later("learn", model.forget)
            else:
                self._later("learn", model.learn, _read(asked, frames))
        return CriticReply()

    async def _on_settle(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        return CriticReply(sums=await self._do("learn", self._of(order.attempt).settle))

    async def _on_update(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        model = self._of(order.attempt)
        if order.number > self._updates:
            self._updates, self.step = order.number, order.step
            self._later("optimizer", lambda: model.update(order.step, divisor=order.divisor, moves=order.moves))
        return CriticReply()

    async def _on_copy(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        self._kept = await self._do("checkpoint", self._of(order.attempt).copy)
        return CriticReply()

    async def _on_write(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        model = self._of(order.attempt)
        if self._kept is None:
            raise Refused(f"nothing was set aside that could be written to {order.folder!r}")
        write, folder = self._kept, self._checkpoint(order.folder)
        await asyncio.get_running_loop().run_in_executor(self._writer, write, folder)
        return CriticReply(files=list(model.files))

    def _checkpoint(self, name: str) -> Path:
        """Return the folder of the checkpoint ``name``. Raises Refused for a name that leads elsewhere."""
        if name in ("", "..") or Path(name).name != name:
            raise Refused(f"{name!r} is not the name of a checkpoint", where="critic")
        return self._checkpoints / name

    def _of(self, attempt: int) -> CriticModel:
        """Return the model. Raises Refused for a call of another attempt than that which it began with."""
        if self._model is None or attempt != self._attempt:
            hint = "The trainer begins again from its checkpoint"
            raise Refused(f"the critic has not begun with attempt {attempt} of the trainer", where="critic", hint=hint)
        return self._model

    async def _do(self, cause: str, work: Callable[..., T], *given: Any) -> T:
        """Do ``work`` behind all that was begun before. Raises what that raised, and what ``work`` raises.

        What was begun and has failed is raised again and again, until a ``load`` begins anew.
        """
        late = [] if cause == "load" else list(self._late)

        def run() -> T:
            for one in late:
                one.result()
            with self._counted(cause):
                return work(*given)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except PeerLost:
            self._attempt = -1  # replicas may differ now: the trainer begins anew, and they with it
            raise

    @contextmanager
    def _counted(self, cause: str) -> Iterator[None]:
        with self.busy(cause), self._spans.main(_SPANS[cause]):
            yield

    def _later(self, cause: str, work: Callable[..., None], *given: Any) -> None:
        """Begin ``work`` behind all that was begun before; what it raises, the next ``_do`` does."""

        def run() -> None:
            with self._counted(cause):
                work(*given)

        self._late = [one for one in self._late if not one.done() or one.exception() is not None]
        self._late.append(self._thread.submit(run))


def _encoded(batch: MicroBatch, *, learns: bool) -> tuple[BatchHeader, list[Any]]:
    """Return the columns of a batch that the critic needs, with values and returns where it ``learns``."""
    columns = {
        "key": Jagged.from_rows([tuple(key) for key in batch.keys], np.int64),
        "prompt_ids": batch.prompts,
        "response_ids": batch.responses,
    }
    if batch.loss_mask is not None:
        columns[LOSS_MASK] = batch.loss_mask
    if learns:
        assert batch.values is not None
        assert batch.returns is not None
        columns |= {_VALUES: batch.values, "returns": batch.returns}
    return encode_batch(columns)


def _decoded(header: BatchHeader | None, frames: Sequence[Any]) -> Mapping[str, Jagged]:
    if header is None:
        raise ProtocolError("a batch for the critic has no columns", where="critic")
    return decode_batch(header, frames, max_bytes=MAX_MESSAGE)


def _read(asked: CriticBatch, frames: Sequence[memoryview]) -> MicroBatch:
    """Return the samples of a call. Raises ProtocolError where its columns are not those of samples."""
    columns = _decoded(asked.header, frames)
    with suppress(KeyError, ValueError):
        keys = [SampleKey(*map(int, row)) for row in columns["key"].rows()]
        lengths = columns["response_ids"].lengths
        of_tokens = [columns[name] for name in (LOSS_MASK, _VALUES, "returns") if name in columns]
        if all((column.lengths == lengths).all() for column in of_tokens):
            empty = MicroBatch.empty()
            return MicroBatch(
                keys=keys,
                prompts=columns["prompt_ids"],
                responses=columns["response_ids"],
                logprobs=empty.logprobs,
                versions=empty.versions,
                loss_mask=columns.get(LOSS_MASK),
                values=columns.get(_VALUES),
                returns=columns.get("returns"),
            )
    raise ProtocolError(f"columns {sorted(columns)} are not those of samples for the critic", where="critic")
