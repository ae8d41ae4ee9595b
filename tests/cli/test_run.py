import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncflow.net.hosts import host_and_port, server_of
from asyncflow.net.stream.server import ANYBODY
from asyncflow.substrates.local.record import load_record

pytestmark = pytest.mark.process
CLI = str(Path(__file__).with_name("standin_cli.py"))


def command(*arguments, steps=2, pause_s=0.6):
    return [sys.executable, CLI, str(steps), str(pause_s), *map(str, arguments)]


def start(*arguments, cwd, **options):
    return subprocess.Popen(command(*arguments, **options), cwd=cwd, stdout=-1, stderr=-1, text=True)


def record_of(folder):
    deadline = time.monotonic() + 20
    while True:
        record = load_record(folder / "run" / "processes.json")
        if record and all(placed.pid for placed in record.processes):
            return record
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_from_manifest_to_summary(manifest, tmp_path):
    run = subprocess.run(command("run", manifest), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "runs" / "little"
    lines = run.stdout.splitlines()
    assert f"files in {folder}, logs in {folder / 'logs'}" in lines[0]
    assert any("step 2/2  reward 0.200  1.23k tokens/s" in line for line in lines)
    assert any("reward, first → last" in line and "0.100 → 0.500" in line for line in lines)
    assert any("rollout 25%" in line for line in lines)
    assert lines[-1] == f"files in {folder}: summary.json, job.yaml, logs"
    assert {path.name for path in (folder / "logs").iterdir()} >= {"driver-0.log", "rollout-0.log", "trainer-0.log"}
    assert "annotations" in (folder / "job.yaml").read_text()
    assert not (folder / "run" / "token").exists()
    assert ports_are_closed(folder)


def ports_are_closed(folder):
    record = load_record(folder / "run" / "processes.json")
    listening = Path("/proc/net/tcp").read_text()
    ports = [host_and_port(record.driver)[1], int(record.http.rpartition(":")[2])]
    return not any(f":{port:04X} 00000000:0000 0A" in listening for port in ports)


def test_the_one_address_of_a_run_leads_to_no_other_run(manifest, tmp_path):
    called = set()
    for output in ("one", "another"):
        words = command("run", manifest, "--output", output, steps=1, pause_s=0)
        subprocess.run(words, cwd=tmp_path, capture_output=True, check=True)
        called.add(server_of(load_record(tmp_path / output / "run" / "processes.json").driver))
    assert len(called - {ANYBODY}) == 2


def test_again_resume_and_fresh(manifest, tmp_path):
    def run(*more):
        return subprocess.run(
            command("run", manifest, "--output", "out", *more, steps=1, pause_s=0),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    assert run().returncode == 0
    again = run()
    assert again.returncode == 2
    assert "--resume" in again.stderr
    resumed = run("--resume", "--set", "algorithm.steps=9")
    assert resumed.returncode == 0
    assert "changed: spec.algorithm.steps: 4 -> 9" in resumed.stdout
    refused = run("--resume", "--set", "algorithm.groupSize=2", "--set", "algorithm.steps=9")
    assert refused.returncode == 2
    assert "spec.algorithm.groupSize" in refused.stderr
    assert load_record(tmp_path / "out" / "run" / "processes.json").processes[0].attempt == 1
    fresh = run("--fresh")
    assert fresh.returncode == 0
    assert str(tmp_path / "out.1") in fresh.stdout
    assert (tmp_path / "out.1" / "job.yaml").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_and_leaves_nothing(manifest, tmp_path, number, code):
    run = start("run", manifest, "--output", "out", cwd=tmp_path, steps=600)
    record = record_of(tmp_path / "out")
    token = tmp_path / "out" / "run" / "token"
    assert token.stat().st_mode & 0o077 == 0
    begun = time.monotonic()
    run.send_signal(number)
    out, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (code, "")
    assert time.monotonic() - begun < 10
    assert "ending everything" in out
    assert not any(Path(f"/proc/{placed.pid}").exists() for placed in record.processes)
    assert ports_are_closed(tmp_path / "out")
    assert not token.exists()


def test_a_second_run_in_the_same_folder_is_refused(manifest, tmp_path):
    first = start("run", manifest, "--output", "out", cwd=tmp_path, steps=600)
    record_of(tmp_path / "out")
    second = subprocess.run(
        command("run", manifest, "--output", "out", "--resume"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2
    assert "another run is using the folder" in second.stderr
    first.send_signal(signal.SIGINT)
    assert first.wait(20) == 130
    first.communicate()


def test_a_run_goes_on_when_nobody_reads_its_output(manifest, tmp_path):
    run = start("run", manifest, "--output", "out", cwd=tmp_path, steps=3)
    run.stdout.close()
    assert run.wait(30) == 0
    assert "nobody reads the view" in (tmp_path / "out" / "logs" / "supervisor.log").read_text()
    run.communicate()


def test_an_output_that_nobody_takes_holds_up_nothing(manifest, tmp_path):
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(theirs, b"x" * 65536):
            pass
    os.set_blocking(theirs, True)
    run = subprocess.Popen(command("run", manifest, "--output", "out", steps=600), cwd=tmp_path, stdout=theirs)
    os.close(theirs)
    record_of(tmp_path / "out")
    begun = time.monotonic()
    run.send_signal(signal.SIGINT)
    assert run.wait(20) == 130
    assert time.monotonic() - begun < 10
    os.close(ours)


def test_a_terminal_gets_a_live_view(manifest, tmp_path):
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    run = subprocess.Popen(command("run", manifest), cwd=tmp_path, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        os.close(ours)
    assert run.wait(20) == 0
    text = shown.decode()
    for words in ("little", "step 2/2", "rollout-0", "attempt", "ETA 1m30s", "1.23k", "files in"):
        assert words in text
