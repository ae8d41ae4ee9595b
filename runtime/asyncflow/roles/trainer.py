"""The trainer: the launcher of a replica's ranks, and one rank, which connects ``Trainer`` with its queue, weights,
backend and checkpoints.

If a replica has several ranks, the process that the substrate started is their launcher, like torchrun: it starts the
ranks as separate processes, forwards the signal that ends it, and answers ``/healthz``, ``/readyz`` and ``/metrics``
for all of them. Each rank is a member of the job, under its number among the ranks of all replicas. A rank that has
made the last step keeps serving its versions until the driver stops it.

Invariants: no rank outlives its launcher, however the launcher ends. When one rank fails, the other ranks of the
replica end within ``END_S`` seconds. The exit status is that of the rank that failed first. A replica is ready when all
of its ranks are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Protocol

import msgspec
from aiohttp import web
from prometheus_client.exposition import choose_encoder

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.graph import trained_columns
from asyncflow.api.job import RLJobSpec
from asyncflow.api.placement import PROFILES
from asyncflow.driver.tasks import TRAIN
from asyncflow.flow.schedule import Schedule
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.plan.job import critic_role, plan
from asyncflow.process import PARENT
from asyncflow.queue.client import QueueClient
from asyncflow.roles.backend import EXPORT, EXPORT_BEST, backend_settings, export_best, export_weights, kind_of_backend
from asyncflow.roles.context import JobContext, RoleOptions, run_role
from asyncflow.rpc.http import HttpServer
from asyncflow.rpc.membership import Directives, Membership
from asyncflow.rpc.server import RpcServer
from asyncflow.telemetry.metrics import TrainerMetrics, by_rank
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.checkpoint import BestCheckpoints, Checkpoints
from asyncflow.training.critic import CriticLink
from asyncflow.training.ranks import GatherService, HostProcessGroup, ProcessGroup, SingleProcess
from asyncflow.training.recording import StepRecorder
from asyncflow.training.report import ReportReply, TrainReport
from asyncflow.training.settings import BackendSettings, TrainerSettings
from asyncflow.training.trainer import Trainer
from asyncflow.weights.sender import WeightSender

log = logging.getLogger(__name__)

REPORT_S = 10.0
END_S = 2.0
"""Seconds from SIGTERM to SIGKILL for the remaining ranks after one has failed."""
_ANSWER_S = 0.8
"""Timeout of a rank's answer in seconds; it must be less than the kubelet's probe timeout of one second."""
_BY_SIGNAL = 128


class MakeBackend(Protocol):
    """Factory of a rank's backend, usually its class."""

    def __call__(self, settings: BackendSettings, *, group: ProcessGroup) -> TrainerBackend:
        """Return the backend, not loaded."""


def main(options: RoleOptions) -> int:
    """Run one rank, or the launcher of a replica's ranks."""
    return run_role(_serve, options)


async def _serve(context: JobContext) -> int | None:
    if context.launches:
        return await serve_ranks(context)
    await serve(context)
    return None


async def serve(context: JobContext, *, make_backend: MakeBackend | None = None) -> None:
    """Train to the last step, then serve weights until this process is to stop.

    make_backend: factory of the backend, by default that of the manifest.
    """
    spec, options, metrics = context.job.spec, context.options, TrainerMetrics()
    if make_backend is None:
        make_backend = kind_of_backend(spec, device=PROFILES[spec.trainer.accelerator.profile].device)
    server = RpcServer(
        name=f"trainer-{options.index}", bind=context.bind, credentials=context.credentials, access=context.access
    )
    path, kept = options.workdir / "checkpoints", spec.storage.checkpoints
    keeper: BestCheckpoints | None = None
    if kept.keep_best is not None:
        evaluates = Schedule.of(spec).evaluates
        keeper = BestCheckpoints(path, by=kept.keep_best, evaluates=evaluates, directives=lambda: membership.directives)
    checkpoints = Checkpoints(path, keep=kept.keep, also=keeper.keeps if keeper is not None else None)
    if options.index == 0:
        gathering = GatherService(attempt=options.attempt, world=spec.trainer.ranks, progress=checkpoints.progress)
        gathering.attach(server)
    address = await server.start()
    trainer: Trainer | None = None
    exported, exports = asyncio.Event(), dict[str, int]()

    def status() -> dict[str, object]:
        if trainer is None:
            return {"step": 0, "busy_s": 0.0}
        best = {"best": msgspec.to_builtins(keeper.best)} if keeper is not None and keeper.best is not None else {}
        return {**trainer.status(), **best, "exported": exported.is_set(), "exports": exports}

    def ready() -> tuple[bool, str]:
        is_ready = trainer is not None and trainer.begun
        return is_ready, "ready" if is_ready else "its first weights are not published yet"

    membership = await context.join(metrics=metrics, address=address, status=status, ready=ready)
    group = _group(context, membership)
    sender = WeightSender(
        membership=membership,
        worker=context.worker,
        transport=context.transport(spec.trainer.accelerator),
        part=options.index,
        parts=spec.trainer.ranks,
    )
    await sender.start()
    queue = QueueClient.of(membership, credentials=context.credentials)
    folder = materialize_config(spec.model.source, options.workdir)
    settings = backend_settings(spec, host=context.host, local_rank=options.local_rank or 0)
    backend = make_backend(settings, group=group)
    if settings.critic is not None and (critic := critic_role(spec)) is not None:
        backend.critic_link = CriticLink(
            rank=group.rank,
            attempt=options.attempt,
            find=partial(membership.address, "critic"),
            replicas=critic.replicas,
            loop=asyncio.get_running_loop(),
            credentials=context.credentials,
            patience_s=spec.limits.stall_seconds,
        )
    starts_with_model = backend.of_model and not spec.trainer.external
    trainer = Trainer(
        queue=queue,
        sender=sender,
        backend=backend,
        group=group,
        checkpoints=checkpoints,
        report=lambda report: _report(membership, metrics, report),
        directives=lambda: membership.directives,
        settings=trainer_settings(spec, attempt=options.attempt),
        folder=folder,
        failed=metrics.checkpoint_failures.inc,
        announced=metrics.publish_seconds.observe,
        saved=metrics.checkpoint_seconds.observe,
        spans=context.spans,
        materialise=lambda: materialize_weights(spec.model.source, folder) if starts_with_model else None,
        recorder=StepRecorder(options.workdir, rank=options.index, attempt=options.attempt),
    )
    metrics.watch_busy(trainer.meter.busy)
    leaving = asyncio.create_task(context.call_when_leaving(trainer.leave))
    step = await trainer.run()
    if step >= spec.algorithm.steps:
        if backend.of_model:
            await asyncio.to_thread(
                export_weights, spec, backend, folder, run=options.workdir, target=options.workdir / EXPORT
            )
            exports[EXPORT] = step
        if keeper is not None:
            is_decided = await _wait_for_evaluation(context, membership, step)
            if is_decided and options.index == 0:
                await asyncio.to_thread(checkpoints.prune, options.attempt)
            if backend.of_model:
                best = await asyncio.to_thread(
                    export_best,
                    spec,
                    backend,
                    folder,
                    checkpoints=checkpoints,
                    best=(keeper.best.step if keeper.best is not None else 0) if is_decided else None,
                    last=step,
                    run=options.workdir,
                    target=options.workdir / EXPORT_BEST,
                )
                exports |= {EXPORT_BEST: best} if best is not None else {}
        exported.set()
        membership.report_soon()
    await context.stopping.wait()
    leaving.cancel()
    backend.close()
    if backend.critic_link is not None:
        await backend.critic_link.close()
    await group.close()
    await sender.close()
    await membership.close()
    await server.close()


async def _wait_for_evaluation(context: JobContext, membership: Membership, step: int) -> bool:
    """Wait until the evaluation of θ_step is decided; return False if this process is to end before."""
    decided = asyncio.Event()

    def check(directives: Directives) -> None:
        if directives.judged >= step:
            decided.set()

    membership.on_directives.append(check)
    check(membership.directives)
    waits = [asyncio.create_task(event.wait()) for event in (decided, context.stopping)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return decided.is_set()


async def _report(membership: Membership, metrics: TrainerMetrics, report: TrainReport) -> None:
    count_step(metrics, report)
    await membership.driver.call("driver.report", report, ReportReply, timeout=REPORT_S)


def count_step(metrics: TrainerMetrics, report: TrainReport) -> None:
    """Update the metrics with the report of one step."""
    metrics.step.set(report.step)
    metrics.tokens.labels("prompt").inc(report.tokens - report.response_tokens - report.observation_tokens)
    metrics.tokens.labels("response").inc(report.response_tokens)
    metrics.tokens.labels("observation").inc(report.observation_tokens)
    metrics.steps_skipped.inc(report.metrics.get("skipped", 0.0))
    metrics.wait_seconds.observe(report.seconds.wait)
    for name, gauge in (("loss", metrics.loss), ("grad_norm", metrics.grad_norm), ("approx_kl", metrics.approx_kl)):
        if name in report.metrics:
            gauge.set(report.metrics[name])
    for name, value in report.metrics.items():
        if name.startswith("correction_"):
            metrics.correction.labels(name.removeprefix("correction_")).set(value)


def _group(context: JobContext, membership: Membership) -> ProcessGroup:
    world = context.job.spec.trainer.ranks
    if world == 1:
        return SingleProcess()

    def leader() -> str | None:
        member = membership.peer("trainer", 0)
        return member.address if member is not None and member.attempt == context.options.attempt else None

    return HostProcessGroup(
        rank=context.options.index,
        world=world,
        attempt=context.options.attempt,
        leader=leader,
        loop=asyncio.get_running_loop(),
        credentials=context.credentials,
        patience_s=context.job.spec.limits.stall_seconds,
    )


def trainer_settings(spec: RLJobSpec, *, attempt: int) -> TrainerSettings:
    """Return the settings of the job for the ranks of an attempt."""
    return TrainerSettings(
        schedule=Schedule.of(spec),
        partition=TRAIN,
        attempt=attempt,
        whole=spec.schedule.whole_steps,
        epochs=spec.algorithm.epochs,
        mini_batches=spec.algorithm.mini_batches,
        published=spec.published_dtype if spec.trainer.lora is None else "float32",
        decided=algorithm_of(spec).writes,
        checkpoint_every=spec.storage.checkpoints.every,
        checkpoint_evaluated=spec.storage.checkpoints.keep_best is not None,
        extra_columns=trained_columns(spec),
        leave_s=spec.limits.stop_seconds / 4,
    )


async def serve_ranks(context: JobContext) -> int:
    """Run all ranks of this replica to their end; return the exit status of the first that failed, 0 if none did.

    Raises Refused if the HTTP port is taken, and OSError if a rank cannot be started.
    """
    launcher = _Launcher(context)
    agree, metrics = launcher.agree, launcher.metrics
    http = HttpServer([web.get("/healthz", agree), web.get("/readyz", agree), web.get("/metrics", metrics)])
    await http.start(context.host, context.options.http_port)
    status = await launcher.run()
    await http.close()
    return status


@dataclass(frozen=True, slots=True)
class _Rank:
    """A started rank. number: its number among all ranks; host, port: address of its HTTP service."""

    number: int
    process: Process
    host: str
    port: int

    async def ask(self, path: str) -> tuple[int, bytes]:
        """Return status and body of the rank's answer to GET ``path``; 503 and the reason without an answer in time."""
        return await asyncio.to_thread(self._ask, path)

    def _ask(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection(self.host, self.port, timeout=_ANSWER_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, HTTPException) as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"no answer: {error}\n".encode()
        finally:
            connection.close()


class _Launcher:
    """Starts, watches and ends the ranks of the replica at ``context``."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._ranks: list[_Rank] = []
        self._status = 0

    async def run(self) -> int:
        for local_rank in range(self._context.job.spec.trainer.local_ranks):
            self._ranks.append(await self._start(local_rank))
        log.info("its ranks: %s", ", ".join(f"{rank.number} (pid {rank.process.pid})" for rank in self._ranks))
        forwarding = asyncio.create_task(self._forward_signal())
        await asyncio.gather(*map(self._watch, self._ranks))
        forwarding.cancel()
        return self._status

    async def agree(self, request: web.Request) -> web.Response:
        """Answer 200 if all ranks do, otherwise 503 with the first negative answer."""
        answers = await self._ask_all(request.path)
        for number, (status, body) in answers.items():
            if status != HTTPStatus.OK:
                text = f"rank {number}: {body.decode(errors='replace')}"
                return web.Response(text=text, status=HTTPStatus.SERVICE_UNAVAILABLE)
        if not answers:
            return web.Response(text="starting\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return web.Response(text=next(iter(answers.values()))[1].decode())

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer with the metrics of all ranks that respond in time, each with the label ``rank``."""
        answers = await self._ask_all(request.path)
        texts = {str(number): body.decode() for number, (status, body) in answers.items() if status == HTTPStatus.OK}
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(by_rank(texts)), headers={"Content-Type": content_type})

    async def _ask_all(self, path: str) -> Mapping[int, tuple[int, bytes]]:
        ranks = tuple(self._ranks)
        answers = await asyncio.gather(*(rank.ask(path) for rank in ranks))
        return {rank.number: answer for rank, answer in zip(ranks, answers, strict=True)}

    async def _start(self, local_rank: int) -> _Rank:
        """Start a rank, and pass it a bound socket for its HTTP service, so that the launcher knows the port."""
        context, options = self._context, self._context.options
        role = plan(context.job).role("trainer")
        variables = role.rank_variables(options.index, local_rank=local_rank)
        family = socket.AF_INET6 if ":" in context.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.bind((context.host, 0))
            command = role.command(
                index=int(variables["RANK"]),
                attempt=options.attempt,
                driver=options.driver,
                job=str(options.job),
                workdir=str(options.workdir),
                python=sys.executable,
            )
            process = await asyncio.create_subprocess_exec(
                *command,
                "--local-rank",
                str(local_rank),
                "--http-socket",
                str(bound.fileno()),
                stdin=DEVNULL,
                env={**os.environ, **variables, PARENT: str(os.getpid())},
                pass_fds=[bound.fileno()],
            )
            return _Rank(int(variables["RANK"]), process, context.host, bound.getsockname()[1])

    async def _watch(self, rank: _Rank) -> None:
        code = await rank.process.wait()
        if code and not self._status:
            self._status = code if code > 0 else _BY_SIGNAL - code
            if not self._context.stopping.is_set():
                how = f"exit status {code}" if code > 0 else signal.Signals(-code).name
                log.error("rank %d ended with %s: ending the other ranks of this replica", rank.number, how)
                self._send(signal.SIGTERM, signal.SIGCONT)
                asyncio.get_running_loop().call_later(END_S, self._send, signal.SIGKILL)

    async def _forward_signal(self) -> None:
        """Send the signal that ends this process to the ranks; its sender decides how long they may take."""
        await self._context.stopping.wait()
        self._send(signal.Signals(self._context.signal), signal.SIGCONT)

    def _send(self, *numbers: signal.Signals) -> None:
        for rank in self._ranks:
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.send_signal(number)
