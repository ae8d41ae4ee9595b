"""The five verbs of AsyncFlow's user-level interface (arXiv 2507.01663, §5), for a job or a queue.

    engines = init_engines("job.yaml")
    engines.weight_sync_notify(model)                           # θ_step, with which the rollouts start
    while engines.step < engines.steps:
        while (batch := engines.get_experience_data()) is not None:
            loss(model, batch).backward()
        optimizer.step()
        engines.weight_sync_notify(model, state={"model": model.state_dict(), ...})
    engines.close()

One thread with its own event loop waits for other processes, so the caller may be a script, a notebook, or the worker
thread of a coroutine, and its computation is not interrupted.

Invariants: a session of a job is the job's trainer (``roles.trainer``) with the user's loop as its backend
(``handover``); in the weights that survive, each sample is trained once, even if this process is killed and restarted
at any time, since steps are committed with the checkpoint that contains the user's state; every call has a deadline,
and every call after the end of the session raises an error with the reason.
"""

from __future__ import annotations

import logging
import math
import os
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
from asyncflow.session.handover import Handover
from asyncflow.session.joining import LocalRun, SessionPlace, place_of_run, remote_place
from asyncflow.session.loader import OPEN, StreamLoader, create_stream_data_loader, declare_stage
from asyncflow.session.role import TrainerSession
from asyncflow.session.stages import check_stage, written
from asyncflow.training.report import Seconds, TrainReport

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S = 3600.0
"""Default timeout for samples, in seconds."""
_CALL_S = 60.0
_PROMPTS_PER_CALL = 256
_RESERVED = {"at", *TrainReport.__struct_fields__, *(f"{name}_s" for name in Seconds.__struct_fields__)}


@dataclass(frozen=True)
class ClaimedRows:
    """Claimed rows, which unpack to the pair (data, index); a context manager that gives them back after an error.

    data: their columns by name; index: argument of ``put_experience_data`` for the results; returning: function that
    gives the rows back for a reason.
    """

    data: dict[str, Values]
    index: BatchLease
    returning: Callable[[str], None] = field(repr=False, compare=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.data, self.index))

    def give_back(self, reason: str = "given back") -> None:
        """Return the rows without results to other consumers immediately. reason: text for the ledger."""
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
    """Access of a user's process to a job or a standalone queue. Made by ``init_engines``; a context manager.

    job: None for a standalone queue; state: the state in the checkpoint from which the job continues, as it was passed
    to ``weight_sync_notify``, None at the start; partition: partition of the rows; step: last completed step; steps:
    number of steps of the job. In a process that is not the job's trainer, state is None and step is 0.
    """

    def __init__(self, *, session: TrainerSession | None, place: SessionPlace, partition: str) -> None:
        self.job: RLJob | None = None
        self.state: Any = None
        self.steps = 0
        self.partition = partition
        self._session = session
        self._handover: Handover | None = None
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
                self._handover = session.opened()
                self.state = self._handover.state

    @property
    def step(self) -> int:
        """The last completed step."""
        return 0 if self._handover is None else self._handover.step

    @property
    def model(self) -> Path:
        """Folder of the job's model, in the trainer's process with θ_0; a tiny model is created at the first use."""
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

        For a standalone queue, each prompt becomes a row, as soon as there is room. prompts: a value for each row
        (column ``prompts``), or columns by name; last: no more rows will be put, so consumers end after these rows.

        For a job, ``data.train.source`` must be ``put://``. prompts: texts, or mappings with ``question`` and other
        fields of ``asyncflow.data.base.Prompt``: ``answer``, ``meta``, ``messages``, ``task``. When this returns, they
        are on the driver's disk; they are dispatched in this order when steps need them. ``prompts`` is their number.
        first: number of the first prompt, None for the next one; a call that failed halfway can be repeated with the
        same number and puts no prompt twice. Raises Refused for a job with another source, and ManifestError, before
        any prompt is put, for a prompt that is invalid for the model.
        """
        if self.job is not None:
            if last:
                what, hint = "a job ends after its steps", "Remove last; spec.algorithm.steps is the number of steps"
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
        """Number of prompts in the job, including those of earlier sessions. Raises Refused for a standalone queue."""
        if self.job is None:
            what, hint = "a standalone queue counts no prompts", "Engines.put_prompts_data returns the ids of its rows"
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
        """Return the next ready rows for a consumer; wait until there are any; None at the end.

        In a job, the stage ``train`` is the trainer: it receives the samples of step ``step + 1``, one ``Experience``
        per call, when their groups are finished, and None after the last. Any other stage is a task of ``spec.tasks``
        without a function, or a task of a standalone queue, in which this call declares it. It receives up to
        ``experience_count`` rows as ``ClaimedRows``, with ``experience_columns``, and None when no more rows will come.
        It keeps the rows until it puts their results or gives them back.

        Raises DeadlineExceeded if no row was ready in time, and Refused for a task that the job itself does.
        """
        if self.job is not None and experience_consumer_stage == "train":
            return self._next_experience(timeout)
        if not experience_columns or experience_count < 1:
            hint = "Pass the columns to read, and the maximum number of rows"
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
        """Write columns with a value for each row, and return whether each row was written.

        index: index of claimed rows, which this call completes; the result is False for a row whose lease had ended,
        since another consumer has it. Without an index, the call puts new rows into a standalone queue. In a job,
        raises Refused unless the columns are those that the task writes.
        """
        where = "put_experience_data"
        if self.job is not None:
            if index is None:
                hint = "Pass the index of the claimed rows; use put_prompts_data to put prompts"
                raise Refused("a job makes its rows itself", where=where, hint=hint)
            data = written(self.job.spec, data, len(index.rows), where=where)
        if index is None:
            return [True] * len(self._in_partition(lambda rows: rows.put(data, timeout=timeout)))
        if index.owner == self._owner:
            consumer = self._consumer()
            return consumer.run(consumer.complete(index.rows, encode_columns(data), timeout=timeout))
        if (owner := LEASE_OWNERS.get(index.owner)) is None:
            hint = "Put results while the loader that returned their index still exists"
            raise Refused("these rows were claimed by a loader that no longer exists", where=where, hint=hint)
        result: list[bool] = owner.complete(Batch(metas=[], columns={}, lease=index), data, timeout=timeout)
        return result

    def weight_sync_notify(
        self,
        weights: nn.Module | Mapping[str, Tensor],
        *,
        state: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Publish weights: the first call passes the weights of ``step``, each further call those after the next step.

        The rollouts swap to them as the job's schedule says. weights: a transformers model, or its parameters by name;
        state: everything needed to continue with the next step (tensors, numbers, texts, lists and dicts), which is
        written into the checkpoints; metrics: finite numbers for ``metrics.jsonl``. Weights and state are copied, so
        the model may change as soon as this returns. Raises Refused if samples of the step were not taken yet, or for a
        standalone queue.
        """
        handover = self._trainer("weight_sync_notify").opened()
        named = _saved(weights) if isinstance(weights, nn.Module) else weights
        if not handover.has_weights:
            handover.begin(named)
            return
        handover.finish(named, state=state, metrics=_checked(metrics or {}))

    def start(self, model: nn.Module) -> None:
        """Publish the weights of ``step``, unless that was done before.

        Raises Refused if samples of a step were taken that is not completed: only a new session gets them again.
        """
        handover = self._trainer("start").opened()
        if handover.within_step:
            what = f"step {self.step + 1} was interrupted after samples of it had been taken"
            hint = "Call close, and init_engines again: the job continues with that step"
            raise Refused(what, where="fit", hint=hint)
        if not handover.has_weights:
            handover.begin(_saved(model))

    def generate_here(self, make_engine: MakeEngine) -> None:
        """Join the job as a further rollout, with a custom engine (``rollout.engines.base``)."""
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
        """Leave the job.

        After the last step, wait until the job has ended, wherever it runs. Meanwhile other threads may still do tasks
        that the job leaves to the user; they receive None when no more rows will come. Before the last step, the
        trainer writes a checkpoint of the last completed step, and a job that this process started ends; a new call of
        ``init_engines`` continues it. A call that was interrupted can be repeated. Raises the error of the session, if
        any.
        """
        session = self._session
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
        self._session = None
        if session.thread.is_alive():
            session.leave()
            raise DeadlineExceeded(f"the job did not end within {timeout:g} s", where="close", hint="See its status")
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
        except Exception as other:  # noqa: BLE001  the error that left the block is more important
            log.warning("while the session ended: %s", other)

    def keep(self, rows: Any) -> None:
        """Renew the lease of rows whose index came from another process."""
        consumer = self._consumer()
        consumer.run(consumer.keep(rows))

    @property
    def queue(self) -> QueueAddress:
        """The address of the queue, for the data sets of ``asyncflow``."""
        return QueueAddress(address=self._place.address, tls=self._place.certificate(CLIENT))

    def _trainer(self, where: str) -> TrainerSession:
        """Return the session of the job's trainer. Raises Refused if there is none."""
        if self._session is not None:
            return self._session
        if self.job is None:
            hint = "Pass init_engines the manifest of a job, or the folder of its run"
            raise Refused("a standalone queue has no rollouts", where=where, hint=hint)
        hint = "Call init_engines again, without trains=False"
        raise Refused("the session was closed, or is not the trainer's", where=where, hint=hint)

    def _next_experience(self, timeout: float) -> Experience | None:
        handover, step = self._trainer("get_experience_data").opened(), self.step + 1
        if not handover.has_weights:
            hint = "Call weight_sync_notify(model) first: the rollouts generate with it"
            raise Refused("there are no weights yet", where="get_experience_data", hint=hint)
        if step > self.steps:
            return None
        return handover.take(partial(Experience.of, step=step), what=f"samples of step {step}", timeout=timeout)

    def _put_into_job(self, prompts: Sequence[Prompt], *, first: int, timeout: float) -> list[int]:
        starts = range(0, len(prompts), _PROMPTS_PER_CALL)
        parts = [PutPrompts(first + start, list(prompts[start : start + _PROMPTS_PER_CALL])) for start in starts]
        checks = [msgspec.structs.replace(part, check=True) for part in parts] if len(parts) > 1 else []
        self._call_driver(*checks, *parts, timeout=timeout)
        return list(range(first, first + len(prompts)))

    def _call_driver(self, *requests: PutPrompts, timeout: float) -> int:
        """Send ``requests``, retrying while the driver is unreachable; return the number of prompts afterwards."""
        tls = self._place.certificate(CLIENT)

        async def call() -> int:
            credentials = Credentials(tls) if tls else Credentials.of_environment()
            driver = RpcClient(
                name="session", resolve=self._place.address, credentials=credentials, expects=("driver",)
            )
            count = 0
            try:
                for request in requests:
                    answer = await retry(
                        partial(driver.call, "driver.put_prompts", request, PromptsThere, timeout=_CALL_S),
                        what="putting prompts",
                        timeout=timeout,
                    )
                    count = answer.count
            finally:
                await driver.close()
            return count

        return self._consumer().run(call())

    def _consumer(self) -> Consumer:
        with self._lock:
            if self._closed:
                raise Refused("the session was closed", where="session", hint="Call init_engines again")
            if self._queue is None or self._queue.pid != os.getpid():
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
                await declare_stage(rows, stage, columns)
                self._known.add(stage)
            claimed = await consumer.client.claim(
                partition=self.partition, task=stage, max_rows=count, until_done=True, timeout=timeout
            )
            if not claimed.rows:
                if claimed.ended:
                    return None
                what = f"no row was ready for {stage} within {timeout:g} s"
                hint = "asyncflow queue show says which columns they lack"
                raise DeadlineExceeded(what, where=self.partition, hint=hint)
            await consumer.keep(claimed.rows)
            try:
                data = await rows.get(claimed.rows, columns, timeout=_CALL_S)
            except BaseException:  # also of a caller that was interrupted
                await consumer.give_back(claimed.rows, "its columns could not be read")
                raise
            return ClaimedRows(
                data,
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
    """Start a job whose trainer is this process, or join a running job or queue.

    job: a manifest or a job made in Python, which is run on this machine as a child process in the folder ``output``
    (default ``runs/NAME``); if the folder contains a run, that run is continued. Or the folder of a job or a standalone
    queue that is running, or the address of a standalone queue (``tcp://HOST:PORT``). overrides: ``path=value`` each.

    address: address of the driver of a job that runs on other machines; ``job`` is then its manifest; tls: folder with
    the certificates ``trainer-0`` and ``client-0`` of that job (for a queue: folder with the certificate of a client);
    workdir: folder on durable storage for checkpoints and the model (default ``runs/NAME``); host: address at which
    rollouts reach this process. partition: partition of the rows of a queue. trains: False for a process that is not
    the trainer but does tasks that are left to the user, or puts prompts. timeout: seconds until the process has joined
    the job as its trainer; other processes, and users of a queue, join at their first call, within 30 s.

    Raises ManifestError if the job cannot be run or joined, DeadlineExceeded if the trainer cannot reach the driver.
    """
    check_source(job, RLJob, where="init_engines")
    if isinstance(job, str) and "://" in job:
        alone = SessionPlace(address=job, own=None if tls is None else Path(tls))
        return Engines(session=None, place=alone, partition=partition)
    folder = None if isinstance(job, RLJob) or not Path(job).is_dir() else Path(job)
    if folder is not None and address is None:
        place = place_of_run(folder)
        if place.manifest is None:
            return Engines(session=None, place=place, partition=partition)
        if not trains:
            return Engines(session=None, place=place, partition=TRAIN)
        session = TrainerSession(lambda: place, run=None, host=host, timeout=timeout)
    elif address is not None:
        locate = partial(remote_place, job, address=address, tls=tls, workdir=workdir, overrides=overrides)
        if not trains:
            return Engines(session=None, place=locate(), partition=TRAIN)
        session = TrainerSession(locate, run=None, host=host, timeout=timeout)
    else:
        if not trains:
            hint = "Pass the folder of its run, or the address of its driver"
            raise ManifestError("a job that is started here needs its trainer", where="init_engines", hint=hint)
        local = LocalRun(job, output=output, overrides=overrides)
        session = TrainerSession(lambda: local.start(timeout=timeout), run=local, host=host, timeout=timeout)
    try:
        session.opened()
        assert session.place is not None
        return Engines(session=session, place=session.place, partition=TRAIN)
    except BaseException:
        session.leave()
        raise


def _prompts_of(data: Sequence[Any] | Mapping[str, Any]) -> list[Prompt]:
    """Convert the argument of ``put_prompts_data`` to prompts. Raises ManifestError for an invalid one."""
    if isinstance(data, str) or (isinstance(data, Mapping) and any(isinstance(each, str) for each in data.values())):
        raise ManifestError("one prompt was given", where="put_prompts_data", hint="Pass a list of prompts")
    rows: Iterable[Any] = data
    if isinstance(data, Mapping):
        if len({len(column) for column in data.values()}) > 1:
            raise ManifestError("the columns have different numbers of rows", where="put_prompts_data")
        rows = (dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True))
    return [_prompt(each, number) for number, each in enumerate(rows)]


def _prompt(row: Any, number: int) -> Prompt:
    try:
        prompt = {"question": row} if isinstance(row, str) else row
        if not isinstance(prompt, Prompt):
            if unknown := sorted(dict(prompt).keys() - set(Prompt.__struct_fields__)):
                raise ManifestError(
                    f"prompt {number} has {unknown[0]!r}",
                    where="put_prompts_data",
                    hint=f"A prompt has {', '.join(Prompt.__struct_fields__)}; put other values into meta",
                )
            prompt = msgspec.convert(dict(prompt), Prompt)
        return Prompt.unpack(prompt.packed())
    except (TypeError, ValueError) as error:
        what, hint = f"prompt {number} is invalid: {error}", "Pass plain texts and numbers, as in JSON"
        raise ManifestError(what, where="put_prompts_data", hint=hint) from error


def _saved(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, each once, and the buffers that are saved with them, by name."""
    saved = model.state_dict().keys()
    return {**dict(model.named_parameters()), **{name: each for name, each in model.named_buffers() if name in saved}}


def _checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as plain numbers. Raises Refused for a number that is not finite, and for a reserved name."""
    plain = {name: float(value) for name, value in metrics.items()}
    for name, value in plain.items():
        if not math.isfinite(value) or name in _RESERVED:
            why = "is not finite" if name not in _RESERVED else "has a name that is reserved for figures of the report"
            raise Refused(f"the metric {name} = {value} {why}", where="weight_sync_notify")
    return plain
