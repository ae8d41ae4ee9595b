import errno
import os
import shutil
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from asyncflow.data.sources import CACHE
from asyncflow.driver import journal
from asyncflow.errors import ManifestError
from asyncflow.local import folder as folders
from asyncflow.local import reaper
from asyncflow.local.folder import RunFolder, record_of, saved_overrides
from asyncflow.local.lifecycle import LocalReplica
from asyncflow.local.record import Placed, Record, RoleLog, first_attempts, load_record, open_log, processes_of


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


@pytest.mark.parametrize("made_a_step", [False, True])
def test_settings_that_were_refused_do_not_stay_unless_a_step_was_made_with_them(tmp_path, made_a_step):
    path = begun(tmp_path / "run")
    (path / "metrics.jsonl").write_text('{"step":1}\n')
    folder = RunFolder.claim(path, resume=True)
    folder.job.write_text("kind: other\n")
    folder.save_overrides(["algorithm.steps=9"])
    if made_a_step:
        (path / "metrics.jsonl").write_text('{"step":1}\n{"step":2}\n')
    folder.release(undo=True)
    new = ("kind: other\n", ["algorithm.steps=9"])
    assert (folder.job.read_text(), saved_overrides(path)) == (new if made_a_step else ("kind: RLJob\n", []))


@pytest.mark.parametrize(("there", "comes"), [("job.yaml", "queue.yaml"), ("queue.yaml", "job.yaml")])
def test_what_is_of_another_kind_is_not_to_be_resumed(tmp_path, there, comes):
    folder = RunFolder.claim(tmp_path, name=there)
    folder.job.touch()
    folder.release()
    holds = {"job.yaml": "a run", "queue.yaml": "a queue"}[there]
    with pytest.raises(ManifestError, match=rf"already holds {holds}\. Move it aside with --fresh, or pass another"):
        RunFolder.claim(tmp_path, name=comes)


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


@pytest.mark.parametrize("made_again", [False, True])
def test_the_lock_of_a_folder_that_was_removed_meanwhile_is_worth_nothing(tmp_path, monkeypatch, made_again):
    lock = tmp_path / "run" / "lock"

    def removed(descriptor, how):
        lock.unlink()
        if made_again:
            lock.touch()

    monkeypatch.setattr(folders.fcntl, "flock", removed)
    with pytest.raises(ManifestError, match="another run is using the folder"):
        RunFolder.claim(tmp_path)


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
        "import os, signal, sys; from pathlib import Path; from asyncflow.local.folder import RunFolder;"
        "RunFolder.claim(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    RunFolder.claim(tmp_path / "run").release()


@pytest.mark.parametrize("place", ["/proc/nowhere", "/sys/nowhere", "FILE/below"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, place):
    (tmp_path / "FILE").touch()
    with pytest.raises(ManifestError, match="cannot write there"):
        RunFolder.claim(tmp_path / place)


def test_a_start_that_fails_halfway_leaves_nobody_holding_the_folder(tmp_path):
    (tmp_path / "logs").write_text("no folder")
    with pytest.raises(ManifestError, match="cannot write there"):
        RunFolder.claim(tmp_path)
    (tmp_path / "logs").unlink()
    RunFolder.claim(tmp_path).release()


@pytest.mark.parametrize(("comes_by", "older"), [(shutil.copytree, False), (shutil.move, False), (shutil.move, True)])
def test_processes_of_a_killed_run_are_ended_but_not_those_of_the_run_of_which_the_folder_is_a_copy(
    tmp_path, comes_by, older
):
    path, mark = begun(tmp_path / "run"), uuid.uuid4().hex
    lock = 0 if older else (path / "run" / "lock").stat().st_ino
    Record(mark=mark, lock=lock, supervisor=1, started="", driver="", http="").save(processes_of(path))
    with subprocess.Popen(["sleep", "600"], env={**os.environ, reaper.MARK: mark}) as left:
        comes_by(path, tmp_path / "other")
        RunFolder.claim(tmp_path / "other", resume=True).release()
        ended = left.poll()
        left.kill()
    assert ended == (None if comes_by is shutil.copytree else -9)


def test_attempts_of_an_earlier_run_are_never_given_again(tmp_path):
    placed = [Placed(role="rollout", index=i, attempt=i, state="done") for i in range(3)]
    record = Record(mark="m", supervisor=1, started="", driver="", http="", processes=placed)
    assert load_record(tmp_path) is None
    (tmp_path / "run").mkdir()
    record.save(processes_of(tmp_path))
    assert load_record(tmp_path) == record
    assert record.next_attempts() == {"rollout": 3}


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", bytes(4096), b'{"mark": 7}'])
def test_a_damaged_record_is_set_aside_and_the_logs_tell_the_attempts(tmp_path, damaged):
    folder = RunFolder.claim(begun(tmp_path / "run"), resume=True)
    for replica, attempts in {"rollout-0": 3, "rollout-1": 5, "driver-0": 1}.items():
        log = RoleLog(folder.log(replica))
        for attempt in range(attempts):
            log.begin(attempt=attempt, argv=["it"])
            log.note(f"attempt {attempt} ended: SIGKILL")
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "attempt").write_text("6")
    folder.processes.write_bytes(damaged)
    folder.release()
    assert load_record(folder.path) is None
    assert folder.processes.read_bytes() == damaged, "to read it changes nothing"
    RunFolder.claim(folder.path, resume=True).release()
    assert folder.processes.with_name("processes.json.bad").read_bytes() == damaged
    assert not folder.processes.exists()
    unused = first_attempts(folder.path, ["rollout", "driver", "trainer", "storage"], record=None)
    assert unused == {"rollout": 5, "driver": 1, "trainer": 7, "storage": 0}


def test_an_attempt_whose_beginning_the_disk_did_not_take_counts_by_its_end(tmp_path):
    folder = RunFolder.claim(begun(tmp_path / "run"), resume=True)
    log = RoleLog(folder.log("rollout-0"))
    log.begin(attempt=0, argv=["it"])
    log.note("attempt 1 ended: SIGKILL")
    folder.release()
    assert first_attempts(folder.path, ["rollout"], record=None) == {"rollout": 2}


def test_a_record_that_the_disk_does_not_give_now_is_left_as_it_is(tmp_path):
    processes_of(tmp_path).mkdir(parents=True)
    for load in (load_record, record_of):
        with pytest.raises(ManifestError, match=r"cannot be read: Is a directory\. Use the account of the run"):
            load(tmp_path)


def test_a_log_that_the_disk_does_not_take_or_give_costs_lines_and_ends_nobody(tmp_path):
    with open_log(Path("/dev/full")) as own:
        own.write("last words")
    log = RoleLog(tmp_path / "none" / "rollout-0.log")
    log.begin(attempt=0, argv=["it"])
    assert log.tail() == [f"its log cannot be read: [Errno 2] No such file or directory: '{log.path}'"]


def test_the_tail_of_a_log_is_what_the_attempt_itself_has_said(tmp_path):
    log = RoleLog(tmp_path / f"{LocalReplica('rollout', 0)}.log")
    log.begin(attempt=0, argv=["old"])
    with log.path.open("a") as file:
        file.write("of the first\n")
    assert log.tail() == ["of the first"]
    log.begin(attempt=1, argv=["new", "a b"])
    assert log.path.read_text().endswith(" attempt 1: new 'a b'\n")
    assert log.tail() == [], "what attempts before have said is not its own"
    with log.path.open("ab") as file:
        file.write(b"\n".join(b"line %d \xff" % n for n in range(100)) + b"\n \n\n")
    log.note("attempt 1 ended")
    tail = log.tail()
    assert len(tail) == 12
    assert tail[-1].startswith("line 99")
    assert "of the first" in log.path.read_text(errors="replace")
    assert os.linesep not in tail[0]


def without_progress(path: Path) -> Path:
    """A folder of a job from which nothing came."""
    begun(path)
    Record(mark="m", supervisor=1, started="", driver="", http="").save(path / "run" / "processes.json")
    (path / "metrics.jsonl").touch()
    (path / "checkpoints" / "step-000001").mkdir(parents=True)
    return path


def evaluated(path: Path) -> None:
    (path / "events.jsonl").write_text('{"event":"evaluation","at":1.0,"step":0}\n')


def stepped(path: Path) -> None:
    (path / "metrics.jsonl").write_text('{"step": 1}\n')


def checkpointed(path: Path) -> None:
    (path / "checkpoints" / "step-000001" / "manifest.json").touch()


def summed_up(path: Path) -> None:
    (path / "summary.json").touch()


def exported(path: Path) -> None:
    (path / "export").mkdir()


def prompted(path: Path) -> None:
    (path / journal.PROMPTS).write_text("{}\n")


@pytest.mark.parametrize(
    ("fresh", "made"), [(False, "processes.json"), (True, "processes.json"), (False, "overrides.json")]
)
def test_the_next_start_takes_the_place_of_one_from_which_nothing_came(tmp_path, fresh, made):
    path, elsewhere = without_progress(tmp_path / "run"), tmp_path / "elsewhere"
    (path / "run" / "processes.json").rename(path / "run" / made)  # without it: killed before a process was started
    (path / "notes.txt").write_text("mine")
    (path / "ledger").rename(elsewhere)
    (path / "ledger").symlink_to(elsewhere)
    folder = RunFolder.claim(path, fresh=fresh)
    assert folder.moved_to is None
    assert not folder.processes.exists()
    folder.release()
    assert sorted(entry.name for entry in path.iterdir()) == ["logs", "notes.txt", "run"]
    assert [entry.name for entry in (path / "run").iterdir()] == ["lock"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "run"]


def test_one_from_which_nothing_came_goes_on_with_what_it_has_on_request(tmp_path):
    path = without_progress(tmp_path / "run")
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    RunFolder.claim(path, resume=True).release()
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_queue_is_never_taken_for_a_run_from_which_nothing_came(tmp_path):
    path = without_progress(tmp_path / "run")
    (path / "job.yaml").rename(path / "queue.yaml")
    with pytest.raises(ManifestError, match="already holds a queue"):
        RunFolder.claim(path)


@pytest.mark.parametrize("progress", [evaluated, stepped, checkpointed, summed_up, exported, prompted])
def test_a_run_that_made_progress_is_never_cleared_away(tmp_path, progress):
    path = without_progress(tmp_path / "run")
    progress(path)
    before = sorted(path.rglob("*"))
    with pytest.raises(ManifestError, match=r"--resume.*--fresh.*--output"):
        RunFolder.claim(path)
    RunFolder.claim(path, resume=True).release(undo=True)
    assert set(before) <= set(path.rglob("*"))
    again = RunFolder.claim(path, fresh=True)
    assert again.moved_to is not None
    shutil.copytree(again.moved_to, path, dirs_exist_ok=True)
    again.release(undo=True)
    assert set(before) <= set(path.rglob("*"))
    assert {again.moved_to / file.relative_to(path) for file in before} <= set(again.moved_to.rglob("*"))


def test_what_a_refused_start_has_made_goes_and_what_it_moved_comes_back(tmp_path):
    path = begun(tmp_path / "run")
    folder = RunFolder.claim(path, fresh=True)
    folder.save_overrides(["a=1"])
    folder.job.write_text("kind: RLJob\n")
    folder.release(undo=True)
    assert (path / "ledger").is_dir()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    deep = RunFolder.claim(tmp_path / "a" / "b")
    deep.release(undo=True)
    assert not (tmp_path / "a").exists()
    others = tmp_path / "others"
    others.mkdir()
    (others / "notes.txt").write_text("mine")
    RunFolder.claim(others).release(undo=True)
    assert [entry.name for entry in others.iterdir()] == ["notes.txt"]


def test_a_run_comes_back_whatever_the_roles_of_a_refused_start_have_made(tmp_path):
    path = begun(tmp_path / "run")
    folder = RunFolder.claim(path, fresh=True)
    for name in ("model", CACHE):
        (folder.path / name).mkdir()
        (folder.path / name / "made").touch()
    folder.release(undo=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert (path / "ledger").is_dir()


@pytest.mark.parametrize("last", ["run", "run/run", "run/logs"])
def test_a_run_comes_back_where_the_folder_after_it_cannot_be_made(tmp_path, monkeypatch, last):
    path, real = begun(tmp_path / "run"), Path.mkdir

    def full(folder, *args, **options):
        if folder == tmp_path / last and not folder.exists():
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(folder, *args, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ManifestError, match="cannot write there: Disk quota"):
        RunFolder.claim(path, fresh=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert (path / "ledger").is_dir()
    monkeypatch.undo()
    RunFolder.claim(path, resume=True).release()


def test_what_a_start_has_not_made_is_never_removed(tmp_path):
    mine = [
        tmp_path / name for name in ("model/config.json", "logs/app-1.log", "logs/mine.txt", "run/mine", "data.jsonl")
    ]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    for end in (lambda folder: folder.release(undo=True), lambda folder: folder.release()):
        folder = RunFolder.claim(tmp_path)
        folder.job.write_text("kind: RLJob\n")
        folder.log("driver-0").touch()
        (tmp_path / "ledger").mkdir()
        Record(mark="m", supervisor=1, started="", driver="", http="").save(folder.processes)
        end(folder)
        assert all(file.read_text() == "mine" for file in mine)
    RunFolder.claim(tmp_path).release(undo=True)
    assert sorted(file for file in tmp_path.rglob("*") if file.is_file()) == sorted(mine)


def test_nothing_of_a_driver_is_left_of_a_start_that_came_to_nothing(tmp_path):
    files = {name for name in journal.FILES if name != journal.SUMMARY} | {f"{journal.LIVES}{journal.ASIDE}"}
    for end in (lambda folder: folder.release(undo=True), lambda folder: folder.release()):
        folder = RunFolder.claim(tmp_path / "run")
        assert not files & {entry.name for entry in folder.path.iterdir()}
        folder.job.write_text("kind: RLJob\n")
        Record(mark="m", supervisor=1, started="", driver="", http="").save(folder.processes)
        folder.processes.with_name(f"processes.json{journal.ASIDE}").touch()
        for name in files:
            (folder.path / name).touch()
        end(folder)
    RunFolder.claim(tmp_path / "run").release(undo=True)
    assert not [entry for entry in tmp_path.rglob("*") if entry.is_file()]


def test_a_step_of_which_only_a_damaged_line_is_left_is_progress(tmp_path):
    path = begun(tmp_path / "run")
    Record(mark="m", supervisor=1, started="", driver="", http="").save(path / "run" / "processes.json")
    (path / f"{journal.METRICS}{journal.ASIDE}").write_text("{}\n")
    with pytest.raises(ManifestError, match="already holds a run"):
        RunFolder.claim(path)


@pytest.mark.parametrize("name", ["events.jsonl", "lives.json", "rewards.json", "metrics.jsonl.bad", "queue.yaml"])
def test_a_file_that_a_run_would_write_over_makes_a_folder_one_that_is_taken(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ManifestError, match=r"already holds a (run|queue)"):
        RunFolder.claim(tmp_path)


def test_settings_are_remembered_and_unreadable_ones_are_said(tmp_path):
    folder = RunFolder.claim(tmp_path / "run")
    assert saved_overrides(folder.path) == []
    folder.save_overrides(["a=1", "b={c: 2}"])
    assert saved_overrides(folder.path) == ["a=1", "b={c: 2}"]
    folder.overrides.write_text("{")
    with pytest.raises(ManifestError, match="pass the run's --set values again"):
        saved_overrides(folder.path)
    folder.release()


def test_a_disk_without_room_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "LEAST_FREE", 1 << 62)
    with pytest.raises(ManifestError, match=r"only \d+ KiB are free there.*Free some space"):
        RunFolder.claim(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_no_manifest_could_hold_is_refused(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(ManifestError, match=r"the path is not UTF-8\. Pass another --output"):
        RunFolder.claim(path)
    assert not path.exists()
