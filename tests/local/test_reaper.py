import os
import shutil
import subprocess
import sys
import tempfile
import uuid

import pytest

from asyncflow.local import reaper
from asyncflow.process import PARENT, scratch_folder
from asyncflow.rollout.engines.vllm.server import VllmServer

pytestmark = pytest.mark.process
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeper():
    started = []

    def start(**options):
        started.append(subprocess.Popen(SLEEP, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_members_are_those_of_its_sessions_and_those_with_its_mark(sleeper, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = uuid.uuid4().hex
    made = []
    for each in (mark, mark + "0", ""):
        monkeypatch.setenv(reaper.MARK, each)
        made.append(scratch_folder())
        (made[-1] / "file").write_text("")
    marked = sleeper(env={reaper.MARK: mark})
    in_session = sleeper(env={}, start_new_session=True)
    others = [sleeper(), sleeper(env={reaper.MARK: mark + "0"}), sleeper(env={"OTHER": f"{reaper.MARK}={mark}"})]
    assert set(reaper.members(mark=mark, sessions={in_session.pid})) == {marked.pid, in_session.pid}
    assert reaper.sweep(mark=mark, sessions={in_session.pid}) == []
    assert marked.wait(20) == in_session.wait(20) == -9
    assert [other.poll() for other in others] == [None, None, None]
    assert [folder.exists() for folder in made] == [False, True, True]


@pytest.mark.parametrize("depth", [0, 5])
def test_the_folder_of_a_server_s_socket_is_removed_with_the_run_also_if_its_name_had_to_be_short(monkeypatch, depth):
    mark, temporary = uuid.uuid4().hex, tempfile.mkdtemp(prefix="a")
    deep = os.path.join(temporary, *["folder"] * 2 * depth)
    os.makedirs(deep, exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", deep)
    monkeypatch.setenv(reaper.MARK, mark)
    folder = VllmServer(env={}, start_s=1)._folder
    assert len(str(folder / "socket")) < 108
    assert str(folder.parent) == ("/tmp" if depth else temporary)
    assert reaper.sweep(mark=mark, sessions=()) == []
    assert not folder.exists()
    shutil.rmtree(temporary)


def test_a_member_that_ends_and_is_waited_for_just_before_its_signal_does_not_stop_a_sweep(sleeper, monkeypatch):
    others = [sleeper(env={}, start_new_session=True) for _ in range(2)]
    belongs = reaper._belongs

    def ends(pid, mark, sessions):
        belonged = belongs(pid, mark, sessions)
        if belonged and pid == others[0].pid and next(looks):
            others[0].kill()
            others[0].wait()
        return belonged

    looks = iter([False, True])  # the second look is the last before the signal
    monkeypatch.setattr(reaper, "_belongs", ends)
    assert reaper.sweep(mark=None, sessions={each.pid for each in others}) == []
    assert others[1].wait(20) == -9


def test_a_full_disk_on_which_no_folder_can_be_temporary_does_not_stop_a_sweep(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    assert reaper.sweep(mark=uuid.uuid4().hex, sessions=()) == []


def test_a_process_whose_parent_is_already_gone_ends_itself():
    code = "from asyncflow.process import die_with_parent; die_with_parent(); print('went on')"
    env = {**os.environ, PARENT: "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert "went on" not in run.stdout


def test_without_a_supervisor_a_process_goes_on():
    code = "from asyncflow.process import die_with_parent; die_with_parent(); print('went on')"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "went on" in run.stdout
