"""A queue on this machine, in one line: served, used, hit, ended, audited, and served again."""

from __future__ import annotations

import json
import os
import queue as queues
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from asyncflow import cli
from asyncflow.queue.blocking import BlockingPartition, connect

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

MANIFEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: TransferQueue
metadata: {name: shared}
spec: {storageUnits: 2, bytesPerUnit: 4Mi}
"""


class Serving:
    """A process that serves; ``lines`` has what it said."""

    def __init__(self, *words: str, cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "asyncflow", *words],
            cwd=cwd,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._lines: queues.SimpleQueue[str] = queues.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def until(self, words: str, *, within_s: float = 60) -> str:
        """Wait for a line with ``words`` and give it."""
        while words not in (line := self._lines.get(timeout=within_s)):
            pass
        return line

    def address(self) -> str:
        return self.until("serving at ").partition("serving at ")[2].partition(": ")[0]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(20) == 130


@contextmanager
def serving(*words: str, cwd: Path) -> Iterator[Serving]:
    served = Serving(*words, cwd=cwd)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.wait()


def placed(folder: Path) -> list[dict[str, object]]:
    record = json.loads((folder / "run" / "processes.json").read_text())
    return list(record["processes"])


def counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    assert cli.invoke(["audit", str(folder)]) == 0
    return {
        name: int(count) for name, count in (line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    }


def test_one_line_serves_a_queue_that_is_used_hit_ended_and_served_again(tmp_path, capsys) -> None:
    words = ("queue", "serve", "--units", "2", "--bytes-per-unit", "4Mi", "--port", "0", "--output", "mine")
    folder = tmp_path / "mine"
    with serving(*words, cwd=tmp_path) as served:
        with connect(served.address()) as queue:
            corpus = BlockingPartition(queue, "corpus")
            corpus.declare("read", ["n"])
            corpus.put({"n": np.arange(100)})
            assert all(corpus.complete(corpus.claim("read", 40)))
            replicas = placed(folder)
            assert [(replica["role"], replica["index"]) for replica in replicas] == [
                ("controller", 0),
                ("storage", 0),
                ("storage", 1),
            ]
            for replica in replicas:
                with urllib.request.urlopen(f"{replica['http']}/metrics", timeout=60) as answer:
                    assert f"asyncflow_{replica['role']}_" in answer.read().decode()
            os.kill(int(str(replicas[1]["pid"])), signal.SIGKILL)
            served.until("storage-0 started, attempt 1")
            corpus.put({"n": np.arange(10)})
        assert counted(folder, capsys)["put"] == 110, "of a queue that is served"
        served.end()
        assert not any(Path(f"/proc/{replica['pid']}").exists() for replica in replicas)
    counts = counted(folder, capsys)
    assert (counts["put"], counts["cleared"], counts["remaining"]) == (110, 0, 110)
    assert "dispatched" not in counts
    with serving(*words, "--units", "1", cwd=tmp_path) as again:
        address, deadline = again.address(), time.monotonic() + 20
        with connect(address) as queue:
            corpus = BlockingPartition(queue, "corpus")
            corpus.put({"n": np.arange(5)})
            assert len(corpus.claim("read", 8)) == 5, "the rows of before were lost with the memory of their units"
        while len(units := looked(address, capsys)) != 1:
            assert time.monotonic() < deadline, f"a unit that the queue has not any more is waited for: {units}"
            time.sleep(0.2)
        again.end()
    assert counted(folder, capsys)["put"] == 115


def looked(address: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert cli.invoke(["queue", "ls", address, "--json"]) == 0
    return list(json.loads(capsys.readouterr().out)["units"])


def test_the_manifest_of_a_queue_is_run_as_the_manifest_of_a_job_is(tmp_path, capsys) -> None:
    (tmp_path / "queue.yaml").write_text(MANIFEST)
    with serving("run", "queue.yaml", "--set", "storageUnits=1", "--port", "0", cwd=tmp_path) as served:
        assert served.address().startswith("tcp://127.0.0.1:")
        served.end()
    folder = tmp_path / "runs" / "shared"
    assert sorted(entry.name for entry in folder.iterdir()) == ["ledger", "logs", "queue.yaml", "run", "spans"]
    assert cli.invoke(["queue", "serve", "--output", str(folder), "--set", "controllers=2"]) == 2
    assert "controllers was 1, and is 2: tasks do not move between controllers" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_and_nothing_is_left(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert cli.invoke(["queue", "serve", "--port", str(port)]) == 1
    assert (
        capsys.readouterr().err == f"error: port {port} of 127.0.0.1 is taken. Use another port; 0 takes a free one\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bytes-per-unit", "3"], "spec.bytesPerUnit"),
        (["--units", "0"], "--units"),
        (
            ["--backend", "tape"],
            "'tape' in asyncflow.storage_backends. Install its package, or use one of: memory, mooncake",
        ),
        (["--backend", "No Tape"], "spec.backend"),
        (["--name", "No Name"], "metadata.name"),
        (["--set", "controllers=99"], "spec.controllers"),
    ],
)
def test_what_cannot_be_is_refused_and_makes_no_folder(tmp_path, monkeypatch, capsys, words, said) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.invoke(["queue", "serve", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_never_served_as_a_queue(tmp_path, capsys) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "job.yaml").write_text("kind: RLJob\n")
    assert cli.invoke(["queue", "serve", "--port", "0", "--output", str(tmp_path)]) == 2
    assert "already holds a run" in capsys.readouterr().err
