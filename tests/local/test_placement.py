import sys
from pathlib import Path

from asyncflow.api.job import RLJob
from asyncflow.api.names import TOKEN_FILE_ENV
from asyncflow.plan.job import plan
from asyncflow.substrates.local.crew import Seat
from asyncflow.substrates.local.folder import RunFolder
from asyncflow.substrates.local.placement import launcher, seats_of

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
ROLES = plan(JOB).roles
PORTS = dict(zip(seats_of(ROLES), range(16000, 16005), strict=True))


def test_every_seat_gets_the_command_line_of_the_plan(tmp_path):
    folder = RunFolder(tmp_path, lock=-1)
    launch = launcher(ROLES, folder=folder, driver="tcp://127.0.0.1:15001", http_ports=PORTS)
    trainer = launch(Seat("trainer", 0), 4)
    expected = f"-m asyncflow role trainer --job {folder.job} --driver tcp://127.0.0.1:15001 --index 0 --attempt 4"
    assert " ".join(trainer.argv) == f"{sys.executable} {expected} --workdir {tmp_path} --http-port 16003"
    assert trainer.env["OMP_NUM_THREADS"] == "3"
    assert Path(trainer.env[TOKEN_FILE_ENV]) == folder.token


def test_every_seat_serves_at_a_port_of_its_own_that_stays(tmp_path):
    launch = launcher(ROLES, folder=RunFolder(tmp_path, lock=-1), driver="tcp://127.0.0.1:15001", http_ports=PORTS)
    for attempt in (0, 7):
        served = [launch(seat, attempt) for seat in seats_of(ROLES)]
        assert [each.http for each in served] == [f"http://127.0.0.1:{port}" for port in range(16000, 16005)]
        assert [each.argv[-2:] for each in served] == [["--http-port", str(port)] for port in range(16000, 16005)]
