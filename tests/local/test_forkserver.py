import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from asyncflow.api.load import load_job
from asyncflow.local.forkserver import ForkServer
from asyncflow.local.lifecycle import ExitStatus
from asyncflow.local.placement import modules_of
from asyncflow.plan.job import plan
from asyncflow.process import PARENT, adopt_orphans

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def adopting() -> Iterator[None]:
    adopt_orphans(enabled=True)
    yield
    adopt_orphans(enabled=False)


class Forks:
    """A fork server and what it is told to run, which are modules of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changed = asyncio.Event()
        self.env = {**os.environ, "PYTHONPATH": str(folder), PARENT: str(os.getpid())}

    def module(self, name: str, code: str) -> str:
        (self.folder / f"{name}.py").write_text(code)
        return name

    async def serve(self, *modules: str) -> ForkServer:
        self.server = ForkServer(modules, env=self.env, log=self.folder / "server.log", changed=self.changed.set)
        return await self.until_ready(*modules)

    async def until_ready(self, *modules: str) -> ForkServer:
        async with asyncio.timeout(60):
            while not self.server.ready(modules):
                self.changed.clear()
                await self.changed.wait()
        return self.server

    async def ended(self, name: str, *words: str, **env: str) -> tuple[ExitStatus, str]:
        """Run a module to its end; return how it ended, and what it wrote."""
        status, log = asyncio.get_running_loop().create_future(), self.folder / f"{name}.log"
        argv = [sys.executable, "-m", name, *words]
        process = self.server.start(argv, env={**self.env, **env}, log=log, on_exit=status.set_result)
        assert process is not None
        return await asyncio.wait_for(status, 20), log.read_text()


@pytest.fixture
async def forks(tmp_path: Path) -> Iterator[Forks]:
    made = Forks(tmp_path)
    yield made
    await made.server.close()


async def test_a_forked_process_is_what_a_started_one_would_be(forks):
    code = """
import json, os, pathlib, psutil, sys
this = psutil.Process()
print(json.dumps({
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(), "parent": os.getppid(), "read": sys.stdin.read(),
    "argv": sys.argv[1:], "name": __name__, "variables": [os.environ["OWN"], "OTHER" in os.environ],
    "title": this.cmdline(), "comm": pathlib.Path("/proc/self/comm").read_text(),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:4],
}))
print("to the log, too", file=sys.stderr)
sys.exit(3)
"""
    forks.env["OTHER"] = "of the server"
    await forks.serve("json")
    del forks.env["OTHER"]
    status, said = await forks.ended(forks.module("role", code), "--index", "1", OWN="mine")
    assert status == ExitStatus(status=3)
    told = json.loads(said.splitlines()[0])
    title = " ".join(told.pop("title"))
    assert "-m role --index 1" in title
    descriptors = told.pop("descriptors")
    assert descriptors[:3] == [0, 1, 2]
    assert told == {
        "leads": True,
        "parent": os.getpid(),
        "read": "",
        "argv": ["--index", "1"],
        "name": "__main__",
        "variables": ["mine", False],
        "comm": "python\n",
    }
    assert said.splitlines()[1:] == ["to the log, too"]


async def test_its_threads_and_exit_functions_end_before_it_does(forks):
    code = """
import atexit, sys, threading, time
atexit.register(print, "at the end", end="")
threading.Thread(target=lambda: (time.sleep(0.2), print("the thread"))).start()
if sys.argv[1:]:
    sys.exit(*sys.argv[1:])
"""
    await forks.serve("json")
    module = forks.module("role", code)
    assert await forks.ended(module) == (ExitStatus(status=0), "the thread\nat the end")
    (forks.folder / "role.log").unlink()
    status, said = await forks.ended(module, "words")
    assert (status, sorted(said.split("\n"))) == (ExitStatus(status=1), ["at the end", "the thread", "words"])


async def test_it_has_no_descriptor_of_the_server(forks):
    code = "import os; print(sorted(set(os.listdir('/proc/self/fd')) - {'0', '1', '2'}))"
    await forks.serve("json")
    _, said = await forks.ended(forks.module("role", code))
    assert len(eval(said)) == 1, "but the one that reads the list"


async def test_what_is_imported_once_is_imported_in_each(forks):
    counted = forks.module("counted", "print('imported')")
    await forks.serve(counted)
    role = forks.module("role", "import sys; print('counted' in sys.modules); import counted")
    assert [await forks.ended(role) for _ in range(2)][1] == (ExitStatus(), "True\nTrue\n")
    assert (forks.folder / "server.log").read_text() == "imported\n"


async def test_what_packages_offer_is_read_once(forks):
    group = "asyncflow.transports"
    code = f"from asyncflow import plugins; plugins.entry_points = None; print(plugins.installed({group!r}))"
    await forks.serve()
    status, said = await forks.ended(forks.module("asks", code))
    assert (status, "host" in said) == (ExitStatus(), True), said


async def test_more_is_imported_when_a_role_needs_it(forks):
    await forks.serve("json")
    later = forks.module("later", "")
    assert not forks.server.ready([later])
    await forks.until_ready(later)
    role = forks.module("role", "import sys; print('later' in sys.modules)")
    assert await forks.ended(role) == (ExitStatus(), "True\n")


async def test_each_draws_its_own_random_numbers(forks):
    await forks.serve("numpy", "random")
    role = forks.module("role", "import numpy, random; print(random.random(), numpy.random.random())")
    drawn = [number for _ in range(2) for number in (await forks.ended(role))[1].split()]
    assert len(set(drawn[-2:] + drawn[:2])) == 4


async def test_torch_computes_with_as_many_threads_as_the_environment_says(forks):
    await forks.serve("torch")
    role = forks.module("role", "import torch; print(torch.get_num_threads())")
    assert [(await forks.ended(role, OMP_NUM_THREADS=each))[1] for each in ("3", " 2 ,1")] == ["3\n", "3\n2\n"]
    assert all([(await forks.ended(role, OMP_NUM_THREADS=each))[0].ok for each in ("", "0")])


async def test_signals_end_it_as_they_end_a_started_one(forks):
    await forks.serve("json")
    role = forks.module("role", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (await forks.ended(role))[0] == ExitStatus(signal=signal.SIGTERM)
    role = forks.module("interrupted", "import signal; print(signal.getsignal(2) is signal.default_int_handler)")
    assert (await forks.ended(role))[1] == "True\n"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nothing_of_that_name", "cannot be imported: No module named 'nothing_of_that_name'"),
        ("import os; os._exit(1)", "it has ended: exit status 1"),
    ],
    ids=["failed", "ended"],
)
async def test_where_an_import_fails_roles_are_started_without_it(forks, caplog, code, why):
    await forks.serve(forks.module("broken", code))
    assert not forks.server.usable
    assert forks.server.start(["python", "-m", "x"], env={}, log=forks.folder / "log", on_exit=print) is None
    assert why in caplog.text


async def test_nothing_is_forked_while_a_thread_runs(forks, caplog):
    code = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    await forks.serve(forks.module("threaded", code))
    assert forks.server.start(["python", "-m", "x"], env={}, log=forks.folder / "log", on_exit=print) is None
    assert "run 1 threads" in caplog.text
    assert forks.server.ready(["json"])


async def test_when_it_is_killed_what_it_has_forked_goes_on(forks):
    await forks.serve("json")
    role = forks.module("role", "import sys, time; print('begun', flush=True); time.sleep(600)")
    ended = asyncio.get_running_loop().create_future()
    log = forks.folder / "log"
    process = forks.server.start([sys.executable, "-m", role], env=forks.env, log=log, on_exit=ended.set_result)
    os.kill(forks.server.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while forks.server.usable or log.read_text() != "begun\n":
            await asyncio.sleep(0.02)
    assert not ended.done()
    assert psutil.Process(process.pid).ppid() == os.getpid()
    process.kill()
    assert await asyncio.wait_for(ended, 20) == ExitStatus(signal=signal.SIGKILL)


async def test_when_it_is_killed_before_it_has_read_a_request_roles_are_started_without_it(forks, caplog):
    await forks.serve("json")
    os.kill(forks.server.pid, signal.SIGSTOP)
    assert not forks.server.ready(["csv"])
    os.kill(forks.server.pid, signal.SIGKILL)
    await forks.until_ready("csv")
    assert not forks.server.usable
    assert [record.getMessage() for record in caplog.records] == [
        "roles are started without the fork server: it has ended: SIGKILL"
    ]


def test_what_the_supervisor_has_given_up_never_begins(tmp_path):
    """A request whose answer was lost: nobody knows the process, so it must end by itself."""
    (tmp_path / "role.py").write_text("print('begun')")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), PARENT: str(os.getpid())}
    argv = [sys.executable, "-m", "asyncflow.local.forkserver", "json"]
    server = psutil.Popen(argv, stdin=theirs, env=env)
    theirs.close()
    ours.settimeout(20)
    assert json.loads(ours.recv(1 << 16)) == {"imported": ["json"]}
    go, held = os.pipe()
    with (tmp_path / "log").open("w") as log:
        request = json.dumps({"argv": [sys.executable, "-m", "role"], "env": env}).encode()
        socket.send_fds(ours, [request], [log.fileno(), go])
    pid = json.loads(ours.recv(1 << 16))["pid"]
    os.close(held)
    assert os.waitpid(pid, 0)[1] == 1 << 8
    os.close(go)
    ours.close()
    assert server.wait(20) == 0
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize("example", ["quickstart", "ppo", "smollm2"])
def test_the_modules_of_each_role_exist(example):
    roles = plan(load_job(EXAMPLES / f"{example}.yaml")).roles
    for module in (module for role in roles for module in modules_of(role)):
        assert find_spec(module) is not None, module
