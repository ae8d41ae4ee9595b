"""A run that is followed: by a process of others, by an engine, and by those that are killed or stopped meanwhile."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from one_run import direct, finish, start, wait_for_step

from asyncflow.identity import Version
from asyncflow.queue.ledger.audit import audit_ledgers

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

OF_A_STEP = 8 * 4
FOLLOWING = """
import asyncio, json, sys
from asyncflow.weights import follow

async def main(driver, tls):
    async with follow(driver, tls=tls) as versions:
        async for version, tensors in versions:
            print(json.dumps([version.packed, int(tensors["counts"].sum())]), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def begun() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def record(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "run" / "processes.json").read_text())
    return read


def versions_seen(folder: Path) -> dict[str, Any]:
    with urllib.request.urlopen(f"{record(folder)['http']}/v1/status", timeout=60) as answer:
        seen: dict[str, Any] = json.load(answer)["versions"]
    return seen


def until_seen(folder: Path, figure: str, wanted: object) -> dict[str, Any]:
    deadline = time.monotonic() + 90
    while (seen := versions_seen(folder))[figure] != wanted:
        assert time.monotonic() < deadline, f"{figure} is {seen[figure]}, not {wanted}"
        time.sleep(0.05)
    return seen


def test_a_run_is_followed_and_waits_for_no_follower(tmp_path: Path, begun: list[subprocess.Popen[str]]) -> None:
    folder = tmp_path / "run"
    settings = ["algorithm.steps=2000", "evaluation=null", "rollout.engine.options={token_s: 0.05}"]
    run = start("counting.yaml", folder, settings)
    wait_for_step(folder, 1, run)
    outside = [sys.executable, "-c", FOLLOWING, record(folder)["driver"], str(folder / "run" / "tls" / "follower-0")]
    engine = [sys.executable, "-m", "asyncflow", "follow", str(folder)]
    for command in (outside, outside, outside, engine):
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    read, killed, stopped, served = begun
    seconds = until_seen(folder, "followers", 4)["seconds"]
    assert all(seconds[phase] >= 0 for phase in ("publish", "transfer", "swap"))
    for each in (killed, stopped):
        assert each.stdout is not None
        assert each.stdout.readline()
    assert read.stdout is not None
    seen = [json.loads(read.stdout.readline()) for _ in range(3)]
    killed.kill()
    stopped.send_signal(signal.SIGSTOP)
    assert direct(folder, "/v1/suspend", certificate="operator-0") == 202
    finish(run, within_s=60)
    report = audit_ledgers(folder / "ledger")
    assert (report.ok, report.lost, report.duplicated) == (True, 0, 0)
    seen += [json.loads(line) for line in read.stdout]
    assert read.wait(timeout=20) == 0, "it ends with the job"
    packed = [version for version, _ in seen]
    assert packed == sorted(set(packed))
    assert all(total == Version.unpack(version).step * OF_A_STEP for version, total in seen)
    assert "have not left" not in (folder / "logs" / "driver-0.log").read_text()
    assert served.poll() is None, "an engine goes on to serve the last version"
