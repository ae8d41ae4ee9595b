"""From a job to its roles: a pure function whose result a substrate can place without knowing anything else."""

import io
import re

import pytest

from asyncflow.api import RLJob, load_job
from asyncflow.plan import plan
from asyncflow.plan.describe import duration, size, tables
from asyncflow.plan.job import generated_by
from asyncflow.plan.queue import held_bytes

MANIFEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: planned}
spec:
  model: {source: "tiny://reverse-digits"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  algorithm: {steps: 3}
  sampling: {maxTokens: 8}
"""


def job(*overrides: str) -> RLJob:
    return load_job(io.StringIO(MANIFEST), overrides)


def test_the_table_of_tasks_has_the_critic_behind_the_task_that_asks_it() -> None:
    for more, where in (((), "inside trainer"), (("critic.role={}",), "critic")):
        asked = job("algorithm.name=ppo", "environment={function: calculator}", *more)
        rows = tables(asked, plan(asked, decided="outcome", critic=True))[1].rows
        assert [row[0] for row in rows] == ["rollout", "advantage", "train", "critic"]
        reads = "prompt_ids, response_ids, loss_mask, returns"
        assert rows[-1][1:5] == (where, reads, "values", "queries of train")


def test_roles_start_after_those_they_wait_for() -> None:
    started: set[str] = set()
    for role in plan(job()).roles:
        assert set(role.after) <= started
        started.add(role.name)
    assert [role.name for role in plan(job()).roles] == ["driver", "controller", "storage", "trainer", "rollout"]


def test_numbers_of_processes() -> None:
    planned = plan(
        job(
            "rollout={replicas: 3, minReplicas: 2, maxReplicas: 8}",
            "trainer.replicas=4",
            "transferQueue.storageUnits=5",
        )
    )
    assert {role.name: (role.core, role.replicas, role.most) for role in planned.roles} == {
        "driver": (1, 1, 1),
        "controller": (1, 1, 1),
        "storage": (5, 5, 5),
        "trainer": (4, 4, 4),
        "rollout": (2, 3, 8),
    }
    assert [role.name for role in planned.roles if role.gang] == ["trainer"]
    assert [role.name for role in planned.roles if role.leader] == ["driver"]
    assert [role.name for role in planned.roles if role.elastic] == ["rollout"]
    assert planned.role("trainer").replicas == 4
    with pytest.raises(KeyError):
        planned.role("critic")


@pytest.mark.parametrize(
    ("trainer", "ranks", "cores"),
    [
        ("{replicas: 3}", (1, 3), 1),
        ("{replicas: 2, threads: 3, accelerator: {profile: nvidia, count: 8}}", (8, 16), 24),
        ("{ranksPerReplica: 4}", (4, 4), 4),
        ("{ranksPerReplica: 4, resources: {cpu: 2}}", (4, 4), 2),
    ],
)
def test_a_replica_of_the_trainer_stands_for_a_rank_on_each_device(
    trainer: str, ranks: tuple[int, int], cores: float
) -> None:
    described = job(f"trainer={trainer}")
    role = plan(described).role("trainer")
    assert (role.ranks, role.world) == ranks == (described.spec.trainer.local_ranks, described.spec.trainer.ranks)
    assert role.resources.cpu == cores
    numbers = [
        int(role.rank_variables(index, local_rank=local)["RANK"])
        for index in range(role.replicas)
        for local in range(role.ranks)
    ]
    assert numbers == list(range(role.world))


def test_the_command_line_is_that_of_the_role() -> None:
    command = (
        plan(job())
        .role("rollout")
        .command(
            index=2,
            attempt=1,
            driver="tcp://10.0.0.1:5571",
            job="/etc/asyncflow/job.yaml",
            workdir="/work",
            python="py",
        )
    )
    expected = "py -m asyncflow role rollout --job /etc/asyncflow/job.yaml --driver tcp://10.0.0.1:5571"
    assert command == [*expected.split(), "--index", "2", "--attempt", "1", "--workdir", "/work"]
    driver = plan(job()).role("driver")
    ports = driver.command(index=0, attempt=0, driver="a", job="j", workdir="w", http_port=9, control_port=7)
    assert ports[-4:] == ["--http-port", "9", "--control-port", "7"]
    with pytest.raises(ValueError, match="-1"):
        plan(job()).role("driver").command(index=-1, attempt=0, driver="a", job="j", workdir="w")


def test_threads_and_templates_make_the_environment() -> None:
    planned = plan(
        job(
            "rollout.threads=3",
            "template.env=[{name: A, value: job}, {name: B, value: job}]",
            "rollout.template.env=[{name: B, value: rollout}]",
            "trainer.template.env=[{name: OMP_NUM_THREADS, value: '7'}]",
        )
    )
    rollout, trainer, driver = (planned.role(name).env for name in ("rollout", "trainer", "driver"))
    assert (rollout["OMP_NUM_THREADS"], rollout["A"], rollout["B"]) == ("3", "job", "rollout")
    assert trainer["OMP_NUM_THREADS"] == "7"
    assert (driver["OMP_NUM_THREADS"], driver["B"]) == ("1", "job")


def test_accelerators_bring_their_facts() -> None:
    planned = plan(job("trainer.accelerator={profile: ascend-a3, count: 1}", "trainer.resources.memory=64Gi"))
    trainer = planned.role("trainer")
    assert (trainer.resources.resource, trainer.resources.accelerators) == ("huawei.com/Ascend910", 1)
    assert trainer.resources.memory == 64 << 30
    assert "HCCL_CONNECT_TIMEOUT" in trainer.env
    assert "HCCL_CONNECT_TIMEOUT" not in planned.role("rollout").env


def test_a_unit_may_use_the_memory_of_its_cells() -> None:
    assert (plan(job("transferQueue.bytesPerUnit=1Gi")).role("storage").resources.memory or 0) > 1 << 30


def test_bytes_that_do_not_lie_with_the_units_have_holders() -> None:
    sized = "transferQueue={backend: mooncake, storageUnits: 3, bytesPerUnit: 1Gi}"
    planned = plan(job(sized))
    assert [role.name for role in planned.roles[2:5]] == ["master", "holder", "storage"]
    assert [role.replicas for role in planned.roles[2:5]] == [1, 3, 3]
    assert planned.role("holder").after == ("master",)
    assert planned.role("storage").after == ("driver", "holder")
    assert held_bytes(job(sized).spec.transfer_queue) > 1 << 30
    assert (planned.role("holder").resources.memory or 0) > 1 << 30 > (planned.role("storage").resources.memory or 0)

    of_redis = plan(job("transferQueue={backend: redis, storageUnits: 2}"))
    assert [role.name for role in of_redis.roles[2:4]] == ["holder", "storage"]
    assert of_redis.role("holder").after == ("driver",)


@pytest.mark.parametrize("backend", ["mooncake", "redis"])
def test_a_store_that_others_run_has_no_roles(backend: str) -> None:
    planned = plan(job(f"transferQueue={{backend: {backend}, store: {{address: 'store:1'}}}}"))
    assert [role.name for role in planned.roles] == ["driver", "controller", "storage", "trainer", "rollout"]
    assert planned.role("storage").after == ("driver",)


def test_a_backend_of_another_package_has_no_roles_and_may_hold_the_cells_in_its_units() -> None:
    planned = plan(job("transferQueue={backend: folder, bytesPerUnit: 1Gi}"))
    assert [role.name for role in planned.roles] == ["driver", "controller", "storage", "trainer", "rollout"]
    assert (planned.role("storage").resources.memory or 0) > 1 << 30


def test_budgets_come_from_the_failure_policy() -> None:
    policy = plan(job("failurePolicy.trainer={maxRestarts: 2, windowSeconds: 60, backoffSeconds: 5}")).role("trainer")
    assert (policy.restart.max_restarts, policy.restart.window_s, policy.restart.backoff_s) == (2, 60, 5)
    assert policy.readiness.within_s == job().spec.limits.start_seconds


def test_no_process_starts_again_while_the_job_may_still_be_ending() -> None:
    for seconds in (8, 600):
        roles = plan(job(f"limits.stopSeconds={seconds}")).roles
        assert {role.restart.dismissed_s for role in roles} == {seconds + 7}


def test_a_plan_names_no_address() -> None:
    planned = plan(job())
    for role in planned.roles:
        assert not any(re.search(r"//|\d+\.\d+\.\d+\.\d+", value) for value in role.env.values())


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "D_1, D_2 by θ_0, D_k by θ_{k-2}"),
        (["schedule.mode=sync"], "D_k by θ_{k-1}"),
        (["schedule.mode=periodic"], "D_k by θ_{k-1}"),
        (["schedule.swapAt=sequence", "schedule.maxStaleness=2"], "D_k by θ_{k-3} or newer"),
    ],
)
def test_which_version_generates(overrides: list[str], says: str) -> None:
    assert generated_by(job(*overrides).spec.schedule) == says


def test_tables_are_rectangular_and_tell_the_roles_and_the_tasks() -> None:
    asked = job("rollout.maxReplicas=4", "trainer.replicas=2")
    roles, tasks, figures = tables(asked, plan(asked))
    for table in (roles, tasks, figures):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    told = {row[0]: row[1] for row in roles.rows}
    assert told["rollout"] == "1 (1 to 4)"
    assert told["trainer"] == "2, one gang"
    assert [row[:2] for row in tasks.rows] == [("rollout", "rollout"), ("advantage", "driver"), ("train", "trainer")]
    assert ("optimizer steps", "3") in figures.rows


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (1 << 52, "4096 TiB"), (None, "–")]
)
def test_sizes(count: int | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (60, "1m"), (133, "2m13s"), (11220, "3h07m"), (187200, "2d04h"), (None, "–")],
)
def test_durations_have_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
