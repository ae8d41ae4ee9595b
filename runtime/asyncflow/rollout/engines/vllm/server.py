"""One vLLM server as a child of this process, and the HTTP client that speaks to it over a Unix socket.

The socket lies in a folder that only this user can enter: vLLM's weight and pause routes have no key of their own.

Invariant: the server and all of its processes end with ``close``, when one of them ends, and when this process ends in
whatever way; a call to a server that has ended raises at once and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, PeerLost
from asyncflow.process import PARENT
from asyncflow.rollout.engines.base import OPTIONS
from asyncflow.rollout.engines.vllm.program import REFUSED, ServerSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.25
_END_S = 10.0
_QUOTED = 500
_EVENT, _LAST = b"data: ", b"data: [DONE]"
_LINE = 1 << 20
"""Bytes of the longest event."""
_LONGEST_FOLDER = 70
_RELAYED = ("Accept", "Content-Type")
"""Headers of others' requests that are passed on."""
_ALWAYS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of every server: routes for weights, processes that end with their parent, nothing told to anybody."""


class _Routes(TypedDict):
    """The part of /openapi.json that is used."""

    paths: dict[str, Any]


class VllmServer:
    """A server of one model. env: added to this process's environment; start_s: seconds until it must answer."""

    def __init__(self, *, env: Mapping[str, str], start_s: float) -> None:
        self.paths: frozenset[str] = frozenset()
        self._env = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ, **_ALWAYS, **env, PARENT: str(os.getpid())}
        self._start_s = start_s
        self._folder = Path(tempfile.mkdtemp(prefix="asyncflow-vllm-", dir=_short(tempfile.gettempdir())))
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

        Raises ManifestError for what the installed vLLM cannot do, PeerLost where it ends, DeadlineExceeded.
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
        began = time.monotonic()
        while not await self._answers():
            if self._ended.done() and self._process.returncode == REFUSED and refusal.exists():
                hint = "The options are those of `vllm serve`, with underscores"
                raise ManifestError(refusal.read_text(encoding="utf-8"), where=f"{OPTIONS}.args", hint=hint)
            self.check()
            if time.monotonic() - began > self._start_s:
                raise DeadlineExceeded(
                    f"the vLLM server does not answer after {self._start_s:g} s",
                    where="rollout.engine",
                    hint=f"See its log above, or raise {OPTIONS}.start_s",
                )
            await asyncio.wait([self._ended], timeout=_POLL_S)
        self.paths = frozenset((await self.call("GET", "/openapi.json", _Routes, within_s=self._start_s))["paths"])
        log.info("the vLLM server answers after %.1f s, pid %d", time.monotonic() - began, self._process.pid)

    async def _answers(self) -> bool:
        assert self._session is not None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        return False

    def check(self) -> None:
        """Raise PeerLost where the server has ended."""
        if self._ended is not None and self._ended.done():
            assert self._process is not None
            raise PeerLost(
                f"the vLLM server ended with status {self._process.returncode}: {self._why}", where="rollout.engine"
            )

    async def ended(self) -> None:
        """Wait until the server has ended, and raise PeerLost."""
        assert self._ended is not None
        await asyncio.wait([self._ended])
        self.check()

    async def call(
        self, method: str, path: str, kind: type[T], *, body: object = None, within_s: float | None, **query: str
    ) -> T:
        """Call the server and return its answer, a ``kind``.

        within_s: None where only the end of the server ends the waiting. Raises PeerLost where it ends meanwhile,
        DeadlineExceeded, and AsyncFlowError for an answer that is an error or no ``kind``.
        """
        return _read(await self._fetch(method, path, body, query, within_s) or b"{}", path, kind)

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Ask the server what was asked here, and pass on its answer as it comes.

        The answer is 502 where the server gives none; where it breaks off, so does the connection of the caller. When
        this is cancelled, or the caller is gone, the server's connection is closed, at which vLLM drops the request.
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
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
        except (aiohttp.ClientError, OSError, PeerLost) as error:
            if response is None:
                raise web.HTTPBadGateway(text=f"vLLM gives no answer: {error}\n") from error
            log.info("an answer of vLLM to %s was broken off: %r", request.path, error)
            if request.transport is not None:
                request.transport.abort()
        return response

    async def text(self, path: str, *, within_s: float) -> str:
        """Return the answer to GET ``path`` as text; raises as ``call`` does."""
        return (await self._fetch("GET", path, None, {}, within_s)).decode()

    async def _fetch(
        self, method: str, path: str, body: object, query: Mapping[str, str], within_s: float | None
    ) -> bytes:
        async with self._answered(method, path, body, query, within_s) as answer:
            return await answer.read()

    async def events(self, path: str, kind: type[T], *, body: object) -> AsyncGenerator[T]:
        """Call POST ``path`` and yield the events of its answer, each a ``kind``, as they come; raises as ``call``."""
        async with self._answered("POST", path, body, {}, None) as answer:
            async for line in answer.content:
                if not line.startswith(_EVENT) or line.startswith(_LAST):
                    continue
                event = line.removeprefix(_EVENT)
                if (error := _read(event, path, dict[str, Any]).get("error")) is not None:
                    await self._soon_ended()
                    what = f"vLLM ended its answer to {path}: {str(error)[:_QUOTED]}"
                    raise AsyncFlowError(what, where="rollout.engine")
                yield _read(event, path, kind)

    @contextlib.asynccontextmanager
    async def _answered(
        self, method: str, path: str, body: object, query: Mapping[str, str], within_s: float | None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Make a call, and yield its answer, which is no error, to be read."""
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
                    said = (await answer.read()).decode(errors="replace")[:_QUOTED]
                    await self._soon_ended()
                    raise AsyncFlowError(f"vLLM answered {answer.status} to {path}: {said}", where="rollout.engine")
                yield answer
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"vLLM did not answer {path} within {within_s:g} s", where="rollout.engine"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            await self._soon_ended()
            raise PeerLost(f"the vLLM server cannot be reached: {error}", where="rollout.engine") from error

    async def _soon_ended(self) -> None:
        """Raise PeerLost where a failed call is the first sign of a server that is ending."""
        assert self._ended is not None
        await asyncio.wait([self._ended], timeout=1.0)
        self.check()

    async def close(self, *, why: str) -> None:
        """End the server: in order, then by force. Idempotent. why: the reason in the errors of later calls."""
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


def _read(data: bytes, path: str, kind: type[T]) -> T:
    """Return what ``data`` says. Raises AsyncFlowError where it is no JSON, or no ``kind``."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AsyncFlowError(
            f"vLLM's answer to {path} cannot be read: {error}: {data[:_QUOTED].decode(errors='replace')}",
            where="rollout.engine",
            hint="Install a vLLM that was tried (docs/guide/vllm.md)",
        ) from error


def _short(folder: str) -> str:
    """Return ``folder``, or one whose sockets have names that a socket may have."""
    return folder if len(folder) < _LONGEST_FOLDER else "/tmp"  # noqa: S108  mkdtemp makes a folder of its own there
