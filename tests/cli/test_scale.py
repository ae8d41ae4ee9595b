"""``asyncflow scale``: refused at once where it cannot be done, shown, and a level in the run's folder."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncflow.api.load import load_job, to_yaml
from asyncflow.cli import invoke
from asyncflow.local.folder import Placed, Record, RunFolder, requests_of
from asyncflow.local.scaling import Scale, read_requests

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
    scale = Scale(role="rollout", wanted=1, least=1, most=4, by="policy", policy=True)
    record = Record(mark="m", supervisor=1, started="", driver="", http="", processes=placed, scales=[scale])
    record.save(folder.processes)
    yield folder.path
    folder.release()


def test_it_shows_what_is_wanted_by_whom_and_what_is_there(running, capsys):
    assert invoke(["scale", str(running)]) == 0
    assert capsys.readouterr().out == "rollout: 1 wanted of 1 to 4 (the built-in policy); 1 run, 1 leave\n"


def test_what_is_asked_for_is_a_level_that_switches_the_policy_off_until_it_is_given_back(running, capsys):
    for _ in range(2):
        assert invoke(["scale", str(running), "rollout=3"]) == 0
        assert read_requests(requests_of(running)) == {"rollout": 3}
    off = "asked for by asyncflow scale, which switches the built-in policy off"
    assert f"rollout: 3 wanted of 1 to 4 ({off}); 1 run, 1 leave" in capsys.readouterr().out
    assert invoke(["scale", str(running), "rollout=auto"]) == 0
    assert read_requests(requests_of(running)) == {}
    assert "(the built-in policy)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("rollout=0", "rollout=0 is below rollout.minReplicas, 1. Give 1 to 4"),
        ("rollout=5", "rollout=5 is above rollout.maxReplicas, 4. Give 1 to 4, or continue with --resume"),
        ("trainer=2", "trainer: its ranks compute together, so their number stays while it runs"),
        ("driver=2", "driver: its number stays while the job runs"),
        ("nobody=2", "there is no role 'nobody'. The job has driver, controller, storage, trainer, rollout"),
        ("rollout", "'rollout' is not ROLE=NUMBER. Give e.g. rollout=4"),
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


def test_where_no_run_goes_on_nothing_is_asked_for(running, tmp_path, capsys):
    assert invoke(["scale", str(tmp_path), "rollout=2"]) == 2
    assert "no run is going on there. Give the folder of a run" in capsys.readouterr().err
    over = tmp_path / "over"
    subprocess.run([sys.executable, "-c", ENDED, str(over)], check=True)
    assert invoke(["scale", str(over), "rollout=2"]) == 2
    assert "no run is going on there. Continue it with asyncflow run FILE --resume" in capsys.readouterr().err
    assert not requests_of(over).exists()


ENDED = """
import sys
from pathlib import Path
from asyncflow.local.folder import RunFolder
folder = RunFolder.claim(Path(sys.argv[1]))
folder.job.write_text("{}")
"""


def test_the_units_of_a_queue_are_no_rollouts(tmp_path, capsys):
    (tmp_path / "queue.yaml").write_text("{}")
    assert invoke(["scale", str(tmp_path), "rollout=2"]) == 2
    assert "it is a queue, whose number of units stays" in capsys.readouterr().err
