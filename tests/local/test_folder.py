import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.errors import ManifestError
from asyncflow.substrates.local.crew import Seat
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.logs import RoleLog, open_log
from asyncflow.substrates.local.record import Placed, Record, attempts_in_logs, load_record


def begun(path: Path) -> Path:
    """A folder in which a run has been."""
    folder = RunFolder.claim(path)
    folder.job.write_text("kind: RLJob\n")
    (folder.path / "ledger").mkdir()
    folder.release()
    return path


def test_a_new_folder_is_made_with_a_private_part(tmp_path):
    folder = RunFolder.claim(tmp_path / "a" / "b")
    folder.write_token()
    assert stat.S_IMODE((folder.path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.token.stat().st_mode) == 0o600
    assert len(folder.token.read_text()) >= 32
    folder.release()
    assert not folder.token.exists()


def test_a_folder_with_other_files_is_used_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.claim(tmp_path).release()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_is_not_written_over(tmp_path):
    path = begun(tmp_path / "run")
    with pytest.raises(ManifestError, match=r"--resume.*--fresh.*--output"):
        RunFolder.claim(path)


def test_a_run_is_resumed_where_it_lies(tmp_path):
    path = begun(tmp_path / "run")
    folder = RunFolder.claim(path, resume=True)
    assert folder.moved_to is None
    assert folder.job.exists()
    folder.release()


def test_nothing_cannot_be_resumed_and_nothing_is_made(tmp_path):
    with pytest.raises(ManifestError, match="no run to resume"):
        RunFolder.claim(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_fresh_moves_runs_aside_and_deletes_none(tmp_path):
    path = begun(tmp_path / "run")
    for number in (1, 2):
        folder = RunFolder.claim(path, fresh=True)
        assert folder.moved_to == tmp_path / f"run.{number}"
        assert (folder.moved_to / "job.yaml").exists()
        assert not (path / "job.yaml").exists()
        folder.release()
        begun(path)


def test_fresh_without_a_run_is_an_ordinary_beginning(tmp_path):
    folder = RunFolder.claim(tmp_path / "run", fresh=True)
    assert folder.moved_to is None
    folder.release()


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"fresh": True}])
def test_two_runs_never_share_a_folder(tmp_path, how):
    path = begun(tmp_path / "run") if how else tmp_path / "run"
    folder = RunFolder.claim(path, resume=bool(how))
    with pytest.raises(ManifestError, match="another run is using the folder"):
        RunFolder.claim(path, **how)
    folder.release()
    RunFolder.claim(path, **how).release()


def test_who_begins_where_a_run_goes_on_is_told_that_it_goes_on(tmp_path):
    path = begun(tmp_path / "run")
    folder = RunFolder.claim(path, resume=True)
    with pytest.raises(ManifestError, match="another run is using the folder"):
        RunFolder.claim(path)
    folder.release()
    with pytest.raises(ManifestError, match="already holds a run"):
        RunFolder.claim(path)


def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from asyncflow.substrates.local.folder import RunFolder;"
        "RunFolder.claim(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    RunFolder.claim(tmp_path / "run").release()


@pytest.mark.parametrize("place", ["/proc/nowhere", "/sys/nowhere", "FILE/below"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "FILE").touch()
    with pytest.raises(ManifestError, match="cannot write there"):
        RunFolder.claim(tmp_path / place)


def test_attempts_of_an_earlier_run_are_never_given_again(tmp_path):
    placed = [Placed(role="rollout", index=i, attempt=i, state="done") for i in range(3)]
    record = Record(mark="m", supervisor=1, started="", driver="", http="", processes=placed)
    record.save(tmp_path / "processes.json")
    assert load_record(tmp_path / "processes.json") == record
    assert record.next_attempts() == {"rollout": 3}
    assert load_record(tmp_path / "absent.json") is None


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", bytes(4096), b'{"mark": 7}'])
def test_a_damaged_record_is_set_aside_and_the_logs_tell_the_attempts(tmp_path, damaged):
    folder = RunFolder.claim(begun(tmp_path / "run"), resume=True)
    for seat, attempts in {"rollout-0": 3, "rollout-1": 5, "driver-0": 1}.items():
        log = RoleLog(folder.log(seat))
        for attempt in range(attempts):
            log.begin(attempt=attempt, argv=["it"])
            log.note(f"attempt {attempt} ended: SIGKILL")
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "attempt").write_text("6")
    folder.processes.write_bytes(damaged)
    folder.release()
    RunFolder.claim(folder.path, resume=True).release()
    assert folder.processes.with_name("processes.json.bad").read_bytes() == damaged
    assert load_record(folder.processes) is None
    assert attempts_in_logs(folder.path) == {"rollout": 5, "driver": 1, "trainer": 7}


def test_a_record_that_the_disk_does_not_give_now_is_left_as_it_is(tmp_path):
    (tmp_path / "processes.json").mkdir()
    with pytest.raises(ManifestError, match=r"cannot be read: Is a directory\. Nothing was changed; try again"):
        load_record(tmp_path / "processes.json")


def test_a_log_that_the_disk_does_not_take_or_give_costs_lines_and_ends_nobody(tmp_path):
    with open_log(Path("/dev/full")) as own:
        own.write("last words")
    log = RoleLog(tmp_path / "none" / "rollout-0.log")
    log.begin(attempt=0, argv=["it"])
    assert log.tail() == [f"its log cannot be read: [Errno 2] No such file or directory: '{log.path}'"]


def test_the_tail_of_a_log_is_what_the_attempt_itself_has_said(tmp_path):
    log = RoleLog(tmp_path / f"{Seat('rollout', 0)}.log")
    log.begin(attempt=0, argv=["old"])
    with log.path.open("a") as file:
        file.write("of the first\n")
    log.begin(attempt=1, argv=["new", "a b"])
    with log.path.open("ab") as file:
        file.write(b"\n".join(b"line %d \xff" % n for n in range(100)) + b"\n")
    log.note("attempt 1 ended")
    tail = log.tail()
    assert len(tail) == 12
    assert tail[-1].startswith("line 99")
    assert "of the first" in log.path.read_text(errors="replace")
    assert os.linesep not in tail[0]
