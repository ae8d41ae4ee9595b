"""One ``asyncflow run`` in processes of its own: begun, watched, hit and judged."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from http.client import HTTPSConnection
from pathlib import Path

import numpy as np
import pytest
from track_flaws import flaw_of

from asyncflow.models.source import materialize_config
from asyncflow.queue.ledger.audit import audit_ledgers
from asyncflow.telemetry.spans import read_timeline
from asyncflow.timeline.causes import attribute, shares
from asyncflow.timeline.tracks import Kind, Span, Timeline

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(
    manifest: str, folder: Path, settings: list[str], *flags: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Begin a run; what it says goes to its pipe, both streams in one."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncflow", "run", str(EXAMPLES / manifest), "--output", str(folder), *flags]
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
    )


def finish(run: subprocess.Popen[bytes], *, within_s: float) -> None:
    said, _ = run.communicate(timeout=within_s)
    assert run.returncode == 0, said.decode()


def untrained(folder: Path) -> Path:
    """Return a tiny model with random weights, which needs no warm-up."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = materialize_config("tiny://reverse-digits", folder)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    return model


def asked(*words: str) -> tuple[int, str]:
    """Return the exit status of a command line of ``asyncflow``, and what it printed."""
    done = subprocess.run([sys.executable, "-m", "asyncflow", *words], capture_output=True, check=False, text=True)
    return done.returncode, done.stdout


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def direct(folder: Path, path: str, *, certificate: str = "", headers: Mapping[str, str] | None = None) -> int:
    """POST to the control service of a run's driver, which is known by its name, and return the status of the answer.

    certificate: whose is shown, ``ROLE-INDEX``; none where it is empty.
    """
    tls = folder / "run" / "tls"
    context = ssl.create_default_context(cafile=tls / "driver-0" / "ca.crt")
    if certificate:
        context.load_cert_chain(tls / certificate / "tls.crt", tls / certificate / "tls.key")
    where = json.loads((folder / "run" / "processes.json").read_text())["control"].removeprefix("https://")
    host, _, port = where.partition(":")
    connected = socket.create_connection((host, int(port)), timeout=60)
    connection = HTTPSConnection("driver-0")
    with context.wrap_socket(connected, server_hostname="driver-0") as connection.sock:
        assert connection.sock.version() == "TLSv1.3"
        connection.request("POST", path, headers=dict(headers or {}))
        return connection.getresponse().status


def kill(folder: Path, role: str, index: int = 0, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Signal the process of a replica, as soon as it has one: it may be about to begin again."""
    deadline = time.monotonic() + 30
    while not (pid := pid_of(folder, role, index)):
        assert time.monotonic() < deadline, f"{role}-{index} did not begin within 30 s"
        time.sleep(0.02)
    os.kill(pid, by)


def pid_of(folder: Path, role: str, index: int) -> int:
    """Return the pid of a replica, 0 while it has none."""
    record = json.loads((folder / "run" / "processes.json").read_text())
    return int(next(entry["pid"] for entry in record["processes"] if (entry["role"], entry["index"]) == (role, index)))


def wait_for_step(folder: Path, step: int, run: subprocess.Popen[bytes], *, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        if run.poll() is not None:
            pytest.fail(f"the run ended before step {step}:\n{run.communicate()[0].decode()}")
        assert time.monotonic() < deadline, f"step {step} did not come within {within_s} s"
        time.sleep(0.05)


def counted_once(folder: Path, samples: int) -> None:
    """By the ledgers and by the counting trainer's last checkpoint."""
    report = audit_ledgers(folder / "ledger")
    assert report.ok, report.problems
    assert (report.dispatched, report.trained, report.lost, report.duplicated) == (samples, samples, 0, 0)
    newest = max((folder / "checkpoints").glob("step-*/manifest.json")).parent
    counts = np.load(newest / "counts.npy", allow_pickle=False)
    assert (counts[:samples] == 1).all()
    assert not counts[samples:].any()


def every_second_has_a_cause(folder: Path) -> Timeline:
    """Look for every process of a run at what it did, and why it was idle: that sums to the wall time within 2 %."""
    timeline = attribute(read_timeline(folder))
    wall = json.loads((folder / "summary.json").read_text())["wall_s"]
    assert timeline.end - timeline.begin == pytest.approx(wall, rel=0.02)
    assert not [flaw for track in timeline.tracks if (flaw := flaw_of(track))]
    assert all(span.cause for track in timeline.tracks for span in track.main if span.kind == "idle")
    spent = shares(timeline)
    assert {share.role for share in spent.values()} == {"driver", "controller", "storage", "trainer", "rollout"}
    for name, share in spent.items():
        assert sum(share.kinds.values()) + sum(share.idle.values()) == pytest.approx(wall, rel=0.02), name
    return timeline


def all_that_was_done_is_recorded(timeline: Timeline, *, server_killed_in: Container[int] = ()) -> None:
    """Look at each life of a process of a run with a model for the spans of all that it has done.

    server_killed_in: attempts of rollouts whose vLLM server was killed. It is asked for its prefills every two seconds:
    those that it has not told yet are lost with it, which may be all.
    """
    generating = [track for track in timeline.tracks if {"generate", "evaluation"} & kinds(track.main)]
    training = [track for track in timeline.tracks if "optimizer" in kinds(track.main)]
    assert ({track.role for track in generating}, {track.role for track in training}) == ({"rollout"}, {"trainer"})
    for track in generating:
        made_by = {span.version for span in track.main if span.kind in {"generate", "evaluation"}}
        assert kinds(track.main) >= {"starting", "idle"} | ({"swap"} if made_by - {0} else set()), track.name
        done = {"receive", "fetch", "reward"} | (set() if track.attempt in server_killed_in else {"prefill"})
        assert kinds(track.background) >= done, (track.name, done - kinds(track.background))
        assert all(track.begin < span.begin < span.end < track.end for span in track.background), track.name
    assert any("swap" in kinds(track.main) for track in generating), "another may have had all rows of later versions"
    for track in training:
        assert kinds(track.main) >= {"starting", "forward", "backward", "publish", "checkpoint", "idle"}, track.name
        assert kinds(track.background) >= {"claim", "fetch", "publish", "checkpoint"}, track.name


def kinds(spans: Sequence[Span]) -> set[Kind]:
    return {span.kind for span in spans}
