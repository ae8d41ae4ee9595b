"""One vLLM server as a child of this process, and the HTTP client that talks to it over a Unix socket.

The socket is in a folder that only this user can enter, because vLLM's weight and pause routes have no authentication.

Invariants: the server and all of its processes end with ``close``, when one of them ends, and when this process ends in
any way. A call to a server that has ended raises immediately, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypedDict, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, PeerLost
from asyncflow.process import PARENT, scratch_folder
from asyncflow.rollout.engines.base import OPTIONS
from asyncflow.rollout.engines.vllm.program import REFUSED, ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.25
_END_S = 10.0
_QUOTED = 500
_EVENT, _LAST = b"data: ", b"data: [DONE]"
_LINE = 1 << 20
"""Longest event in bytes."""
_LONGEST_FOLDER = 100
"""Most characters of the path of a folder with a socket: Linux allows 107 for the socket's own path."""
_RELAYED = ("Accept", "Content-Type")
"""Headers of clients' requests that are passed on."""
_ALWAYS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of every server: weight routes, processes spawned so that they end with their parent, no telemetry."""


class _Routes(TypedDict):
    """The part of /openapi.json that is read."""

    paths: dict[str, Any]


class VllmServer:
    """Server of one model. env: added to this process's environment; start_s: seconds within which it must answer."""

    def __init__(self, *, env: Mapping[str, str], start_s: float) -> None:
        self.paths: frozenset[str] = frozenset()
        self._env = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **_ALWAYS, **env, PARENT: str(os.getpid())}
        self._start_s = start_s
        self._folder = scratch_folder(longest=_LONGEST_FOLDER)
        self._why = "its log above says why"
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._ended: asyncio.Task[int] | None = None

    async def start(
        self,
        *,
        required: Mapping[str, Any],
        optional: Mapping[str, Any],
        given: Mapping[str, Any],
        device: str,
        deterministic: bool,
    ) -> None:
        """Start the server and wait until it answers; see ``ServerSettings``.

        Raises ManifestError for settings that the installed vLLM cannot fulfil, PeerLost if it ends, DeadlineExceeded.
        """
        refusal, socket = self._folder / "refusal", self._folder / "socket"
        settings = ServerSettings(
            required={**required, "uds": str(socket)},
            optional=dict(optional),
            given=dict(given),
            device=device,
            deterministic=deterministic,
            refusal=str(refusal),
        )
        program, words = "asyncflow.rollout.engines.vllm.program", msgspec.json.encode(settings).decode()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", program, words, stdin=asyncio.subprocess.DEVNULL, env=self._env, process_group=0
        )
        self._ended = asyncio.create_task(self._process.wait(), name="vLLM server")
        self._session = aiohttp.ClientSession(
            "http://vllm",
            connector=aiohttp.UnixConnector(path=str(socket), limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE,
        )
        started = time.monotonic()
        while not await self._answers():
            if self._ended.done() and self._process.returncode == REFUSED and refusal.exists():
                hint = "The options are those of vllm serve, with underscores"
                raise ManifestError(refusal.read_text(encoding="utf-8"), where=f"{OPTIONS}.args", hint=hint)
            self.check()
            if time.monotonic() - started > self._start_s:
                raise DeadlineExceeded(
                    f"the vLLM server does not answer after {self._start_s:g} s",
                    where="spec.rollout.engine",
                    hint=f"See its log above, or raise {OPTIONS}.start_s",
                )
            await asyncio.wait([self._ended], timeout=_POLL_S)
        self.paths = frozenset((await self.call("GET", "/openapi.json", _Routes, within_s=self._start_s))["paths"])
        log.info("the vLLM server answers after %.1f s, pid %d", time.monotonic() - started, self._process.pid)

    async def _answers(self) -> bool:
        assert self._session is not None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        return False

    def check(self) -> None:
        """Raise PeerLost if the server has ended."""
        if self._ended is not None and self._ended.done():
            assert self._process is not None
            raise PeerLost(
                f"the vLLM server ended with status {self._process.returncode}: {self._why}",
                where="spec.rollout.engine",
            )

    async def ended(self) -> None:
        """Wait until the server has ended, and raise PeerLost."""
        assert self._ended is not None
        await asyncio.wait([self._ended])
        self.check()

    async def call(
        self, method: str, path: str, kind: type[T], *, body: object = None, within_s: float | None, **query: str
    ) -> T:
        """Call the server and return its answer, decoded as ``kind``.

        within_s: timeout, None to wait until the server ends. Raises PeerLost if it ends meanwhile, DeadlineExceeded,
        and AsyncFlowError for an error or an answer that is not a ``kind``.
        """
        return _decode(await self._fetch(method, path, body, query, within_s) or b"{}", path, kind)

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Forward a client's request to the server, and stream the answer back.

        The answer is 502 if the server gives none. If its answer breaks off, the client's connection is aborted. When
        this is cancelled, or the client disconnects, the connection to the server is closed, and vLLM drops the
        request.
        """
        assert self._session is not None
        headers = {name: request.headers[name] for name in _RELAYED if name in request.headers}
        body = await request.read() if request.can_read_body else None
        response: web.StreamResponse | None = None
        try:
            self.check()
            async with self._session.request(request.method, request.rel_url, data=body, headers=headers) as answer:
                response = web.StreamResponse(
                    status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
                )
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
        except (aiohttp.ClientError, OSError, PeerLost) as error:
            if response is None:
                raise web.HTTPBadGateway(text=f"vLLM gives no answer: {error}\n") from error
            log.info("an answer of vLLM to %s was broken off: %r", request.path, error)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def text(self, path: str, *, within_s: float) -> str:
        """Return the answer to GET ``path`` as text. Raises like ``call``."""
        return (await self._fetch("GET", path, None, {}, within_s)).decode()

    async def _fetch(
        self, method: str, path: str, body: object, query: Mapping[str, str], within_s: float | None
    ) -> bytes:
        async with self._open_response(method, path, body, query, within_s) as answer:
            return await answer.read()

    async def events(self, path: str, kind: type[T], *, body: object) -> AsyncGenerator[T]:
        """Call POST ``path`` and yield the events of its answer, each decoded as ``kind``. Raises like ``call``."""
        async with self._open_response("POST", path, body, {}, None) as answer:
            async for line in answer.content:
                if not line.startswith(_EVENT) or line.startswith(_LAST):
                    continue
                event = line.removeprefix(_EVENT)
                if (error := _decode(event, path, dict[str, Any]).get("error")) is not None:
                    await self._raise_if_ending()
                    what = f"vLLM ended its answer to {path}: {str(error)[:_QUOTED]}"
                    raise AsyncFlowError(what, where="spec.rollout.engine")
                yield _decode(event, path, kind)

    @contextlib.asynccontextmanager
    async def _open_response(
        self, method: str, path: str, body: object, query: Mapping[str, str], within_s: float | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Make a call, and yield its successful response for reading."""
        assert self._session is not None
        self.check()
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._session.request(
                method, path, data=content, headers=headers, params=dict(query), timeout=timeout
            ) as answer:
                if answer.status != 200:
                    error_text = (await answer.read()).decode(errors="replace")[:_QUOTED]
                    await self._raise_if_ending()
                    raise AsyncFlowError(
                        f"vLLM answered {answer.status} to {path}: {error_text}", where="spec.rollout.engine"
                    )
                yield answer
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"vLLM did not answer {path} within {within_s:g} s", where="spec.rollout.engine"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            await self._raise_if_ending()
            raise PeerLost(f"the vLLM server cannot be reached: {error}", where="spec.rollout.engine") from error

    async def _raise_if_ending(self) -> None:
        """Raise PeerLost if the server ends shortly after a failed call, which is often the first sign of its end."""
        assert self._ended is not None
        await asyncio.wait([self._ended], timeout=1.0)
        self.check()

    async def close(self, *, why: str) -> None:
        """End the server by SIGTERM, then by SIGKILL. Idempotent. why: the reason in the errors of later calls."""
        if self._process is not None and self._ended is not None and not self._ended.done():
            self._why = why
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                await asyncio.wait([self._ended], timeout=_END_S)
                if self._ended.done():
                    break
        if self._session is not None:
            await self._session.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _decode(data: bytes, path: str, kind: type[T]) -> T:
    """Decode ``data``. Raises AsyncFlowError if it is not JSON, or not a ``kind``."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AsyncFlowError(
            f"vLLM's answer to {path} cannot be read: {error}: {data[:_QUOTED].decode(errors='replace')}",
            where="spec.rollout.engine",
            hint="Install a tested version of vLLM (docs/guide/vllm.md)",
        ) from error
