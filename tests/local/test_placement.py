import sys
from pathlib import Path

from asyncflow.api.job import RLJob
from asyncflow.api.names import TOKEN_FILE_ENV
from asyncflow.plan.job import plan
from asyncflow.substrates.local.crew import Seat
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.placement import launcher

JOB = RLJob.model_validate(
    {
        "metadata": {"name": "little"},
        "spec": {
            "model": {"source": "tiny://reverse-digits"},
            "data": {"train": {"source": "tiny://reverse-digits"}},
            "reward": {"function": "task"},
            "algorithm": {"steps": 10},
            "sampling": {"maxTokens": 16},
            "trainer": {"threads": 3},
        },
    }
)


def test_every_seat_gets_the_command_line_of_the_plan(tmp_path):
    folder = RunFolder(tmp_path, lock=-1)
    launch = launcher(plan(JOB), folder=folder, driver="tcp://127.0.0.1:15001", http_port=15002)
    trainer = launch(Seat("trainer", 0), 4)
    expected = f"-m asyncflow role trainer --job {folder.job} --driver tcp://127.0.0.1:15001 --index 0 --attempt 4"
    assert " ".join(trainer.argv) == f"{sys.executable} {expected} --workdir {tmp_path}"
    assert trainer.env["OMP_NUM_THREADS"] == "3"
    assert Path(trainer.env[TOKEN_FILE_ENV]) == folder.token


def test_only_the_driver_is_told_its_http_port(tmp_path):
    launch = launcher(plan(JOB), folder=RunFolder(tmp_path, lock=-1), driver="tcp://127.0.0.1:15001", http_port=15002)
    told = {role: "--http-port" in launch(Seat(role, 0), 0).argv for role in ("driver", "rollout", "storage")}
    assert told == {"driver": True, "rollout": False, "storage": False}
