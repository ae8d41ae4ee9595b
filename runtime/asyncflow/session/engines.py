"""The five verbs of AsyncFlow's user-level interface (arXiv 2507.01663, §5), for a job or a queue.

    engines = init_engines("job.yaml")
    engines.weight_sync_notify(model)                           # θ_step, which the rollouts begin with
    while engines.step < engines.steps:
        while (batch := engines.get_experience_data()) is not None:
            loss(model, batch).backward()
        optimizer.step()
        engines.weight_sync_notify(model, state={"model": model.state_dict(), ...})
    engines.close()

Everything that waits for others goes on in one thread with an event loop of its own, so the caller may be a script, a
notebook, or a coroutine's worker thread, and computes undisturbed.

Invariants: a session of a job is its trainer (``roles.trainer``), with the user's loop for a back end (``handover``):
each sample is trained once in the weights that survive, whenever this process is killed and started again, since steps
are committed with the checkpoint that holds the user's state; every call has a deadline, and once the session has ended
each one says why.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import uuid4

import msgspec
from torch import Tensor, nn

from asyncflow.api.job import RLJob
from asyncflow.api.names import CLIENT
from asyncflow.commands.preflight import check_source
from asyncflow.data.base import Prompt
from asyncflow.data.put import PromptsThere, PutPrompts
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, Refused
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.queue.partition import Partition
from asyncflow.queue.torch.batch import LEASE_OWNERS, Batch, BatchLease
from asyncflow.queue.torch.dataset import Consumer, QueueAddress
from asyncflow.queue.values import Values, encode_columns
from asyncflow.roles.context import LOOPBACK
from asyncflow.roles.rollout import MakeEngine
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.retry import retry
from asyncflow.rpc.tls import Credentials
from asyncflow.session.experience import Experience
from asyncflow.session.joining import LocalRun, SessionPlace, elsewhere, running
from asyncflow.session.loader import OPEN, StreamLoader, create_stream_data_loader, make_known
from asyncflow.session.role import TrainerSession
from asyncflow.session.stages import check_stage, written
from asyncflow.training.report import Seconds, TrainReport

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S = 3600.0
"""Seconds that samples may take, unless the caller says."""
_CALL_S = 60.0
_PROMPTS_PER_CALL = 256
_RESERVED = {"at", *TrainReport.__struct_fields__, *(f"{name}_s" for name in Seconds.__struct_fields__)}


@dataclass(frozen=True)
class ClaimedRows:
    """Rows that were claimed, also as the pair (data, index); a context, from which an error gives them back.

    data: their columns by name; index: for ``put_experience_data``, with the results; returning: see ``give_back``.
    """

    data: dict[str, Values]
    index: BatchLease
    returning: Callable[[str], None] = field(repr=False, compare=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.data, self.index))

    def give_back(self, reason: str = "given back") -> None:
        """Return to other consumers, at once, what was not put of these rows. reason: for the ledger."""
        self.returning(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            return
        try:
            self.give_back(kind.__name__)
        except AsyncFlowError as other:
            log.warning("rows could not be given back: %s", other)


class Engines:
    """The engines of a job, or a queue alone, to a user's process. Made by ``init_engines``; a context that closes it.

    job: None for a queue alone; state: what the checkpoint holds that was gone on from, as it was given to
    ``weight_sync_notify``, None at the beginning; partition: of the rows; step: the last completed one; steps: how many
    there are. Who is not the job's trainer has no state, and 0 for a step.
    """

    def __init__(self, *, session: TrainerSession | None, place: SessionPlace, partition: str) -> None:
        self.job: RLJob | None = None
        self.state: Any = None
        self.step = self.steps = 0
        self.partition = partition
        self._session = session
        self._place = place
        self._queue: Consumer | None = None
        self._owner = uuid4().hex
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        LEASE_OWNERS[self._owner] = self
        self._trains = session is not None
        self._model = Path()
        if place.manifest is not None:
            assert place.workdir is not None
            self.job = place.job
            self.steps = self.job.spec.algorithm.steps
            self._model = materialize_config(self.job.spec.model.source, place.workdir)
            if session is not None:
                handover = session.opened()
                self.state, self.step = handover.state, handover.step

    @property
    def model(self) -> Path:
        """Folder of the job's model, in the trainer's process with θ_0; a tiny model is made there at the first use."""
        if self._trains and self.job is not None:
            materialize_weights(self.job.spec.model.source, self._model)
        return self._model

    def put_prompts_data(
        self,
        prompts: Sequence[Any] | Mapping[str, Any],
        *,
        last: bool = False,
        first: int | None = None,
        timeout: float = _CALL_S,
    ) -> list[int]:
        """Put prompts and return their numbers.

        Into a queue that stands alone, a row each, as soon as there is room. prompts: a value for each row (column
        ``prompts``), or columns by name; last: no more rows will be put, so that consumers end when they have had all.

        Into a job whose ``data.train.source`` is ``put://``. prompts: texts, or mappings with ``question`` and what
        else ``asyncflow.data.base.Prompt`` has: ``answer``, ``meta``, ``messages``, ``task``. They are on the driver's
        disk when this returns, and are asked in this order, as steps need them; ``prompts`` says how many there are.
        first: the number that the first one is to have, None for the next: a call that failed halfway, and is made
        again with it, puts nothing twice. Raises Refused for a job with another source, and ManifestError, with none
        put, for a prompt that the model cannot be asked.
        """
        if self.job is not None:
            if last:
                what, hint = "a job ends after its steps", "Leave last out; spec.algorithm.steps says how many"
                raise Refused(what, where="put_prompts_data", hint=hint)
            begin = self.prompts if first is None else first
            return self._put_into_job(_prompts_of(prompts), first=begin, timeout=timeout)
        columns = prompts if isinstance(prompts, Mapping) else {"prompts": prompts}

        async def put(rows: Partition) -> list[int]:
            ids = await rows.put(columns, timeout=timeout)
            if last:
                await rows.close(timeout=timeout)
            return ids

        return self._in_partition(put)

    @property
    def prompts(self) -> int:
        """Number of prompts that were put into the job, by earlier sessions too. Raises Refused where there is none."""
        if self.job is None:
            what, hint = "a queue alone counts no prompts", "Engines.put_prompts_data gives the ids of its rows"
            raise Refused(what, where="prompts", hint=hint)
        return self._call_driver(PutPrompts(), timeout=_CALL_S)

    def get_experience_data(
        self,
        experience_consumer_stage: str = "train",
        experience_columns: Sequence[str] = (),
        experience_count: int = 0,
        *,
        timeout: float = WAIT_S,
    ) -> Any:
        """Return what is ready for a consumer, as soon as something is; None at the end.

        In a job ``train`` is the trainer: it is given the samples of step ``step + 1``, an ``Experience`` at a time,
        as soon as their groups are finished, and None when it has had all of them. Any other stage is a task of
        ``spec.tasks`` without a function, or of a queue that stands alone, which learns of the task by this. It is
        given up to ``experience_count`` rows as ``ClaimedRows``, with ``experience_columns``, and None when no more
        will come; the rows are its own until it puts what it made of them, or gives them back.

        Raises DeadlineExceeded where nothing was ready in time, and Refused for a task that the job itself does.
        """
        if self.job is not None and experience_consumer_stage == "train":
            return self._next_experience(timeout)
        if not experience_columns or experience_count < 1:
            hint = "Say which columns, and how many rows at most"
            raise Refused("experience_columns and experience_count are missing", where="get_experience_data", hint=hint)
        if self.job is not None:
            check_stage(self.job.spec, experience_consumer_stage, experience_columns, where="get_experience_data")
        return self._claim(experience_consumer_stage, list(experience_columns), experience_count, timeout)

    def put_experience_data(
        self,
        data: Mapping[str, Any],
        index: BatchLease | None = None,
        *,
        timeout: float = _CALL_S,
    ) -> list[bool]:
        """Write columns, a value for each row.

        index: of the rows that were got, which are completed by this: False for one whose lease had ended, and which
        another consumer has. Without it they are new rows of a queue that stands alone. Raises Refused, in a job, for
        anything but the columns that the task writes.
        """
        where = "put_experience_data"
        if self.job is not None:
            if index is None:
                hint = "Give the index of the rows that you got; put_prompts_data puts prompts"
                raise Refused("a job makes its rows itself", where=where, hint=hint)
            data = written(self.job.spec, data, len(index.rows), where=where)
        if index is None:
            return [True] * len(self._in_partition(lambda rows: rows.put(data, timeout=timeout)))
        if index.owner == self._owner:
            consumer = self._consumer()
            return consumer.run(consumer.complete(index.rows, encode_columns(data)))
        if (owner := LEASE_OWNERS.get(index.owner)) is None:
            hint = "Put results while the loader that gave their index is there"
            raise Refused("these rows were claimed by a loader that is gone", where=where, hint=hint)
        result: list[bool] = owner.complete(Batch(metas=[], columns={}, lease=index), data)
        return result

    def weight_sync_notify(
        self,
        weights: nn.Module | Mapping[str, Tensor],
        *,
        state: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Say which weights there are now: first those of ``step``, and after the samples of a step those it made.

        They are published, and the rollouts swap as the job's schedule says. weights: a model of transformers, or its
        parameters by name; state: all that is needed to go on with the next step (tensors, numbers, texts, lists and
        dicts), which goes into the checkpoints; metrics: finite numbers for ``metrics.jsonl``. Both are copied, so the
        model may change as soon as this returns. Raises Refused before all samples of the step were taken, or where the
        queue stands alone.
        """
        handover = self._trainer("weight_sync_notify").opened()
        named = _saved(weights) if isinstance(weights, nn.Module) else weights
        if not handover.begun:
            handover.begin(named)
            return
        handover.finish(named, state=state, metrics=_checked(metrics or {}))
        self.step += 1

    def generate_here(self, make_engine: MakeEngine) -> None:
        """Be one more rollout of the job, with an engine of one's own (``rollout.engines.base``)."""
        self._trainer("generate_here").generate(make_engine)

    def create_stream_data_loader(
        self,
        experience_consumer_stage: str,
        experience_columns: Sequence[str],
        experience_count: int,
        **options: Any,
    ) -> StreamLoader:
        """Return a loader of a stage's rows; see ``asyncflow.create_stream_data_loader``."""
        check = None
        if self.job is not None:
            where = "create_stream_data_loader"
            check_stage(self.job.spec, experience_consumer_stage, experience_columns, where=where)
            check = partial(written, self.job.spec, where="StreamLoader.put")
        return create_stream_data_loader(
            self.queue,
            experience_consumer_stage,
            experience_columns,
            experience_count,
            partition=self.partition,
            check=check,
            **options,
        )

    def close(self, *, timeout: float = WAIT_S) -> None:
        """Leave; after the last step wait until the job has ended well, which was run by this process or elsewhere.

        Meanwhile threads may do what the job leaves to them: they get None when no more rows will come. Before the last
        step, a checkpoint is written of the last completed one, and a job that this process runs is ended; it goes on
        when ``init_engines`` is called again. Raises what went wrong meanwhile.
        """
        session, self._session = self._session, None
        deadline = time.monotonic() + timeout
        try:
            if session is not None and self.step >= self.steps:
                session.dismissed.wait(timeout)
        finally:
            with self._lock:
                self._closed = True
            if self._queue is not None:
                self._queue.close()
        if session is None:
            return
        if self.step < self.steps:
            session.leave()
        session.thread.join(max(0.0, deadline - time.monotonic()))
        if session.thread.is_alive():
            session.leave()
            raise DeadlineExceeded(f"the job did not end within {timeout:g} s", where="close", hint="Its view says why")
        if session.error is not None:
            raise session.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        try:
            if self._session is not None:
                self._session.leave()
                self._session.thread.join(WAIT_S)
            self.close()
        except Exception as other:  # noqa: BLE001  the error that left the block says more
            log.warning("while the session ended: %s", other)

    def keep(self, rows: Any) -> None:
        """Keep the lease of rows in force whose index has come from another process."""
        consumer = self._consumer()
        consumer.run(consumer.keep(rows))

    @property
    def queue(self) -> QueueAddress:
        """The queue, as the data sets of ``asyncflow`` take it."""
        return QueueAddress(address=self._place.address, tls=self._place.certificate(CLIENT))

    def _trainer(self, where: str) -> TrainerSession:
        """Return the session of the job's trainer. Raises Refused where this is none."""
        if self._session is not None:
            return self._session
        if self.job is None:
            hint = "Give init_engines the manifest of a job, or the folder of its run"
            raise Refused("a queue alone has no rollouts", where=where, hint=hint)
        hint = "Call init_engines again, without trains=False"
        raise Refused("the session was closed, or is not the trainer's", where=where, hint=hint)

    def _next_experience(self, timeout: float) -> Experience | None:
        handover, step = self._trainer("get_experience_data").opened(), self.step + 1
        if not handover.begun:
            hint = "Call weight_sync_notify(model) first: the rollouts generate with it"
            raise Refused("there are no weights yet", where="get_experience_data", hint=hint)
        if step > self.steps:
            return None
        batch = handover.take(what=f"samples of step {step}", timeout=timeout)
        return None if batch is None else Experience.of(batch, step=step)

    def _put_into_job(self, prompts: Sequence[Prompt], *, first: int, timeout: float) -> list[int]:
        begins = range(0, len(prompts), _PROMPTS_PER_CALL)
        parts = [PutPrompts(first + begin, list(prompts[begin : begin + _PROMPTS_PER_CALL])) for begin in begins]
        checks = [msgspec.structs.replace(part, check=True) for part in parts] if len(parts) > 1 else []
        self._call_driver(*checks, *parts, timeout=timeout)
        return list(range(first, first + len(prompts)))

    def _call_driver(self, *requests: PutPrompts, timeout: float) -> int:
        """Return how many prompts there are after ``requests``, each sent again while the driver is away."""
        tls = self._place.certificate(CLIENT)

        async def call() -> int:
            credentials = Credentials(tls) if tls else Credentials.of_environment()
            driver = RpcClient(
                name="session", resolve=self._place.address, credentials=credentials, expects=("driver",)
            )
            there = 0
            try:
                for request in requests:
                    answer = await retry(
                        partial(driver.call, "driver.put_prompts", request, PromptsThere, timeout=_CALL_S),
                        what="putting prompts",
                        timeout=timeout,
                    )
                    there = answer.count
            finally:
                await driver.close()
            return there

        return self._consumer().run(call())

    def _consumer(self) -> Consumer:
        with self._lock:
            if self._closed:
                raise Refused("the session was closed", where="session", hint="Call init_engines again")
            if self._queue is None:
                self._queue = Consumer(self.queue)
            return self._queue

    def _in_partition(self, use: Callable[[Partition], Coroutine[Any, Any, T]]) -> T:
        consumer = self._consumer()
        return consumer.run(use(Partition(consumer.client, self.partition, tensors=True)))

    def _claim(self, stage: str, columns: list[str], count: int, timeout: float) -> ClaimedRows | None:
        consumer = self._consumer()

        async def claim() -> ClaimedRows | None:
            rows = Partition(consumer.client, self.partition, tensors=True)
            if self.job is None and stage not in self._known:
                await make_known(rows, stage, columns)
                self._known.add(stage)
            claimed = await consumer.client.claim(
                partition=self.partition, task=stage, max_rows=count, until_done=True, timeout=timeout
            )
            if not claimed.rows:
                if claimed.ended:
                    return None
                what = f"no row was ready for {stage} within {timeout:g} s"
                hint = "asyncflow queue show says what they lack"
                raise DeadlineExceeded(what, where=self.partition, hint=hint)
            await consumer.keep(claimed.rows)
            try:
                found = await rows.get(claimed.rows, columns, timeout=_CALL_S)
            except AsyncFlowError:
                await consumer.give_back(claimed.rows, "its columns could not be read")
                raise
            return ClaimedRows(
                found,
                BatchLease(self._owner, claimed.rows),
                lambda reason: consumer.run(consumer.give_back(claimed.rows, reason)),
            )

        return consumer.run(claim())


def init_engines(
    job: RLJob | Path | str,
    *,
    output: Path | str | None = None,
    overrides: Sequence[str] = (),
    address: str | None = None,
    tls: Path | str | None = None,
    workdir: Path | str | None = None,
    host: str = LOOPBACK,
    partition: str = OPEN,
    trains: bool = True,
    timeout: float = 300.0,
) -> Engines:
    """Bring up the engines of a job whose trainer is this process, or join those that are up.

    job: a manifest, or a job made in Python, which is run on this machine as a child process in the folder ``output``
    (``runs/NAME``), and continued where that holds a run; the folder of a run that goes on; or the address of a queue
    that stands alone (``tcp://HOST:PORT``) or its folder. overrides: ``path=value`` each.

    address: of the driver of a job that runs elsewhere, whose manifest ``job`` is; tls: folder with the certificates
    ``trainer-0`` and ``client-0`` of that job (of a queue: the folder with a client's certificate); workdir: folder on
    durable storage for checkpoints and the model (``runs/NAME``); host: the address at which rollouts reach this
    process. partition: of the rows of a queue. trains: False for a process beside the trainer, which does tasks that
    are left to the user, or puts prompts. timeout: seconds until the job is joined as its trainer; who does not train,
    and who uses a queue, joins with the first call, which has a timeout of its own.

    Raises ManifestError for what cannot be run or joined, DeadlineExceeded where a trainer did not reach the driver.
    """
    check_source(job, RLJob, where="init_engines")
    if isinstance(job, str) and "://" in job:
        alone = SessionPlace(address=job, own=None if tls is None else Path(tls))
        return Engines(session=None, place=alone, partition=partition)
    folder = None if isinstance(job, RLJob) or not Path(job).is_dir() else Path(job)
    if folder is not None and address is None:
        place = running(folder)
        if place.manifest is None:
            return Engines(session=None, place=place, partition=partition)
        if not trains:
            return Engines(session=None, place=place, partition=TRAIN)
        session = TrainerSession(lambda: place, run=None, host=host, timeout=timeout)
    elif address is not None:
        there = partial(elsewhere, job, address=address, tls=tls, workdir=workdir, overrides=overrides)
        if not trains:
            return Engines(session=None, place=there(), partition=TRAIN)
        session = TrainerSession(there, run=None, host=host, timeout=timeout)
    else:
        if not trains:
            hint = "Give the folder of its run, or the address of its driver"
            raise ManifestError("a job that is begun here needs its trainer", where="init_engines", hint=hint)
        local = LocalRun(job, output=output, overrides=overrides)
        session = TrainerSession(lambda: local.start(timeout=timeout), run=local, host=host, timeout=timeout)
    try:
        session.opened()
        assert session.place is not None
        return Engines(session=session, place=session.place, partition=TRAIN)
    except BaseException:
        session.leave()
        raise


def _prompts_of(given: Sequence[Any] | Mapping[str, Any]) -> list[Prompt]:
    """Return what a caller puts into a job as prompts. Raises ManifestError for what is none."""
    if isinstance(given, str) or (isinstance(given, Mapping) and any(isinstance(each, str) for each in given.values())):
        raise ManifestError("one prompt was given", where="put_prompts_data", hint="Give a list of prompts")
    rows: Iterable[Any] = given
    if isinstance(given, Mapping):
        if len({len(column) for column in given.values()}) > 1:
            raise ManifestError("the columns have unlike numbers of rows", where="put_prompts_data")
        rows = (dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True))
    return [_prompt(each, number) for number, each in enumerate(rows)]


def _prompt(given: Any, number: int) -> Prompt:
    try:
        named = {"question": given} if isinstance(given, str) else given
        if not isinstance(named, Prompt):
            if unknown := sorted(dict(named).keys() - set(Prompt.__struct_fields__)):
                raise ManifestError(
                    f"prompt {number} has {unknown[0]!r}",
                    where="put_prompts_data",
                    hint=f"A prompt has {', '.join(Prompt.__struct_fields__)}; put all else into meta",
                )
            named = msgspec.convert(dict(named), Prompt)
        return Prompt.unpack(named.packed())
    except (TypeError, ValueError) as error:
        what = f"prompt {number} is none: {error}"
        raise ManifestError(what, where="put_prompts_data", hint="Give plain texts and numbers, as JSON has") from error


def _saved(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, each once, and the buffers that are saved with them, by name."""
    kept = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{name: each for name, each in model.named_buffers() if name in kept}}


def _checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as plain numbers. Raises Refused for one that is not finite, or named as the report's own."""
    plain = {name: float(value) for name, value in metrics.items()}
    for name, value in plain.items():
        if not math.isfinite(value) or name in _RESERVED:
            why = "is not finite" if name not in _RESERVED else "has the name of a figure of the report"
            raise Refused(f"the metric {name} = {value} {why}", where="weight_sync_notify")
    return plain
