import contextlib
import os
import pty
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncflow import cli
from asyncflow.api.load import load_job
from asyncflow.commands.run import _print_progress, last_step
from asyncflow.local.record import load_record
from asyncflow.models.tiny import write_config
from asyncflow.rpc.addresses import ANY_SERVER, host_and_port, server_of
from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints

pytestmark = pytest.mark.process
CLI = str(Path(__file__).with_name("standin_cli.py"))


def command(*arguments, steps=2, pause_s=0.6):
    return [sys.executable, CLI, str(steps), str(pause_s), *map(str, arguments)]


def start(*arguments, cwd, **options):
    return subprocess.Popen(command(*arguments, **options), cwd=cwd, stdout=-1, stderr=-1, text=True)


def record_of(folder):
    deadline = time.monotonic() + 20
    while True:
        record = load_record(folder)
        if record and all(placed.pid for placed in record.processes):
            return record
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_from_manifest_to_summary(manifest, tmp_path):
    words = command("run", manifest, pause_s="asked")
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "runs" / "little"
    lines = run.stdout.splitlines()
    assert f"files in {folder}, logs in {folder / 'logs'}" in lines[0]
    record = load_record(folder)
    told = next(line for line in lines if "metrics: " in line)
    assert len({placed.http for placed in record.processes}) == len(record.processes)
    for placed in record.processes:
        assert f"{placed.role}-{placed.index} {placed.http}/metrics" in told
    assert any("step 2/2  reward 0.200  1.23k tokens/s" in line for line in lines)
    assert any("reward, first → last" in line and "0.100 → 0.500" in line for line in lines)
    assert any("rollout 25%" in line for line in lines)
    assert lines[-1] == f"files in {folder}: summary.json, metrics.jsonl, job.yaml, logs"
    assert {path.name for path in (folder / "logs").iterdir()} >= {"driver-0.log", "rollout-0.log", "trainer-0.log"}
    assert "annotations" in (folder / "job.yaml").read_text()
    assert not (folder / "run" / "token").exists()
    assert ports_are_closed(folder)


def ports_are_closed(folder):
    record = load_record(folder)
    listening = Path("/proc/net/tcp").read_text()
    ports = [host_and_port(record.driver)[1], int(record.http.rpartition(":")[2])]
    return not any(f":{port:04X} 00000000:0000 0A" in listening for port in ports)


def refused(capsys, manifest, *more):
    """Return why a run in ``out`` is refused, which this process may ask: nothing begins."""
    assert cli.invoke(["run", str(manifest), "--output", "out", *more]) == 2
    return capsys.readouterr().err


def test_again_resume_and_fresh_which_leaves_nothing_where_a_role_refuses_it(manifest, tmp_path, monkeypatch, capsys):
    def run(*more, steps=1):
        return subprocess.run(
            command("run", manifest, "--output", "out", *more, steps=steps, pause_s=0),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    monkeypatch.chdir(tmp_path)
    assert run().returncode == 0
    assert "--resume" in refused(capsys, manifest)
    resumed = run("--resume", "--set", "algorithm.steps=9")
    assert resumed.returncode == 0
    assert "changed: spec.algorithm.steps: 4 -> 9" in resumed.stdout
    settings = ("--set", "algorithm.groupSize=2", "--set", "algorithm.steps=9")
    assert "spec.algorithm.groupSize" in refused(capsys, manifest, "--resume", *settings)
    assert load_record(tmp_path / "out").processes[0].attempt == 1
    settings = [tmp_path / "out" / name for name in ("job.yaml", "run/overrides.json")]
    before = [file.read_bytes() for file in settings]
    wrong = run("--resume", "--set", "algorithm.steps=11", steps=-1)
    assert "the changes are not kept" in wrong.stdout
    assert "1 of 9 steps were made" in wrong.stdout
    assert [file.read_bytes() for file in settings] == before
    before = sorted(tmp_path.rglob("*.yaml"))
    wrong = run("--fresh", steps=-1)
    assert wrong.returncode == 1
    assert "spec.trainer: it cannot be" in wrong.stderr
    assert not wrong.stdout.endswith(f"so nothing is left in {tmp_path / 'out'}\n")
    assert sorted(tmp_path.rglob("*.yaml")) == before
    fresh = run("--fresh")
    assert fresh.returncode == 0
    assert str(tmp_path / "out.1") in fresh.stdout
    assert (tmp_path / "out.1" / "job.yaml").exists()
    called = {server_of(load_record(tmp_path / name).driver) for name in ("out", "out.1")}
    assert len(called - {ANY_SERVER}) == 2, "the one address of a run leads to no other run"


def interrupted(*arguments, cwd, until, folder=None, **options):
    """Run until ``until`` holds of ``folder``, or of ``out``, then press Ctrl-C; give what was said last."""
    run = start("run", *arguments, *([] if folder else ["--output", "out"]), cwd=cwd, **options)
    folder = folder or cwd / "out"
    record_of(folder)
    deadline = time.monotonic() + 20
    while not until(folder):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (130, "")
    return out


def steps_made(folder):
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def test_a_run_whose_trainer_is_the_users_says_that_it_is_started_again(manifest, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"at": 1.0, "step": 1, "attempt": 0, "wall_s": 1.0}\n')
    job = load_job(manifest, ["trainer.external=true"])
    _print_progress(job, tmp_path, file=manifest, overrides=["trainer.external=true"])
    assert "To continue, start your trainer again. If it joins" in capsys.readouterr().out


def test_ctrl_c_says_what_is_kept_and_the_line_that_goes_on(manifest, tmp_path):
    manifest.write_text(manifest.read_text().replace("metadata: {name: little}", "metadata: {}"))
    folder = tmp_path / "runs" / "foo"
    begun = ("--set", "metadata.name=foo", "--set", "algorithm.steps=600", "--set", "sampling.temperature=0.5")
    here = {"cwd": tmp_path, "folder": folder, "steps": 600, "pause_s": 0.2}
    said = interrupted(manifest, *begun, until=lambda out: steps_made(out) >= 2, **here)
    made = steps_made(folder)
    line = f"asyncflow run {shlex.quote(str(manifest))} --output runs/foo --resume"
    lost = "and none is in a checkpoint; they will be made again"
    assert said.endswith(f"{made} of 600 steps were made, {lost}. Continue with\n  {line}\n")
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.write(CheckpointManifest(attempt=0, step=1, samples=0), lambda _: None)
    resume = (*shlex.split(line)[2:], "--set", "sampling.temperature=0.7")
    said = interrupted(*resume, until=lambda out: steps_made(out) > made + 1, **here)
    assert said.startswith(f"as the run was started: {' '.join(begun)}\n")
    assert f"files in {folder}" in said
    assert "changed: spec.sampling.temperature: 0.5 -> 0.7\n" in said
    assert "algorithm.steps:" not in said
    assert "of which 1 to 1 are kept; the others will be made again" in said
    assert load_job(folder / "job.yaml").spec.algorithm.steps == 600


def test_a_line_beyond_the_last_step_does_not_count(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step":4}\n{"step":45}\n{"step":1e999}\n' + "[" * 100_000 + "\n{}\n\xff\n")
    assert last_step(metrics, steps=16) == 4
    assert last_step(metrics, steps=3) == 0


def test_a_start_from_which_nothing_came_is_in_nobodys_way(manifest, tmp_path):
    for _ in range(2):
        settings = ("--set", "algorithm.steps=9")
        said = interrupted(manifest, *settings, cwd=tmp_path, until=lambda _: True, steps=9, pause_s=60)
        assert "no step was made, so nothing is kept; start again with\n" in said
        assert said.endswith(f"  asyncflow run {shlex.quote(str(manifest))} --output out --set algorithm.steps=9\n")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


def test_a_start_that_a_role_refuses_leaves_nothing(manifest, tmp_path):
    words = ["run", manifest, "--output", "some/where/out"]
    run = subprocess.run(command(*words, steps=-1), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "it refused its input" in run.stderr
    assert "spec.trainer: it cannot be" in run.stderr
    assert run.stdout.endswith(f"no step was made, so nothing is left in {tmp_path / 'some' / 'where' / 'out'}\n")
    assert list(tmp_path.rglob("*.yaml")) == [manifest]
    assert not (tmp_path / "some").exists()


@pytest.mark.parametrize("source", ["tiny://reverse-digits", "model"])
def test_a_disk_that_takes_nothing_is_said_in_one_sentence(manifest, tmp_path, source):
    def no_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))

    (tmp_path / "model").mkdir()
    write_config(tmp_path / "model")
    words = command("run", manifest, "--output", "out", "--set", f"model.source={source}")
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, preexec_fn=no_room)
    assert (run.returncode, run.stderr.count("\n")) == (1, 1), run.stderr
    assert "cannot be written: File too large. Free some space" in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_whose_folder_no_other_has_had_and_leaves_nothing(
    manifest, tmp_path, monkeypatch, capsys, number, code
):
    run = start("run", manifest, "--output", "out", cwd=tmp_path, steps=600)
    record = record_of(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert "another run is using the folder" in refused(capsys, manifest, "--resume")
    token = tmp_path / "out" / "run" / "token"
    assert token.stat().st_mode & 0o077 == 0
    run.send_signal(number)
    out, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (code, "")
    assert "ending all processes" in out
    assert not any(Path(f"/proc/{placed.pid}").exists() for placed in record.processes)
    assert ports_are_closed(tmp_path / "out")
    assert not token.exists()


def test_a_run_goes_on_when_nobody_reads_its_output(manifest, tmp_path):
    run = start("run", manifest, "--output", "out", cwd=tmp_path, steps=3)
    run.stdout.close()
    assert run.wait(30) == 0
    assert "the output of the view is no longer read" in (tmp_path / "out" / "logs" / "supervisor.log").read_text()
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
    run.send_signal(signal.SIGINT)
    assert run.wait(20) == 130
    os.close(ours)


def test_the_last_view_of_a_terminal_after_ctrl_c_shows_no_failure(manifest, tmp_path):
    shown = terminal(command("run", manifest, steps=600), cwd=tmp_path, until=b"step 1/600", code=130)
    last = shown[shown.rindex(b"attempt") :].decode()
    assert "ended" in last
    assert "down" not in last
    assert "\x1b[31m" not in last, "something is red"
    assert "Continue with" in last


def terminal(words, *, cwd, until=None, code=0):
    """Run in a terminal, press Ctrl-C when it shows ``until``; give all that it was shown."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    run = subprocess.Popen(words, cwd=cwd, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
            if until is not None and until in shown:
                run.send_signal(signal.SIGINT)
                until = None
    except OSError:
        os.close(ours)
    assert run.wait(20) == code
    return shown


def test_a_terminal_gets_a_live_view(manifest, tmp_path):
    text = terminal(command("run", manifest), cwd=tmp_path).decode()
    for words in ("little", "step 2/2", "rollout-0", "attempt", "ETA 1m30s", "1.23k", "files in"):
        assert words in text
