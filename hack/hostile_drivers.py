"""A server that plays the drivers of many jobs, honest and hostile; the operator's ``--probe-url`` points to it.

    with HostileDrivers(folder / "drivers") as drivers: OperatorProcess(plane, probe_url=drivers.url)

A job named ``KIND-anything``, with a kind of ``KINDS``, has that hostile driver; any other job has an honest one that
answers immediately. Honest and hostile answers come from separate processes, so that no flood slows an honest answer.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

from kube.process import Process, wait_until

_JSON: Final = "Content-Type: application/json\r\n"
_OK: Final = f"HTTP/1.1 200 OK\r\n{_JSON}"
_ZEROS: Final = b"0" * (64 << 10)
_BOMB: Final = gzip.compress(b"0" * (1 << 20)) * 4096
_TOO_MANY: Final = 10_000
_AT_ONCE: Final = 512

Said = Iterator[bytes]


def _whole(status: dict[str, Any]) -> bytes:
    body = json.dumps(status).encode()
    return f"{_OK}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _honest(step: int) -> bytes:
    return _whole({"phase": "Running", "step": step, "steps": 1_000_000, "version": step})


def _gigabyte() -> Said:
    yield f"{_OK}Content-Length: {1 << 30}\r\n\r\n".encode()
    yield from itertools.repeat(_ZEROS, (1 << 30) // len(_ZEROS))


def _refusal() -> Said:
    yield f"HTTP/1.1 500 No\r\n{_JSON}Content-Length: {1 << 30}\r\n\r\n".encode()
    yield from itertools.repeat(_ZEROS, (1 << 30) // len(_ZEROS))


def _bomb() -> Said:
    yield f"{_OK}Content-Encoding: gzip\r\nContent-Length: {len(_BOMB)}\r\n\r\n".encode()
    yield _BOMB


def _endless() -> Said:
    yield f"{_OK}Transfer-Encoding: chunked\r\n\r\n".encode()
    yield from itertools.repeat(b"10000\r\n" + _ZEROS + b"\r\n")


def _small_chunks() -> Said:
    yield f"{_OK}Transfer-Encoding: chunked\r\n\r\n".encode()
    yield from itertools.repeat(b"1\r\n0\r\n" * 1000)


def _redirect() -> Said:
    yield b"HTTP/1.1 302 Found\r\nLocation: /jobs/gigabyte-there/v1/status\r\nContent-Length: 0\r\n\r\n"


def _drip() -> Said:
    for letter in f"{_OK}X: ".encode() + b"y" * 1000:
        yield bytes([letter])
        time.sleep(10)


def _trickle() -> Said:
    yield f"{_OK}Content-Length: 9999\r\n\r\n".encode()
    while True:
        yield b" "
        time.sleep(0.01)


def _interim() -> Said:
    yield from itertools.repeat(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000)


def _pipelined() -> Said:
    yield _honest(1)
    yield from itertools.repeat(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" * 1000)


def _headers() -> Said:
    yield b"HTTP/1.1 200 OK\r\n"
    yield from itertools.repeat(b"X-Padding: " + b"y" * 4000 + b"\r\n")


def _crowd() -> Said:
    yield _whole({"rollouts": [{"id": f"{number:0128}", "index": number} for number in range(_TOO_MANY)]})


def _liar() -> Said:
    huge = 10**30
    yield _whole({"phase": "Running", "step": huge, "steps": huge, "attempt": huge, "etaSeconds": 1e300})


def _flapping() -> Said:
    yield _whole({"phase": "Suspended" if int(time.time()) % 2 else "Running", "attempt": int(time.time()) % 1000})


def _shouting() -> Said:
    yield _whole({"phase": "Running", "waitingFor": "\x1b[31m" + "\x00" * 1000, "eval": 1e308, "reward": -1e308})


def _late() -> Said:
    time.sleep(2.8)
    yield _honest(1)


def _silent() -> Said:
    time.sleep(60)
    yield b""


KINDS: Final[dict[str, Callable[[], Said]]] = {
    "gigabyte": _gigabyte,
    "refusal": _refusal,
    "bomb": _bomb,
    "endless": _endless,
    "pieces": _small_chunks,
    "redirect": _redirect,
    "drip": _drip,
    "trickle": _trickle,
    "interim": _interim,
    "pipelined": _pipelined,
    "headers": _headers,
    "crowd": _crowd,
    "liar": _liar,
    "flapping": _flapping,
    "shouting": _shouting,
    "late": _late,
    "silent": _silent,
}


class HostileDrivers:
    """The server's processes; ``url`` is for the operator's option ``probe_url``.

    log: the file to which they write the name of each job whose status was requested.
    """

    def __init__(self, log: Path) -> None:
        self._process = Process("hostile drivers", [sys.executable, __file__], log=log)

    def __enter__(self) -> Self:
        self._process.start()
        wait_until(self._lines, "the drivers to listen", timeout_s=10, needs=[self._process])
        self.url = f"http://127.0.0.1:{self._lines()[0]}/{{namespace}}/{{name}}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end(signal.SIGTERM)

    def asked(self) -> dict[str, list[float]]:
        """Return the times (seconds, monotonic) of the status requests, by job."""
        times: dict[str, list[float]] = defaultdict(list)
        for name, at in map(str.split, self._lines()[1:]):
            times[name].append(float(at))
        return times

    def _lines(self) -> list[str]:
        return self._process.log.read_text().split("\n")[:-1]


def _serve_honest(port: socket.socket, hostile: socket.socket) -> None:
    steps: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    printing = threading.Lock()

    def serve(connection: socket.socket) -> None:
        try:
            request = _head(connection)
            if not request:
                connection.close()
                return
            method, target, _ = request.split(" ", 2)
            _, _, name, *_ = target.split("/")
            kind = name.partition("-")[0]
            if method == "GET":
                with printing:
                    print(name, time.monotonic(), flush=True)
            if kind in KINDS:
                socket.send_fds(hostile, [kind.ljust(16).encode()], [connection.fileno()])
                connection.close()
                return
            connection.sendall(_honest(next(steps[name])))
            connection.close()
        except OSError:
            connection.close()

    while True:
        connection, _ = port.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def _head(connection: socket.socket) -> str:
    connection.settimeout(10)
    text = b""
    while b"\r\n\r\n" not in text and (more := connection.recv(4096)):
        text += more
    return text.decode().partition("\r\n")[0]


def _serve_hostile(handed: socket.socket) -> None:
    slots = threading.Semaphore(_AT_ONCE)

    def serve(kind: str, connection: socket.socket) -> None:
        try:
            connection.settimeout(60)
            for piece in KINDS[kind]():
                connection.sendall(piece)
        except OSError:
            pass
        finally:
            connection.close()
            slots.release()

    while True:
        kind, descriptors, _, _ = socket.recv_fds(handed, 16, 1)
        if not kind:
            return
        slots.acquire()
        connection = socket.socket(fileno=descriptors[0])
        threading.Thread(target=serve, args=(kind.decode().strip(), connection), daemon=True).start()


def _main() -> None:
    port = socket.create_server(("127.0.0.1", 0), backlog=1024)
    honest, hostile = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        honest.close()
        port.close()
        _serve_hostile(hostile)
        os._exit(0)
    hostile.close()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print(port.getsockname()[1], flush=True)
    _serve_honest(port, honest)


if __name__ == "__main__":
    _main()
