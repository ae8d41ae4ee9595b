"""The critic as a role of its own: the calls between the ranks of a trainer and the critic's processes.

    meet          check that all replicas are reachable, and return the first replica's address, where they meet
    load          load a checkpoint, or the weights of the model; no other call is answered before
    values        return the values of the states in which response tokens were chosen, by the critic before the step
    learn         add the gradient of a batch with values and returns, while the trainer computes the policy's gradient
    settle        return figures of the accumulated gradient, and its norm over all replicas
    update        make one step of the critic's optimizer, or none if the policy makes none
    copy, write   copy the state, then write the copy into the folder of the trainer's checkpoint and free it

Invariants: the critic belongs to the trainer's gang. It is updated together with the policy, checkpoint k contains its
state of step k, and both restart from the same checkpoint. A call of any attempt other than the one that loaded the
critic is refused, so a trainer whose critic was restarted ends and resumes from its checkpoint. A ``learn`` call of a
rank takes effect once, however often it is repeated. One thread executes the calls in order. Replicas have the same
weights: each learns from the samples of its ranks, and all make the same update with the sum of their gradients.
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
from asyncflow.telemetry.busy import BusyClock
from asyncflow.telemetry.spans import NO_SPANS, Spans
from asyncflow.timeline.tracks import Kind
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import Checkpoints

T = TypeVar("T")
CRITIC_FILE: Final = "critic-model.safetensors"
CRITIC_STATE_FILE: Final = "critic-optimizer.safetensors"
"""Files of a checkpoint with the critic, wherever the critic runs."""
NORM: Final = "critic_norm"
"""Name of the figure with the gradient's norm."""
_VALUES: Final = "values"
_SPANS: Final[Mapping[str, Kind]] = {
    "load": "starting",
    "values": "forward",
    "learn": "compute",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
}
"""Span kind of each cause of the critic's busy time."""


class LoadCritic(msgspec.Struct, frozen=True, kw_only=True):
    """A request to load the checkpoint of that name, or the model if it is "", for an attempt of the trainer.

    world: the number of replicas; host, port: their meeting point, if there are several.
    """

    attempt: int
    checkpoint: str
    world: int = 1
    host: str = ""
    port: int = 0


class CriticBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a rank. number: number of the rank's ``learn`` call, 0 for other calls; header: the columns, or None
    to discard the gradient since the last update.
    """

    attempt: int
    rank: int
    number: int = 0
    header: BatchHeader | None = None


class CriticOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A call of rank 0. step, number: of the update; divisor, moves: see ``CriticModel.update``; folder: name of the
    checkpoint folder to write to.
    """

    attempt: int
    step: int = 0
    number: int = 0
    divisor: float = 1.0
    moves: bool = True
    folder: str = ""


class CriticReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply. header: its columns; sums: figures by name; files: written files; host, port: the meeting point."""

    header: BatchHeader | None = None
    sums: dict[str, float] = {}
    files: list[str] = []
    host: str = ""
    port: int = 0


class Meeting(NamedTuple):
    """The meeting point of a critic's replicas. listener: rank 0's listening socket at host and port."""

    rank: int
    world: int
    host: str
    port: int
    listener: socket.socket | None


class CriticModel(Protocol):
    """The critic of one process. All methods block and are called from one thread. files: names of its files."""

    files: tuple[str, ...]

    def load(self, checkpoint: Path | None, meeting: Meeting | None = None) -> None:
        """Load a checkpoint, or the weights of the model if it is None.

        meeting: meeting point with the other replicas, whose gradients ``settle`` adds up; blocks until all have come.
        """

    def values(self, batch: MicroBatch) -> Jagged:
        """Return the value of the state in which each response token was chosen; 0 if the token does not count."""
        ...

    def learn(self, batch: MicroBatch) -> None:
        """Add the gradient of a batch that has values and returns."""

    def forget(self) -> None:
        """Discard the gradient and the figures since the last update."""

    def settle(self) -> dict[str, float]:
        """Return the sums of this replica's figures since the last update, and ``critic_norm``, the norm of the sum of
        all replicas' gradients. A repeated call returns the same until the next ``learn``. Collective. Raises PeerLost.
        """
        ...

    def update(self, step: int, *, divisor: float, moves: bool) -> None:
        """Make one optimizer step with the gradient divided by ``divisor``; if not ``moves``, only discard it."""

    def copy(self) -> Callable[[Path], None]:
        """Return a function that writes the current state into a folder and may run in another thread."""
        ...


_Answer: TypeAlias = tuple[CriticReply, list[memoryview]]


class CriticLink:
    """One rank's connection to the critic, for the threads that compute and write, never for the event loop.

    find: returns the address of a replica, None while it is unknown; replicas: number of replicas; loop: event loop
    that runs the calls; patience_s: time that the critic may take to start, or to answer a call. A rank's samples go to
    one replica; rank 0 calls all replicas at the same time.
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
        """Make the critic load the same checkpoint as the trainer, and wait until it has; for rank 0 alone.

        Raises ManifestError if the critic cannot read the checkpoints, CheckpointError if the checkpoint does not fit.
        """
        name, world = "" if checkpoint is None else checkpoint.name, len(self._clients)

        async def load() -> None:
            """Call all replicas once; if one is lost meanwhile, all calls are repeated."""
            meeting = CriticReply()
            if world > 1:
                meeting, *_ = await self._all(self._once, "critic.meet", CriticOrder(attempt=self._attempt))
            order = LoadCritic(
                attempt=self._attempt, checkpoint=name, world=world, host=meeting.host, port=meeting.port
            )
            await self._all(self._once, "critic.load", order)

        self._wait(retry(load, what="loading the critic", timeout=self._patience_s))

    def values(self, batch: MicroBatch) -> Jagged:
        """See ``CriticModel``."""
        header, frames = _encoded(batch, learns=False)
        request = CriticBatch(attempt=self._attempt, rank=self._rank, header=header)
        reply, found = self._call(self._own, "critic.values", request, what="values of the critic", frames=frames)
        columns = _decoded(reply.header, found)
        if _VALUES not in columns or not np.array_equal(columns[_VALUES].lengths, batch.responses.lengths):
            raise ProtocolError("the critic did not return one value per response token", where="critic.values")
        return columns[_VALUES]

    def learn(self, batch: MicroBatch) -> None:
        """Send a batch with values and returns to be learned; returns before the gradient is computed."""
        header, frames = _encoded(batch, learns=True)
        self._send_batch(header, frames)

    def forget(self) -> None:
        """Make the critic discard the gradient since the last update."""
        self._send_batch(None, [])

    def settle(self, step: int) -> dict[str, float]:
        """See ``CriticModel``; includes the batches of all ranks."""
        order = CriticOrder(attempt=self._attempt, step=step)
        replies = self._call_all("critic.settle", order, what=f"the critic's figures of step {step}")
        sums: defaultdict[str, float] = defaultdict(float)
        for reply in replies:
            for name, value in reply.sums.items():
                sums[name] = value if name == NORM else sums[name] + value
        return dict(sums)

    def update(self, step: int, *, divisor: float, moves: bool) -> None:
        """See ``CriticModel``; returns before the update is made."""
        self._updates += 1
        order = CriticOrder(attempt=self._attempt, step=step, number=self._updates, divisor=divisor, moves=moves)
        self._call_all("critic.update", order, what=f"step {step} of the critic")

    def copy(self) -> None:
        """Make the critic copy its state for the next ``write``; a new copy replaces the previous one."""
        self._call(0, "critic.copy", CriticOrder(attempt=self._attempt), what="a copy of the critic's state")

    def write(self, folder: Path) -> None:
        """Make the critic write its copy into the checkpoint ``folder`` and free it.

        Raises DiskError if a file is missing.
        """
        order = CriticOrder(attempt=self._attempt, folder=folder.name)
        written = self._call(0, "critic.write", order, what="the critic to write its state")[0].files
        if absent := [name for name in written if not (folder / name).is_file()]:
            raise DiskError(f"the critic has written {', '.join(absent)} to another folder", where=str(folder))

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.close()

    def _send_batch(self, header: BatchHeader | None, frames: Sequence[Any]) -> None:
        self._numbers += 1
        request = CriticBatch(attempt=self._attempt, rank=self._rank, number=self._numbers, header=header)
        self._call(self._own, "critic.learn", request, what="the critic to learn", frames=frames)

    def _call(
        self, replica: int, method: str, request: msgspec.Struct, *, what: str, frames: Sequence[Any] = ()
    ) -> _Answer:
        return self._wait(self._retried(what, replica, method, request, frames=frames))

    def _call_all(self, method: str, order: msgspec.Struct, *, what: str) -> list[CriticReply]:
        """Call all replicas, and wait until all have answered."""
        return self._wait(self._all(partial(self._retried, what), method, order))

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

    async def _retried(
        self, what: str, replica: int, method: str, request: msgspec.Struct, *, frames: Sequence[Any] = ()
    ) -> _Answer:
        attempt = partial(self._once, replica, method, request, frames=frames)
        return await retry(attempt, what=f"waiting for {what}", timeout=self._patience_s)

    async def _once(self, replica: int, method: str, request: msgspec.Struct, *, frames: Sequence[Any] = ()) -> _Answer:
        client = self._clients[replica]
        return await client.call_frames(method, request, CriticReply, timeout=self._patience_s, frames=frames)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class CriticService:
    """Answers the calls of a trainer. model: created by ``make`` in the compute thread; checkpoints: their folder;
    rank, host: of this process among the replicas; spans: recorder of this process.

    busy: time by cause: values, learn, optimizer, checkpoint.
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
        self._submitted: list[Future[None]] = []
        self._copied: Callable[[Path], None] | None = None
        self._written = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def attach(self, server: RpcServer) -> None:
        """Register the critic's methods with ``server``."""
        server.route("critic.meet", CriticOrder, self._on_meet)
        server.route("critic.load", LoadCritic, self._on_load)
        server.route("critic.values", CriticBatch, self._on_values)
        server.route("critic.learn", CriticBatch, self._on_learn)
        server.route("critic.settle", CriticOrder, self._on_settle)
        server.route("critic.update", CriticOrder, self._on_update)
        server.route("critic.copy", CriticOrder, self._on_copy)
        server.route("critic.write", CriticOrder, self._on_write)

    def close(self) -> None:
        """Stop the threads, cancelling work that has not started."""
        if self._listener is not None:
            self._listener.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)

    async def _on_meet(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        self._refuse_older(order.attempt)
        if self._rank:
            return CriticReply()
        if self._listener is not None:
            self._listener.close()
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family)
        return CriticReply(host=self._host, port=self._listener.getsockname()[1])

    def _refuse_older(self, attempt: int) -> None:
        if attempt < self._attempt:
            raise Refused(f"attempt {attempt} of the trainer was replaced by attempt {self._attempt}")

    async def _on_load(self, order: LoadCritic, _frames: Sequence[memoryview]) -> CriticReply:
        self._refuse_older(order.attempt)
        listener, self._listener = self._listener, None
        meeting = Meeting(self._rank, order.world, order.host, order.port, listener) if order.world > 1 else None
        await self._run("load", self._load, order, meeting)
        return CriticReply()

    def _load(self, order: LoadCritic, meeting: Meeting | None) -> None:
        seen = Checkpoints(self._checkpoints).newest_attempt()
        if seen != order.attempt:
            what = f"the critic sees the checkpoints of attempt {seen} of the trainer, which is attempt {order.attempt}"
            hint = "Both need one folder: a claim with accessMode ReadWriteMany (spec.storage.checkpoints)"
            raise ManifestError(what, where=str(self._checkpoints), hint=hint)
        self._model = self._model or self._make()
        self._model.load(self._checkpoint(order.checkpoint) if order.checkpoint else None, meeting)
        self._attempt, self._learned, self._updates = order.attempt, {}, 0
        self._submitted, self._copied, self._written = [], None, ""

    async def _on_values(self, request: CriticBatch, frames: Sequence[memoryview]) -> tuple[CriticReply, Sequence[Any]]:
        model, batch = self._model_for(request.attempt), _read(request, frames)
        found = await self._run("values", model.values, batch)
        header, encoded = encode_batch({_VALUES: found})
        return CriticReply(header=header), encoded

    async def _on_learn(self, request: CriticBatch, frames: Sequence[memoryview]) -> CriticReply:
        model = self._model_for(request.attempt)
        if request.number > self._learned.get(request.rank, 0):
            self._learned[request.rank] = request.number
            if request.header is None:
                self._submit("learn", model.forget)
            else:
                self._submit("learn", model.learn, _read(request, frames))
        return CriticReply()

    async def _on_settle(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        return CriticReply(sums=await self._run("learn", self._model_for(order.attempt).settle))

    async def _on_update(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        model = self._model_for(order.attempt)
        if order.number > self._updates:
            self._updates, self.step = order.number, order.step
            self._submit("optimizer", lambda: model.update(order.step, divisor=order.divisor, moves=order.moves))
        return CriticReply()

    async def _on_copy(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        model = self._model_for(order.attempt)
        self._copied, self._written = None, ""
        self._copied = await self._run("checkpoint", model.copy)
        return CriticReply()

    async def _on_write(self, order: CriticOrder, _frames: Sequence[memoryview]) -> CriticReply:
        model = self._model_for(order.attempt)
        folder = self._checkpoint(order.folder)
        if self._copied is not None:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._copied, folder)
            self._copied, self._written = None, order.folder
        elif self._written != order.folder:
            raise Refused(f"there is no copy of the critic to write to {order.folder!r}")
        return CriticReply(files=list(model.files))

    def _checkpoint(self, name: str) -> Path:
        """Return the folder of the checkpoint ``name``. Raises Refused for a name with a path."""
        if name in ("", "..") or Path(name).name != name:
            raise Refused(f"{name!r} is not the name of a checkpoint", where="critic")
        return self._checkpoints / name

    def _model_for(self, attempt: int) -> CriticModel:
        """Return the model. Raises Refused for any attempt other than the one that loaded it."""
        if self._model is None or attempt != self._attempt:
            hint = "The trainer restarts from its checkpoint"
            raise Refused(f"the critic was not loaded by attempt {attempt} of the trainer", where="critic", hint=hint)
        return self._model

    async def _run(self, cause: str, work: Callable[..., T], *args: Any) -> T:
        """Run ``work`` after all submitted work. Raises the errors of submitted work and of ``work``.

        An error of submitted work is raised by every call until the next ``load``.
        """
        submitted = [] if cause == "load" else list(self._submitted)

        def run() -> T:
            for one in submitted:
                one.result()
            with self._counted(cause):
                return work(*args)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except PeerLost:
            self._attempt = -1  # the replicas may differ now, so the trainer restarts and loads all of them
            raise

    @contextmanager
    def _counted(self, cause: str) -> Iterator[None]:
        with self.busy(cause), self._spans.main(_SPANS[cause]):
            yield

    def _submit(self, cause: str, work: Callable[..., None], *args: Any) -> None:
        """Queue ``work`` after all submitted work; the next ``_run`` raises its error."""

        def run() -> None:
            with self._counted(cause):
                work(*args)

        self._submitted = [one for one in self._submitted if not one.done() or one.exception() is not None]
        self._submitted.append(self._thread.submit(run))


def _encoded(batch: MicroBatch, *, learns: bool) -> tuple[BatchHeader, list[Any]]:
    """Return the columns of a batch that the critic needs, including values and returns if it ``learns``."""
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


def _read(request: CriticBatch, frames: Sequence[memoryview]) -> MicroBatch:
    """Return the samples of a call. Raises ProtocolError if its columns do not form samples."""
    columns = _decoded(request.header, frames)
    with suppress(KeyError, ValueError):
        keys = [SampleKey(*map(int, row)) for row in columns["key"].rows()]
        lengths = columns["response_ids"].lengths
        by_token = [columns[name] for name in (LOSS_MASK, _VALUES, "returns") if name in columns]
        if all((column.lengths == lengths).all() for column in by_token):
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
    raise ProtocolError(f"columns {sorted(columns)} do not form samples for the critic", where="critic")
