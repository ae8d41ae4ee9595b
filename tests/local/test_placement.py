import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncflow.api.job import RLJob
from asyncflow.api.names import TLS_ENV, TOKEN_FILE_ENV
from asyncflow.identity import ProcessIdentity
from asyncflow.local.folder import RunFolder
from asyncflow.local.issuer import Issuer
from asyncflow.local.lifecycle import LocalReplica
from asyncflow.local.placement import Places, launcher, modules_of, replicas_of
from asyncflow.plan.job import plan
from asyncflow.plan.roles import Resources, Role
from asyncflow.rpc.tls import Credentials

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
PORTS = dict(zip(replicas_of(ROLES), range(16000, 16005), strict=True))


def places(roles: Sequence[Role] = ROLES) -> Places:
    return Places(roles, ports=PORTS, another_port=iter(range(17000, 17009)).__next__)


def test_every_replica_gets_the_command_line_of_the_plan(tmp_path):
    folder = RunFolder(tmp_path, lock=-1)
    launch = launcher(ROLES, folder=folder, issuer=Issuer(folder.tls), driver="tcp://127.0.0.1:15001", places=places())
    trainer = launch(LocalReplica("trainer", 0), 4)
    expected = f"-m asyncflow role trainer --job {folder.job} --driver tcp://127.0.0.1:15001 --index 0 --attempt 4"
    assert " ".join(trainer.argv) == f"{sys.executable} {expected} --workdir {tmp_path} --http-port 16003"
    assert trainer.env["OMP_NUM_THREADS"] == "3"
    assert Path(trainer.env[TOKEN_FILE_ENV]) == folder.token
    job = Issuer(folder.tls).authority.job
    assert Credentials(Path(trainer.env[TLS_ENV])).process == ProcessIdentity(job, "trainer", 0)


def test_every_replica_serves_at_a_port_of_its_own_that_stays(tmp_path):
    launch = launcher(
        ROLES,
        folder=RunFolder(tmp_path, lock=-1),
        issuer=Issuer(tmp_path),
        driver="tcp://127.0.0.1:15001",
        places=places(),
        control_port=15002,
    )
    for attempt in (0, 7):
        served = [launch(replica, attempt) for replica in replicas_of(ROLES)]
        assert [each.http for each in served] == [f"http://127.0.0.1:{port}" for port in range(16000, 16005)]
        for port, each in zip(range(16000, 16005), served, strict=True):
            assert each.argv[each.argv.index("--http-port") + 1] == str(port)
        assert [each.argv[-2:] == ["--control-port", "15002"] for each in served] == [True, *[False] * 4]


def test_a_replica_that_joins_is_given_a_port_and_keeps_it(tmp_path):
    given = places()
    launch = launcher(
        ROLES,
        folder=RunFolder(tmp_path, lock=-1),
        issuer=Issuer(tmp_path),
        driver="tcp://127.0.0.1:15001",
        places=given,
    )
    for _ in range(2):
        for index in range(3):
            given.assign(LocalReplica("rollout", index))
    served = [launch(LocalReplica("rollout", index), 0).http for index in range(3)]
    assert served == ["http://127.0.0.1:16004", "http://127.0.0.1:17000", "http://127.0.0.1:17001"]


def test_only_a_role_without_devices_or_variables_of_the_users_may_be_forked(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    folder, address = RunFolder(tmp_path, lock=-1), "tcp://127.0.0.1:15001"
    device = Resources(cpu=1, profile="nvidia", accelerators=1)
    changed = {"rollout": {"env": {"MINE": "1"}}, "trainer": {"env": {}, "resources": device}}
    roles = [replace(each, **changed.get(each.name, {})) for each in ROLES]
    launch = launcher(roles, folder=folder, issuer=Issuer(folder.tls), driver=address, places=places(roles))
    launches = {each.name: launch(LocalReplica(each.name, 0), 0) for each in roles}
    forked = {name: each.imports for name, each in launches.items()}
    assert forked == {each.name: None if each.name in changed else modules_of(each) for each in roles}
    assert forked["driver"][:2] == ("asyncflow.cli", "asyncflow.roles.driver")
    assert launches["trainer"].env["CUDA_VISIBLE_DEVICES"] == "5"
