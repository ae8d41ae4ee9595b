"""A whole job whose samples lie in Mooncake Store, or in Redis, and whose holders are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

import debian
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.stores.server import free_port

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"
STEPS, SAMPLES = 20, 20 * 8 * 4
PASSWORD = "open sesame"
SETTINGS = [f"algorithm.steps={STEPS}", "evaluation.every=10", "rollout.engine.options={token_s: 0.02}"]


def start(folder: Path, *settings: str, env: dict[str, str]) -> subprocess.Popen[bytes]:
    words = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncflow", "run", str(EXAMPLE), "--output", str(folder), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **env})


def kill(folder: Path, role: str) -> None:
    record = json.loads((folder / "run" / "processes.json").read_text())
    os.kill(next(entry["pid"] for entry in record["processes"] if entry["role"] == role), signal.SIGKILL)


def wait_for_step(folder: Path, step: int, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert run.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


@pytest.mark.parametrize(("backend", "victims"), [("mooncake", ["holder", "master"]), ("redis", ["holder"])])
def test_every_sample_counts_once_although_its_holder_is_killed(
    tmp_path: Path, backend: str, victims: list[str]
) -> None:
    folder = tmp_path / "run"
    run = start(folder, f"transferQueue.backend={backend}", env=debian.environment())
    for number, role in enumerate(victims):
        wait_for_step(folder, 3 + 8 * number, run)
        kill(folder, role)
    said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said.decode()
    report = audit_ledger(folder / "ledger")
    assert report.ok, report.problems
    assert (report.dispatched, report.trained, report.lost, report.duplicated) == (SAMPLES, SAMPLES, 0, 0)
    newest = max((folder / "checkpoints").glob("step-*/manifest.json")).parent
    counts = np.load(newest / "counts.npy", allow_pickle=False)
    assert (counts[:SAMPLES] == 1).all()
    assert not counts[SAMPLES:].any()


@pytest.fixture
def server() -> Iterator[redis.Redis]:
    """A server that is there before the run: a client of it."""
    port = free_port("127.0.0.1")
    config = f"port {port}\nbind 127.0.0.1\nrequirepass {PASSWORD!r}\nmaxmemory 64mb\nsave ''\n"
    process = subprocess.Popen(["redis-server", "-"], stdin=subprocess.PIPE, env={**os.environ, **debian.environment()})
    try:
        assert process.stdin is not None
        process.stdin.write(config.encode())
        process.stdin.close()
        with redis.Redis(
            host="127.0.0.1", port=port, password=PASSWORD, retry=Retry(ConstantBackoff(0.1), 100)
        ) as client:
            yield client
    finally:
        process.kill()
        process.wait()


def test_a_store_that_others_run_is_used_and_left_as_it_was(tmp_path: Path, server: redis.Redis) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{PASSWORD}\n")
    folder = tmp_path / "run"
    address = f"127.0.0.1:{server.connection_pool.connection_kwargs['port']}"
    store = f"transferQueue={{backend: redis, store: {{address: '{address}', password: {{name: redis}}}}}}"
    server.set("of somebody else", "1")
    run = start(folder, store, "algorithm.steps=4", env={"ASYNCFLOW_STORE_PASSWORD_FILE": str(secret)})
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said.decode()
    assert server.keys() == [b"of somebody else"]
    assert server.info("commandstats")["cmdstat_mget"]["calls"] > 0
    record = json.loads((folder / "run" / "processes.json").read_text())
    assert {entry["role"] for entry in record["processes"]} == {"driver", "controller", "storage", "trainer", "rollout"}
    assert b"sesame" not in b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_store_that_is_not_installed_is_said_once_and_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start(folder, "transferQueue.backend=redis", env={"PATH": str(tmp_path)})
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 2
    assert b"there is no program 'redis-server'" in said
    assert not folder.exists()
