"""Stands between an operator and the API server, counts what is written, and kills the operator at a chosen write.

Invariant: the operator is killed by SIGKILL from outside, and nothing that it sends after that reaches the server, nor
counts for the next one, whose token is another; up to then it cannot tell this from the server itself. A Lease is no
write.
"""

import asyncio
import contextlib
import os
import signal
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

WRITES = ("POST", "PUT", "PATCH", "DELETE")
HOP_BY_HOP = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"))
NOT_PASSED_ON = HOP_BY_HOP | {"authorization"}


class KillingProxy:
    """Passes on to the server of ``kubeconfig`` what is asked, as the user of ``kubeconfig``.

    writes: so far; deadly: the number of the write that kills, 0 for none; answered: whether the operator may learn of
    that write, and dies as it asks for the next one, or dies before it has the answer; victim: gives its process id.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._given = yaml.safe_load(kubeconfig.read_text())
        self._folder = folder
        self._listens = threading.Event()
        self._end: Callable[[], Any] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._dead = True
        self._life = 0
        self.writes = 0
        self.deadly = 0
        self.answered = True
        self.victim: Callable[[], int] = lambda: 0
        self.kubeconfig = folder / f"{kubeconfig.name}.proxied"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listens.wait(10), "waited 10 s for the proxy to listen"
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._thread.join(10)

    def arm(self, deadly: int, *, answered: bool, victim: Callable[[], int]) -> None:
        """Kill the process ``victim``, to be started next, at write ``deadly``, counted over all; 0: let it live."""
        self._life += 1
        self._given["users"][0]["user"] = {"token": f"life-{self._life}"}
        self.kubeconfig.write_text(yaml.safe_dump(self._given))
        self.deadly, self.answered, self.victim, self._dead = deadly, answered, victim, False

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        life = self._life
        body = await request.read()
        if request.headers.get("Authorization") != f"Bearer life-{life}":
            return web.Response(status=503)
        write = request.method in WRITES and "/leases" not in request.path
        if self._dead or (write and self.deadly and self.writes >= self.deadly):
            return self._kill(life)
        number = self.writes = self.writes + write
        headers = {key: value for key, value in request.headers.items() if key.lower() not in NOT_PASSED_ON}
        async with self._session.request(
            request.method, self._server + request.raw_path, data=body or None, headers=headers
        ) as got:
            if write and number == self.deadly and not self.answered:
                await got.read()
                return self._kill(life)
            answer = web.StreamResponse(status=got.status)
            answer.headers.update({key: value for key, value in got.headers.items() if key.lower() not in HOP_BY_HOP})
            with contextlib.suppress(ConnectionResetError):  # who asked has gone
                await answer.prepare(request)
                async for chunk in got.content.iter_any():
                    await answer.write(chunk)
            return answer

    def _kill(self, life: int) -> web.Response:
        """End the operator of this life; the answer finds nobody."""
        if life == self._life and not self._dead:
            self._dead = True
            os.kill(self.victim(), signal.SIGKILL)
        return web.Response(status=503)

    async def _serve(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._end = lambda: loop.call_soon_threadsafe(ended.set)
        (cluster,), (user,) = self._given["clusters"], self._given["users"]
        self._server = cluster["cluster"]["server"]
        tls = ssl.create_default_context(cafile=cluster["cluster"]["certificate-authority"])
        tls.load_cert_chain(user["user"]["client-certificate"], user["user"]["client-key"])
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        ) as self._session:
            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", self._pass)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address: Any = runner.addresses[0]
            cluster["cluster"] = {"server": f"http://127.0.0.1:{address[1]}"}
            self._listens.set()
            await ended.wait()
            await runner.cleanup()
