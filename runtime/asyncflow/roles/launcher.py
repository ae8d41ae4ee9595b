"""The launcher of a trainer replica's ranks.

If a replica has several ranks, the process that the substrate started is their launcher, like torchrun: it starts the
ranks as separate processes, forwards the signal that ends it, and answers ``/healthz``, ``/readyz`` and ``/metrics``
for all of them.

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
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from asyncflow.plan.job import plan
from asyncflow.process import PARENT
from asyncflow.roles.context import JobContext
from asyncflow.rpc.http import HttpServer
from asyncflow.telemetry.collectors import by_rank

log = logging.getLogger(__name__)

END_S = 2.0
"""Seconds from SIGTERM to SIGKILL for the remaining ranks after one has failed."""
_ANSWER_S = 0.8
"""Timeout of a rank's answer in seconds; it must be less than the kubelet's probe timeout of one second."""
_BY_SIGNAL = 128


async def launch_ranks(context: JobContext) -> int:
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
