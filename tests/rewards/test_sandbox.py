"""A reward function may do what its manifest allows and no more, tried in real reward processes."""

import asyncio
import ctypes
import errno
import os
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from scoring_one import one

from asyncflow.api.placement import PROFILES
from asyncflow.api.rewards import RewardSpec
from asyncflow.rewards import process, sandbox
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.wire import Example, RewardResult

FUNCTION = """
    import ctypes, fcntl, mmap, os, resource, socket, struct, subprocess, sys, tempfile, threading, time

    libc = ctypes.CDLL(None, use_errno=True)

    def seen(answer, few):
        return 2 if answer <= few else 60  # too much stays until it is seen, however late that is

    def score(*, response, prompt, answer, meta):
        match response:
            case "read":
                return float(len(open(answer).read()))
            case "write":
                open(answer, "w").write("x")
            case "scratch":
                path = os.path.join(os.environ["TMPDIR"], "x")
                open(path, "w").write("x" * 10)
                return float(os.path.getsize(path))
            case "connect":
                socket.create_connection(("127.0.0.1", answer), timeout=5).close()
            case "listen":
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(f"\\0cuda-uvmfd-1-{os.getpid()}")
                    listener.listen()
            case "reach":
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets:
                    packets.connect(answer)
            case "stream":
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            case "datagrams":
                socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            case "pair":
                socket.socketpair()
            case "run":
                return float(subprocess.run(["/bin/true"]).returncode == 0)
            case "thread":
                thread = threading.Thread(target=print)
                thread.start()
                thread.join()
            case "memory":
                return float(len(bytearray(answer)) >> 20)
            case "shared memory":
                shared = mmap.mmap(-1, answer)
                shared[::4096] = bytes(len(shared) // 4096)
            case "file in memory":
                os.memfd_create("x")
            case "reserve":
                mmap.mmap(-1, answer, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            case "name":
                open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("computes")
            case "device":
                os.write(os.open(answer, os.O_RDWR), b"x")
            case "variable":
                return float(os.environ[answer])
            case "threads":
                threading.stack_size(65536)
                for _ in range(answer):
                    threading.Thread(target=time.sleep, args=[60], daemon=True).start()
                time.sleep(seen(answer, 20))
            case "files":
                for number in range(answer):
                    with open(os.path.join(os.environ["TMPDIR"], str(number)), "wb") as file:
                        file.write(bytes(1 << 20))
                time.sleep(seen(answer, 4))
            case "nameless files":
                files = [tempfile.TemporaryFile() for _ in range(answer)]
                for file in files:
                    file.write(bytes(1 << 20))
                time.sleep(seen(answer, 4))
            case "variables":
                return float(len([name for name in os.environ if name.startswith("ASYNCFLOW")]))
            case "descriptors":
                return float(len(os.listdir("/proc/self/fd")))
            case "attributes":
                os.chmod(answer, 0)
                os.chown(answer, 65534, -1)
                os.utime(answer, (0, 0))
                os.setxattr(answer, "user.x", b"x")
            case "compile":
                path = os.path.join(os.environ["TMPDIR"], "x")
                open(path, "w").write("#!/bin/sh")
                os.chmod(path, 0o755)
                return float(subprocess.run([path]).returncode == 0)
            case "attach":
                return float(libc.shmat(answer, None, 0) == -1 and ctypes.get_errno())
            case "semaphore":
                return float(libc.semget(0, 1, 0o600) == -1 and ctypes.get_errno())
            case "owner":
                one, other = socket.socketpair()
                fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_NONBLOCK)
                for name, command, packed in answer:
                    process = struct.pack("i", os.getppid()) if packed else os.getppid()
                    try:
                        getattr(fcntl, name)(one, command, process)
                        return 0.0
                    except PermissionError:
                        pass
            case "sibling":
                if (pid := libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0)) == 0:
                    os._exit(0)
                return float(pid == -1 and ctypes.get_errno())
            case "priority":
                os.setpriority(os.PRIO_PROCESS, 0, 1)
            case "processor":
                os.sched_setaffinity(0, os.sched_getaffinity(0))
                other = subprocess.Popen(["/bin/sleep", "60"])
                os.sched_setaffinity(other.pid, {0})
            case "computing time":
                used = resource.getrusage(resource.RUSAGE_SELF)
                return resource.getrlimit(resource.RLIMIT_CPU)[0] - used.ru_utime - used.ru_stime
        return 1.0
"""
ON_A_GPU = {"accelerator": {"profile": "nvidia", "count": 1}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTION))
    (tmp_path / "table.json").write_text("[1, 2]")
    return tmp_path


def make_run(folder: Path) -> Path:
    (folder / "run").mkdir(parents=True)
    (folder / "ledger").mkdir()
    for name in ("run/lock", "run/token", "ledger/1.rows", "job.yaml"):
        (folder / name).write_text("secret")
    return folder


async def ask(
    folder: Path, *questions: tuple[str, object], run: Path | None = None, **said: object
) -> list[RewardResult]:
    spec = RewardSpec.model_validate({"function": "mine:score", "timeout_seconds": 3.0, **said})
    pool = WeightedRewards.of(spec, workdir=folder, run=run)
    await pool.start()
    try:
        return [await one(pool, Example(prompt="", response=what, answer=of)) for what, of in questions]
    finally:
        await pool.close()


async def test_it_reads_the_jobs_folder_and_writes_to_a_folder_of_its_own(folder: Path) -> None:
    reads = [("read", str(folder / "table.json")), ("read", "table.json"), ("scratch", None)]
    assert [result.value for result in await ask(folder, *reads)] == [6.0, 6.0, 10.0]
    refused = await ask(folder, ("write", "table.json"), ("write", "new"), ("read", "/etc/shadow"))
    assert ["PermissionError" in result.detail for result in refused] == [True] * 3


async def test_files_of_runs_in_the_jobs_folder_cannot_be_read(folder: Path) -> None:
    make_run(folder / "a" / "b" / "c" / "d" / "deep")
    make_run(folder / "runs" / "ended")
    make_run(folder / "runs" / os.fsdecode(b"not UTF-8 \xff"))
    (folder / "runs" / "ended" / "run" / "token").unlink()
    own = make_run(folder / "runs" / "own")
    (own / "run" / "lock").unlink()
    (folder / "link").symlink_to(folder / "runs" / "ended")
    (folder / "a" / "rows").symlink_to(own / "ledger" / "1.rows")
    (folder / "a" / "gone").symlink_to(folder / "absent")
    (folder / "a" / "table.json").write_text("[1]")
    secrets = (
        *("a/b/c/d/deep/run/token", "a/b/c/d/deep/ledger/1.rows", "runs/ended/ledger/1.rows", "runs/own/run/token"),
        *("runs/own/job.yaml", "link/ledger/1.rows", "a/rows"),
    )
    results = await ask(folder, *(("read", path) for path in (*secrets, "a/table.json", "table.json")), run=own)
    assert ["PermissionError" in result.detail for result in results] == [True] * len(secrets) + [False] * 2
    assert [result.value for result in results[-2:]] == [3.0, 6.0]


async def test_a_run_in_the_jobs_folder_itself_keeps_its_token_and_rows(folder: Path) -> None:
    make_run(folder)
    secrets = [("read", "run/token"), ("read", "ledger/1.rows")]
    results = await ask(folder, *secrets, ("read", "table.json"), run=folder)
    assert ["PermissionError" in result.detail for result in results] == [True, True, False]


async def test_what_lies_too_deep_to_be_looked_into_cannot_be_read(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(process, "_MOST_FOLDERS", 2)
    make_run(folder / "a" / "b" / "one")
    results = await ask(folder, ("read", "a/b/one/run/token"), ("read", "table.json"))
    assert ["PermissionError" in result.detail for result in results] == [True, False]


async def test_other_files_are_read_where_the_manifest_names_them(folder: Path, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("elsewhere") / "table.json"
    other.write_text("[1]")
    assert "PermissionError" in (await ask(folder, ("read", str(other))))[0].detail
    assert (await ask(folder, ("read", str(other)), files=[str(other)]))[0].value == 3.0


async def test_a_network_connection_needs_leave(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "PermissionError" in (await ask(folder, ("connect", port)))[0].detail
        assert (await ask(folder, ("connect", port), network=True))[0].value == 1.0


async def test_a_process_needs_leave_and_a_thread_does_not(folder: Path) -> None:
    run, thread = await ask(folder, ("run", None), ("thread", None))
    assert "PermissionError" in run.detail
    assert thread.value == 1.0
    assert (await ask(folder, ("run", None), processes=4))[0].value == 1.0


async def test_attributes_of_files_stay_and_a_compiler_makes_its_output_executable(folder: Path) -> None:
    table = folder / "table.json"
    before = table.stat()
    asked = ("attributes", str(table))
    (alone,) = await ask(folder, asked)
    beside, compiled = await ask(folder, asked, ("compile", None), processes=4)
    assert [alone.value, beside.value, compiled.value] == [1.0] * 3, "programs that copy files do not fail"
    assert table.stat() == before
    assert os.listxattr(table) == []


async def test_other_processes_are_out_of_reach(folder: Path) -> None:
    libc = ctypes.CDLL(None)
    shared = libc.shmget(0, 4096, 0o600)
    owners = [("fcntl", 8, False), ("fcntl", 15, True), ("ioctl", 0x8901, True), ("ioctl", 0x8902, True)]
    try:
        attached, semaphore, priority, owner = await ask(
            folder, ("attach", shared), ("semaphore", None), ("priority", None), ("owner", owners)
        )
        processor, sibling, owner_too = await ask(
            folder, ("processor", None), ("sibling", None), ("owner", owners), processes=4
        )
    finally:
        libc.shmctl(shared, 0, None)
    assert [attached.value, semaphore.value, sibling.value] == [errno.EPERM] * 3
    assert ["PermissionError" in result.detail for result in (priority, processor)] == [True] * 2
    assert [owner.value, owner_too.value] == [1.0, 1.0], "no file sends them a signal"


async def test_memory_and_computing_time_are_bounded(folder: Path) -> None:
    some, much = await ask(folder, ("memory", 100 << 20), ("memory", 600 << 20), memory="512Mi")
    assert some.value == 100.0
    assert "MemoryError" in much.detail
    shared, hidden = await ask(folder, ("shared memory", 600 << 20), ("file in memory", None), memory="512Mi")
    assert "Cannot allocate memory" in shared.detail
    assert "PermissionError" in hidden.detail
    for result in await ask(folder, ("computing time", None), ("computing time", None), timeout_seconds=3.0):
        assert 5.0 < result.value < 8.0, "twice what a sample may take, for each sample anew"


@pytest.fixture
def device(monkeypatch) -> None:
    """/dev/full stands for the device: whoever may write to it is told that it is full."""
    facts = replace(PROFILES["nvidia"], opened=("full",), read=(), variables=("PER_DEVICE",), env={})
    monkeypatch.setattr(process, "PROFILES", {"cpu": PROFILES["cpu"], "nvidia": facts})


@pytest.mark.usefixtures("device")
async def test_on_a_device_it_has_what_a_driver_needs_and_no_more(folder: Path, monkeypatch) -> None:
    for name in ("PER_DEVICE", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"):
        monkeypatch.setenv(name, "3")
    asked = [("device", "/dev/full"), ("file in memory", None), ("name", None), ("reserve", 1 << 36)]
    seen = [("variable", "PER_DEVICE"), ("variable", "CUDA_VISIBLE_DEVICES")]
    device, *others = await ask(folder, *asked, role=ON_A_GPU, memory="512Mi")
    assert "No space left on device" in device.detail
    assert [result.value for result in others] == [1.0] * 3
    seen_there = await ask(folder, *seen, ("variable", "HF_TOKEN"), role=ON_A_GPU)
    assert [result.value for result in seen_there] == [3.0, 3.0, 0.0]
    assert "KeyError" in seen_there[2].detail
    some, much, priority = await ask(
        folder,
        ("memory", 100 << 20),
        ("memory", 600 << 20),
        ("write", "/proc/self/oom_score_adj"),
        role=ON_A_GPU,
        memory="512Mi",
    )
    assert some.value == 100.0
    assert "MemoryError" in much.detail
    assert "PermissionError" in priority.detail
    for result in await ask(folder, *asked, *seen, memory="512Mi"):
        assert result.failure == "raised", "without a device nothing of it"


@pytest.mark.usefixtures("device")
async def test_a_driver_listens_at_a_socket_of_its_own_and_reaches_no_other(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(folder / "socket"))
        server.listen()
        asked = [("listen", None), ("pair", None), ("reach", str(folder / "socket")), ("stream", None)]
        with_device = await ask(folder, *asked, ("datagrams", None), role=ON_A_GPU)
        without = await ask(folder, *asked, ("datagrams", None))
    assert [result.value for result in with_device[:2]] == [1.0, 1.0]
    assert ["PermissionError" in result.detail for result in with_device[2:]] == [True] * 3
    assert without[1].value == 1.0
    assert ["PermissionError" in without[index].detail for index in (0, 2, 3, 4)] == [True] * 4


async def test_threads_and_scratch_files_are_bounded(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(process, "_MOST_SCRATCH_BYTES", 8 << 20)
    some = ("threads", 20), ("files", 4), ("nameless files", 4)
    much = ("threads", 600), ("files", 12), ("nameless files", 12)
    results = await asyncio.gather(*(ask(folder, each, timeout_seconds=30.0) for each in (*some, *much)))
    assert [result.value for (result,) in results[:3]] == [1.0, 1.0, 1.0]
    threads, *files = [result.detail for (result,) in results[3:]]
    assert "more than 256 threads" in threads
    assert all("wrote more than 8388608 bytes" in each for each in files)


@pytest.mark.parametrize(("memory", "hides"), [(0, False), (4096, True)])
def test_only_a_process_with_memory_can_hide_its_files(memory: int, hides: bool, tmp_path: Path, monkeypatch) -> None:
    def refuse(folder: object) -> list[str]:
        raise PermissionError(f"{folder} belongs to root")

    monkeypatch.setattr(process.os, "listdir", refuse)
    shown = SimpleNamespace(pid=1, status=lambda: "running", memory_info=lambda: SimpleNamespace(vms=memory))
    assert process._is_full(tmp_path, [shown]) == hides, "the kernel frees the memory of an ending process first"


async def test_it_sees_no_variable_and_no_descriptor_of_the_job(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("ASYNCFLOW_TLS", "/somewhere")
    inherited = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        variables, descriptors = await ask(folder, ("variables", None), ("descriptors", None))
    finally:
        os.close(inherited)
    assert variables.value == 0.0
    assert descriptors.value == 6.0, "its three, the two ends of its pipes, and the listing"


EMPTYING = """
import os, sys
from asyncflow.rewards import sandbox

folder = sys.argv[1]
sandbox._landlock_version = lambda: 2  # Linux 6.1, which cannot restrict truncation
sandbox.enter(sandbox.Sandbox(readable=[folder], writable=[folder + "/own"], memory=4 << 30))
with open(folder + "/own/file", "w") as file:
    file.write("x")
with open(folder + "/own/file", "w") as file:
    file.truncate(0)
for empty in (
    lambda: os.truncate(folder + "/table.json", 0),
    lambda: os.open(folder + "/table.json", os.O_RDONLY | os.O_TRUNC),
):
    try:
        empty()
    except PermissionError:
        continue
    sys.exit("a file was emptied")
"""


def test_an_older_kernel_lets_no_file_be_emptied_either(folder: Path) -> None:
    (folder / "own").mkdir()
    subprocess.run([sys.executable, "-P", "-c", EMPTYING, str(folder)], check=True, timeout=60)
    assert (folder / "table.json").read_text() == "[1, 2]"


def test_both_processors_have_a_number_for_all_that_is_denied() -> None:
    denied = {*sandbox._ALWAYS, sandbox._NAMELESS_FILE, *sandbox._SIGNALS, *sandbox._SCHEDULING}
    denied |= {*sandbox._OPENS, *sandbox._OWNERS, *sandbox._ATTRIBUTES, *sandbox._MODES, "truncate", "openat2"}
    denied |= {"socket", "socketpair", "connect", "clone", "clone3", "prlimit64"}
    old = {"open", "chmod", "chown", "lchown", "utime", "utimes", "futimesat"}
    for name, absent in (("x86_64", set()), ("aarch64", old)):
        numbers = sandbox._MACHINES[name].numbers
        assert denied - set(numbers) == absent
        assert len(set(numbers.values())) == len(numbers)
