"""``asyncflow scale``: refused at once where it cannot be done, shown, and a level in the run's folder."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncflow.api.load import load_job, to_yaml
from asyncflow.cli import invoke
from asyncflow.commands import scale as command
from asyncflow.local.folder import QUEUE, SYNC, RunFolder, record_of, requests_of
from asyncflow.local.record import Placed, Record
from asyncflow.local.scaling import Scale, Scaling, read_requests
from asyncflow.plan.job import plan

HERE = Path(__file__).parents[2]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that goes on, of 1 to 4 rollouts of which one runs and another leaves."""
    folder = RunFolder.claim(tmp_path / "run")
    job = load_job(HERE / "examples/counting.yaml", ["rollout.replicas=2", "rollout.maxReplicas=4"])
    folder.job.write_text(to_yaml(job))
    placed = [
        Placed(role="rollout", index=index, attempt=0, state=state)
        for index, state in enumerate(("running", "leaving", "left"))
    ]
    scale = Scale(role="rollout", wanted=1, by="policy", policy=True)
    record = Record(mark="m", supervisor=1, started="", driver="", http="", processes=placed, scales=[scale])
    record.save(folder.processes)
    yield folder.path
    folder.release()


@pytest.fixture
def taken_up(running: Path) -> Iterator[None]:
    """The run takes up what is asked for: it has room for two rollouts, and its policy wants one."""
    role = next(role for role in plan(load_job(running / "job.yaml")).roles if role.name == "rollout")
    before = Scale(role="rollout", wanted=1, by="policy", policy=True)
    scaling = Scaling(role=role, file=requests_of(running), policy=True, before=before)
    over = threading.Event()

    def follow() -> None:
        while not over.wait(0.02):
            wanted = scaling.wanted()
            if wanted.wanted > 2:
                wanted = replace(wanted, wanted=2, problem=f"too few devices for {wanted.wanted}")
            replace(record_of(running), scales=[wanted]).save(running / "run" / "processes.json")

    following = threading.Thread(target=follow)
    following.start()
    yield
    over.set()
    following.join()


def test_it_shows_what_is_wanted_by_whom_and_what_is_there(running, capsys):
    assert invoke(["scale", str(running)]) == 0
    assert capsys.readouterr().out == "rollout: 1 wanted of 1 to 4 (set by the built-in policy); 1 run, 1 leave\n"


@pytest.mark.usefixtures("taken_up")
def test_what_is_asked_for_is_a_level_that_switches_the_policy_off_until_it_is_given_back(running, capsys):
    off = "requested by asyncflow scale, which switches the built-in policy off"
    for _ in range(2):
        assert invoke(["scale", str(running), "rollout=2"]) == 0
        assert read_requests(requests_of(running)) == {"rollout": 2}
        assert capsys.readouterr().out == f"rollout: 2 wanted of 1 to 4 ({off}); 1 run, 1 leave\n"
    assert invoke(["scale", str(running), "rollout=auto"]) == 0
    assert read_requests(requests_of(running)) == {}
    assert capsys.readouterr().out == "rollout: 1 wanted of 1 to 4 (set by the built-in policy); 1 run, 1 leave\n"


@pytest.mark.usefixtures("taken_up")
def test_where_there_is_no_room_it_says_why_and_of_this_request(running, capsys):
    for asked in (4, 3):
        assert invoke(["scale", str(running), f"rollout={asked}"]) == 0
        said = capsys.readouterr().out
        assert said.startswith("rollout: 2 wanted of 1 to 4 (requested by asyncflow scale")
        assert said.endswith(f"\n  too few devices for {asked}\n")


def test_a_run_that_does_not_take_it_up_is_shown_as_it_is(running, capsys, monkeypatch):
    monkeypatch.setattr(command, "TAKEN_UP_S", 0.0)
    assert invoke(["scale", str(running), "rollout=3"]) == 0
    shown, noted = capsys.readouterr().out.splitlines()
    assert shown == "rollout: 1 wanted of 1 to 4 (set by the built-in policy); 1 run, 1 leave"
    assert noted == "  rollout=3 is saved, but not applied after 0 s"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("rollout=0", "rollout=0 is below rollout.minReplicas, 1. Use 1 to 4"),
        ("rollout=5", "rollout=5 is above rollout.maxReplicas, 4. Use 1 to 4, or continue with --resume"),
        ("trainer=2", "trainer: its ranks compute together, so their number is fixed while it runs"),
        ("driver=2", "driver: its number is fixed while the job runs"),
        ("nobody=2", "there is no role 'nobody'. The job has driver, controller, storage, trainer, rollout"),
        ("rollout", "'rollout' is not ROLE=NUMBER. Pass e.g. rollout=4"),
        ("rollout=-1", "'rollout=-1' is not ROLE=NUMBER"),
        ("rollout=1e3", "'rollout=1e3' is not ROLE=NUMBER"),
        ("=4", "'=4' is not ROLE=NUMBER"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(running, capsys, asked, words):
    assert invoke(["scale", str(running), asked]) == 2
    assert words in capsys.readouterr().err
    assert read_requests(requests_of(running)) == {}


def test_a_run_whose_number_is_fixed_says_which_field_fixes_it(running, capsys):
    job = load_job(HERE / "examples/counting.yaml", ["rollout.replicas=1"])
    (running / "job.yaml").write_text(to_yaml(job))
    assert invoke(["scale", str(running), "rollout=2"]) == 2
    assert "rollout.minReplicas and rollout.maxReplicas are both 1" in capsys.readouterr().err
    assert invoke(["scale", str(running)]) == 0
    fixed = "rollout: 1, which is fixed (rollout.minReplicas and rollout.maxReplicas are both 1); 1 run, 1 leave\n"
    assert capsys.readouterr().out == fixed


def test_where_no_run_goes_on_nothing_is_asked_for(running, tmp_path, capsys):
    assert invoke(["scale", str(tmp_path), "rollout=2"]) == 2
    assert "no run is active there. Pass the folder of a run" in capsys.readouterr().err
    over = tmp_path / "over"
    subprocess.run([sys.executable, "-c", ENDED, str(over)], check=True)
    assert invoke(["scale", str(over), "rollout=2"]) == 2
    assert "no run is active there. Continue it with asyncflow run FILE --resume" in capsys.readouterr().err
    assert not requests_of(over).exists()


ENDED = """
import sys
from pathlib import Path
from asyncflow.local.folder import RunFolder
folder = RunFolder.claim(Path(sys.argv[1]))
folder.job.write_text("{}")
"""


@pytest.mark.parametrize(("words", "name"), [("scale", SYNC), ("follow", QUEUE)])
def test_what_goes_on_and_is_no_run_is_said_to_be_none(tmp_path, capsys, words, name):
    folder = RunFolder.claim(tmp_path, name=name)
    folder.job.touch()
    Record(mark="m", supervisor=1, started="", driver="tcp://127.0.0.1:1", http="").save(folder.processes)
    assert invoke([words, str(tmp_path)]) == 2
    assert f"{tmp_path}: there is no run. Pass the folder of a run" in capsys.readouterr().err
    folder.release()


def test_the_units_of_a_queue_are_no_rollouts(tmp_path, capsys):
    (tmp_path / "queue.yaml").write_text("{}")
    assert invoke(["scale", str(tmp_path), "rollout=2"]) == 2
    assert "it is a queue, whose number of units is fixed" in capsys.readouterr().err
