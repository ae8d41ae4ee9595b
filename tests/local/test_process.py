import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from asyncflow.local import process
from asyncflow.local.lifecycle import ExitStatus
from asyncflow.local.process import Process
from asyncflow.process import adopt_orphans

pytestmark = pytest.mark.process


async def ended(code: str, log: Path, *, then=lambda process: None) -> ExitStatus:
    """Run Python code as a process to its end."""
    status = asyncio.get_running_loop().create_future()
    argv = [sys.executable, "-I", "-S", "-c", code]
    process = Process.spawn(argv, env=os.environ, log=log, on_exit=status.set_result)
    then(process)
    return await asyncio.wait_for(status, 20)


async def test_it_tells_how_a_process_ended_and_keeps_its_words(tmp_path):
    log = tmp_path / "log"
    assert await ended("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", log) == ExitStatus(
        status=3
    )
    assert await ended("print('again')", log) == ExitStatus()
    assert sorted(log.read_text().split()) == ["again", "err", "out"]


async def test_a_killed_process_is_told_as_such(tmp_path):
    status = await ended("import time; time.sleep(600)", tmp_path / "log", then=Process.kill)
    assert status == ExitStatus(signal=signal.SIGKILL)


async def test_what_has_ended_is_sent_no_signal_since_its_number_may_be_anothers(tmp_path, monkeypatch):
    followed, sent = [], []
    assert (await ended("", tmp_path / "log", then=followed.append)).ok
    monkeypatch.setattr(process.os, "killpg", lambda *words: sent.append(words))
    monkeypatch.setattr(process.signal, "pidfd_send_signal", lambda *words: sent.append(words))
    followed[0].terminate()
    followed[0].kill()
    assert sent == []


async def test_a_process_leads_its_own_session_and_reads_nothing(tmp_path):
    code = "import os, sys; print(os.getsid(0) == os.getpgid(0) == os.getpid(), repr(sys.stdin.read()))"
    assert (await ended(code, tmp_path / "log")).ok
    assert (tmp_path / "log").read_text() == "True ''\n"


async def test_it_inherits_no_descriptor(tmp_path):
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    assert (await ended(f"import os\ntry: os.fstat({theirs})\nexcept OSError: print('closed')", tmp_path / "log")).ok
    assert (tmp_path / "log").read_text() == "closed\n"
    os.close(ours)
    os.close(theirs)


async def test_signals_that_we_ignore_are_not_ignored_by_it(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
        assert (await ended(code, tmp_path / "log")).ok
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "log").read_text() == "True\n"


async def test_what_cannot_be_started_is_told_at_once(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        Process.spawn(["/nowhere/python"], env={}, log=tmp_path / "log", on_exit=lambda _: None)


ORPHAN = """
import ctypes, os, platform, threading, time
if (child := os.fork()) == 0:
    threading.Thread(target=time.sleep, args=(0.5,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
if (leader := os.fork()) == 0:
    os.setpgid(0, 0)
    time.sleep(60)
print(child, leader)
time.sleep(0.2)
"""
"""A process whose first child ends its first thread at once, and the other one when its parent is gone; the second
child leads a process group of its own, as reward processes do.
"""


async def test_no_zombie_is_left_of_what_it_started(tmp_path):
    adopt_orphans(enabled=True)
    try:
        assert (await ended(ORPHAN, tmp_path / "log")).ok
        children = [Path("/proc") / pid for pid in (tmp_path / "log").read_text().split()]
        assert children[0].exists()
        async with asyncio.timeout(10):
            while any(child.exists() for child in children):
                await asyncio.sleep(0.05)
    finally:
        adopt_orphans(enabled=False)


async def test_a_reaper_that_cannot_be_replaced_at_once_is_replaced_later(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_RESTART_S", 0.01)
    watchdog = process.Watchdog(mark="m", log=tmp_path / "log")
    watchdog.add(1 << 30)
    first, open_before = watchdog._process, len(os.listdir("/proc/self/fd"))
    refusals = [OSError(24, "Too many open files")] * 3
    pipe, spawn = os.pipe, Process.spawn

    def scarce(real, *words, **options):
        if refusals:
            watchdog.add(1 << 30)
            raise refusals.pop()
        return real(*words, **options)

    monkeypatch.setattr(process.os, "pipe", lambda: scarce(pipe) if len(refusals) > 1 else pipe())
    monkeypatch.setattr(Process, "spawn", lambda *words, **options: scarce(spawn, *words, **options))
    first.kill()
    async with asyncio.timeout(20):
        while watchdog._process is first:
            await asyncio.sleep(0.01)
    assert not refusals
    assert len(os.listdir("/proc/self/fd")) == open_before
    monkeypatch.setattr(process, "_CLOSE_S", 60.0)
    async with asyncio.timeout(10):
        await watchdog.close()
    assert not watchdog._process.alive
