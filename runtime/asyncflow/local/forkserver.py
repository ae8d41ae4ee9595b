"""A process that has imported what roles need, and forks them: a role begins in milliseconds instead of seconds.

Most of the time in which a role begins is the import of its modules, of torch and transformers above all. The fork
server (the name is that of Python's ``multiprocessing``, of which this takes the idea and no code) imports them once
for a run. A forked role is what a started one would be: a child of the supervisor, the leader of its own session, with
its own environment, log and title, and the number of threads that its environment says.

Invariants: the server has one thread when it forks, and else does not; it never imports what opens a device. A forked
process does nothing before the supervisor, which knows its pid by then, lets it; it ends where the supervisor is gone
or has given it up, so an attempt is never begun twice. Where the server has ended, or could not import a module, roles
are started without it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import runpy
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import setproctitle

from asyncflow.local.lifecycle import ExitStatus
from asyncflow.local.process import Process
from asyncflow.plugins import find_installed, importing
from asyncflow.process import die_with_parent

_log = logging.getLogger(__name__)

_PACKET = 1 << 20
"""Bytes to read for a message; more than the kernel takes for one (``net.core.wmem_max``)."""
_IMPORT_S = 120.0
_ANSWER_S = 10.0
_GO_S = 30.0
_LEAVE_S = 2.0


class ForkServer:
    """The supervisor's side of a fork server.

    usable: whether it can be asked; False for good once it has ended, or failed at anything.
    """

    def __init__(
        self, modules: Sequence[str], *, env: Mapping[str, str], log: Path, changed: Callable[[], None]
    ) -> None:
        """Start the server, which begins to import ``modules``. changed: called when ``ready`` may have changed.

        env: the environment of the server, in which PARENT names this process; log: what it has to say. Raises OSError
        where it cannot be started.
        """
        self.usable = True
        self._imported: set[str] = set()
        self._changed = changed
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-m", __name__, *modules]
            own = {**env, "OPENBLAS_NUM_THREADS": "1", "SPT_NOENV": "1"}
            self._process = Process.spawn(argv, env=own, log=log, on_exit=self._ended, stdin=theirs.fileno())
        self._socket.settimeout(_ANSWER_S)
        self._loop.add_reader(self._socket, self._imports_ended)
        self._importing: asyncio.TimerHandle | None = self._until_imported()

    @property
    def pid(self) -> int:
        """The server's process id, and session."""
        return self._process.pid

    def ready(self, modules: Sequence[str]) -> bool:
        """Return whether a role that needs ``modules`` can begin now; where they are missing, have them imported."""
        if self.usable and self._importing is None:
            missing = [module for module in modules if module not in self._imported]
            if missing and self._send({"import": missing}):
                self._importing = self._until_imported()
        return not self.usable or self._importing is None

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, on_exit: Callable[[ExitStatus], None]
    ) -> Process | None:
        """Fork a process that runs ``argv`` as ``Process.spawn`` would start it, None where none came of it.

        argv: ``python -m MODULE ...``. Raises OSError where the log cannot be opened.
        """
        if not self.usable:
            return None
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        go, held = os.pipe()
        try:
            if not self._send({"argv": list(argv), "env": dict(env)}, output, go) or (pid := self._forked()) is None:
                return None
            process = Process(pid, on_exit=on_exit)
            os.write(held, b"!")
        finally:
            for descriptor in (output, go, held):
                os.close(descriptor)
        return process

    async def close(self) -> None:
        """End the server at once: it has nothing to keep. What it has forked goes on."""
        self._leave()
        self._process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), _LEAVE_S)

    def _until_imported(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_IMPORT_S, self._give_up, f"its imports did not end within {_IMPORT_S:g} s")

    def _send(self, message: Mapping[str, object], *descriptors: int) -> bool:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            self._give_up(f"it cannot be asked: {error}")
        return self.usable

    def _forked(self) -> int | None:
        try:
            answer = json.loads(self._socket.recv(_PACKET) or b"{}")
        except OSError as error:
            answer = {"failed": f"no answer: {error}"}
        if "pid" not in answer:
            self._give_up(answer.get("failed", "it has ended"))
            return None
        return int(answer["pid"])

    def _imports_ended(self) -> None:
        packet = b""
        with contextlib.suppress(ConnectionResetError):  # it was killed before it had read what was asked
            packet = self._socket.recv(_PACKET)
        if not packet:  # the end of the process says more
            self._loop.remove_reader(self._socket)
            return
        if self._importing is not None:
            self._importing.cancel()
            self._importing = None
        answer = json.loads(packet)
        self._imported.update(answer["imported"])
        if "failed" in answer:
            self._give_up(answer["failed"])
        self._changed()

    def _give_up(self, why: str) -> None:
        _log.warning("roles are started without the fork server: %s", why)
        self._leave()
        self._changed()

    def _leave(self) -> None:
        self.usable = False
        if self._importing is not None:
            self._importing.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _ended(self, status: ExitStatus) -> None:
        if self.usable:
            self._give_up(f"it has ended: {status}")
        self._gone.set()


def main(modules: Sequence[str]) -> None:
    """Import and fork as the supervisor asks, until it closes its end; in what was forked, be the role."""
    die_with_parent()
    setproctitle.setproctitle("asyncflow fork server")
    find_installed()
    with socket.socket(fileno=os.dup(0)) as supervisor:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        role = _serve(supervisor, modules)
    if role is not None:
        message, descriptors = role
        _become(message["argv"], message["env"], *descriptors)


def _serve(supervisor: socket.socket, modules: Sequence[str]) -> tuple[dict[str, Any], list[int]] | None:
    """Return None at the supervisor's end, and in a process that was forked the request and its descriptors."""
    answer: dict[str, object] = _import(modules)
    while True:
        supervisor.send(json.dumps(answer).encode())
        packet, descriptors, _, _ = socket.recv_fds(supervisor, _PACKET, 2)
        if not packet:
            return None
        request = json.loads(packet)
        if "import" in request:
            answer = _import(request["import"])
            continue
        try:
            pid = _fork()
        except OSError as error:
            answer = {"failed": f"it cannot fork: {error}"}
        else:
            if pid == 0:
                return request, descriptors
            answer = {"pid": pid}
        for descriptor in descriptors:
            os.close(descriptor)


def _import(modules: Sequence[str]) -> dict[str, object]:
    done: list[str] = []
    try:
        with importing():
            for module in modules:
                import_module(module)
                done.append(module)
    except Exception as error:  # noqa: BLE001  the role that needs it says what is wrong with it
        return {"imported": done, "failed": f"{modules[len(done)]} cannot be imported: {error}"}
    return {"imported": done}


def _fork() -> int:
    """Fork an orphan, which the supervisor adopts, in a session of its own; return its pid, and 0 in it.

    Raises OSError where the kernel refuses, or where a thread runs, whose locks nobody would ever release there.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise OSError(f"what it has imported runs {threads - 1} threads")
    heard, told = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(1)
        os.setsid()
        os.write(told, str(os.getpid()).encode())
        os.close(heard)
        os.close(told)
        return 0
    os.close(told)
    pid = os.read(heard, 32)
    os.close(heard)
    os.waitpid(between, 0)
    if not pid:
        raise OSError("the second fork failed")
    return int(pid)


def _become(argv: Sequence[str], env: Mapping[str, str], output: int, go: int) -> None:
    """Run ``python -m MODULE ...`` in this process as soon as the supervisor says so, else end."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    if not select.select([go], [], [], _GO_S)[0] or not os.read(go, 1):
        os._exit(1)
    os.close(go)
    os.environ.clear()
    os.environ.update(env)
    setproctitle.setproctitle(" ".join(argv))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None and (threads := env.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads))
    sys.argv = list(argv[2:])
    try:
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        _end(ended.code)
    _end(0)


def _end(status: int | None) -> None:
    """End this process as ``multiprocessing`` ends what it has forked, once its threads and exit functions have ended.

    An interpreter that takes itself apart would first copy, page by page, what it shares with the server.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
