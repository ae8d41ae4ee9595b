"""A whole job whose samples lie in Mooncake Store, or in Redis, and whose holders are killed."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from one_run import counted_once, finish, kill, start, wait_for_step
from redis.backoff import ConstantBackoff
from redis.retry import Retry

import debian
from asyncflow.queue.storage.servers import free_port

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

STEPS = 12
PASSWORD = "open sesame"
SETTINGS = [f"algorithm.steps={STEPS}", "evaluation.every=6", "rollout.engine.options={token_s: 0.02}"]


@pytest.mark.parametrize(("backend", "victims"), [("mooncake", ["holder", "master"]), ("redis", ["holder"])])
def test_every_sample_counts_once_although_its_holder_is_killed(
    tmp_path: Path, backend: str, victims: list[str]
) -> None:
    folder = tmp_path / "run"
    settings = [*SETTINGS, f"transferQueue.backend={backend}", "transferQueue.storageUnits=1"]
    run = start("counting.yaml", folder, settings, env=debian.environment())
    for number, role in enumerate(victims):
        wait_for_step(folder, 2 + 4 * number, run)
        kill(folder, role)
    finish(run, within_s=200)
    counted_once(folder, STEPS * 8 * 4)


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
    settings = [*SETTINGS, store, "algorithm.steps=4"]
    run = start("counting.yaml", folder, settings, env={"ASYNCFLOW_STORE_PASSWORD_FILE": str(secret)})
    finish(run, within_s=120)
    assert server.keys() == [b"of somebody else"]
    assert server.info("commandstats")["cmdstat_mget"]["calls"] > 0
    record = json.loads((folder / "run" / "processes.json").read_text())
    assert {entry["role"] for entry in record["processes"]} == {"driver", "controller", "storage", "trainer", "rollout"}
    assert b"sesame" not in b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_store_that_is_not_installed_is_said_once_and_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start("counting.yaml", folder, [*SETTINGS, "transferQueue.backend=redis"], env={"PATH": str(tmp_path)})
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 2
    assert b"there is no program 'redis-server'" in said
    assert not folder.exists()
