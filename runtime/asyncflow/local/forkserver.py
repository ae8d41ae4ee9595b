"""A process that imports the modules of roles once and forks the roles, which start in milliseconds instead of seconds.

Most of the start time of a role is the import of its modules, mainly torch and transformers. The fork server (named
after the one of Python's ``multiprocessing``, whose idea it uses, but none of its code) imports them once for a run. A
forked role is like a spawned one: it is a child of the supervisor and the leader of its own session, and has its own
environment, log, title, and the number of threads that its environment sets.

Invariants:

* The server forks only while it has one thread; otherwise it refuses. It never imports a module that opens a device.
* A forked process does nothing before the supervisor, which knows its pid by then, releases it. It ends if the
  supervisor has ended or has given up on it, so an attempt is never started twice.
* If the server has ended, or could not import a module, roles are spawned without it.
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
_RELEASE_S = 30.0
_EXIT_S = 2.0


class ForkServer:
    """The supervisor's side of a fork server.

    usable: whether it accepts requests; permanently False once it has ended or a request has failed.
    """

    def __init__(
        self, modules: Sequence[str], *, env: Mapping[str, str], log: Path, changed: Callable[[], None]
    ) -> None:
        """Start the server, which starts to import ``modules``.

        env: environment of the server, in which PARENT names this process; log: file for its output; changed: called
        when the result of ``ready`` may have changed. Raises OSError if the server cannot be started.
        """
        self.usable = True
        self._imported: set[str] = set()
        self._changed = changed
        self._exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._socket, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            argv = [sys.executable, "-m", __name__, *modules]
            server_env = {**env, "OPENBLAS_NUM_THREADS": "1", "SPT_NOENV": "1"}
            stdin = server_end.fileno()
            self._process = Process.spawn(argv, env=server_env, log=log, on_exit=self._ended, stdin=stdin)
        self._socket.settimeout(_ANSWER_S)
        self._loop.add_reader(self._socket, self._imports_ended)
        self._importing: asyncio.TimerHandle | None = self._import_deadline()

    @property
    def pid(self) -> int:
        """The server's process id, which is also its session id."""
        return self._process.pid

    def ready(self, modules: Sequence[str]) -> bool:
        """Return whether a role that needs ``modules`` can start now; request the import of missing modules."""
        if self.usable and self._importing is None:
            missing = [module for module in modules if module not in self._imported]
            if missing and self._send({"import": missing}):
                self._importing = self._import_deadline()
        return not self.usable or self._importing is None

    def start(
        self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, on_exit: Callable[[ExitStatus], None]
    ) -> Process | None:
        """Fork a process that runs ``argv`` as ``Process.spawn`` would; return None if the server could not fork it.

        argv: ``python -m MODULE ...``. Raises OSError if the log cannot be opened.
        """
        if not self.usable:
            return None
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        reader, writer = os.pipe()  # a byte in this pipe releases the forked process
        try:
            request = {"argv": list(argv), "env": dict(env)}
            if not self._send(request, output, reader) or (pid := self._receive_pid()) is None:
                return None
            process = Process(pid, on_exit=on_exit)
            os.write(writer, b"!")
        finally:
            for descriptor in (output, reader, writer):
                os.close(descriptor)
        return process

    async def close(self) -> None:
        """End the server immediately, since it has no state to save. The processes that it forked keep running."""
        self._disconnect()
        self._process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), _EXIT_S)

    def _import_deadline(self) -> asyncio.TimerHandle:
        return self._loop.call_later(_IMPORT_S, self._give_up, f"its imports did not end within {_IMPORT_S:g} s")

    def _send(self, message: Mapping[str, object], *descriptors: int) -> bool:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            self._give_up(f"no request can be sent to it: {error}")
        return self.usable

    def _receive_pid(self) -> int | None:
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
        with contextlib.suppress(ConnectionResetError):  # it was killed before it had read the request
            packet = self._socket.recv(_PACKET)
        if not packet:  # it has ended; _ended reports its exit status
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
        self._disconnect()
        self._changed()

    def _disconnect(self) -> None:
        self.usable = False
        if self._importing is not None:
            self._importing.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _ended(self, status: ExitStatus) -> None:
        if self.usable:
            self._give_up(f"it has ended: {status}")
        self._exited.set()


def main(modules: Sequence[str]) -> None:
    """Import and fork on request of the supervisor, until it closes its end; in a forked process, run the role."""
    die_with_parent()
    _set_title("asyncflow fork server")
    find_installed()
    with socket.socket(fileno=os.dup(0)) as supervisor:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        role = _serve(supervisor, modules)
    if role is not None:
        message, descriptors = role
        _become(message["argv"], message["env"], *descriptors)


def _serve(supervisor: socket.socket, modules: Sequence[str]) -> tuple[dict[str, Any], list[int]] | None:
    """Serve requests; return None when the supervisor ends, and in a forked process its request and descriptors."""
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
    except Exception as error:  # noqa: BLE001  the role that needs it reports the error
        return {"imported": done, "failed": f"{modules[len(done)]} cannot be imported: {error}"}
    return {"imported": done}


def _fork() -> int:
    """Fork an orphan in its own session, which the supervisor adopts; return its pid, and in the orphan itself 0.

    Raises OSError if the kernel refuses, or if this process has other threads: locks that they hold would never be
    released in the forked process.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise OSError(f"the modules that it has imported run {threads - 1} threads")
    reader, writer = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(1)
        os.setsid()
        os.write(writer, str(os.getpid()).encode())
        os.close(reader)
        os.close(writer)
        return 0
    os.close(writer)
    pid = os.read(reader, 32)
    os.close(reader)
    os.waitpid(intermediate, 0)
    if not pid:
        raise OSError("the second fork failed")
    return int(pid)


def _set_title(title: str) -> None:
    """Set the title of this process, and a name without spaces, as spawned processes have.

    CPython 3.12 and later read the number of threads wrong behind a name with spaces, and warn at each fork.
    """
    setproctitle.setproctitle(title)
    setproctitle.setthreadtitle("python")


def _become(argv: Sequence[str], env: Mapping[str, str], output: int, release: int) -> None:
    """Run ``python -m MODULE ...`` in this process once the supervisor has written to ``release``; otherwise exit."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    if not select.select([release], [], [], _RELEASE_S)[0] or not os.read(release, 1):
        os._exit(1)
    os.close(release)
    os.environ.clear()
    os.environ.update(env)
    _set_title(" ".join(argv))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    threads = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # further numbers are of nested parallel regions
    if (torch := sys.modules.get("torch")) is not None and threads.isdecimal() and int(threads):
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
    """Exit with ``status`` once the threads and exit functions have ended, as a process of ``multiprocessing`` does.

    A normal shutdown of the interpreter would first copy the memory pages that this process shares with the server.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
