from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.job import RLJob
from asyncflow.api.names import RoleName
from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.local.lifecycle import LocalReplica
from asyncflow.local.placement import DeviceAllocator, devices_of, resolve
from asyncflow.plan import plan
from asyncflow.plan.roles import Readiness, Resources, RestartPolicy, Role

NVIDIA = PROFILES["nvidia"]


def role(name: RoleName, replicas: int = 1, *, count: int = 1, share: float = 1.0, profile: str = "nvidia") -> Role:
    return Role(
        name=name,
        replicas=replicas,
        core=replicas,
        most=replicas,
        gang=name in ("trainer", "critic"),
        resources=Resources(cpu=1, profile=profile, accelerators=count, share=share),
        readiness=Readiness(path="/readyz", port="http", within_s=1),
        restart=RestartPolicy(max_restarts=0, window_s=1, backoff_s=1, dismissed_s=15.0),
    )


def handed(*roles: Role, devices: int) -> dict[str, str]:
    given = DeviceAllocator(roles, find=lambda _: [str(index) for index in range(devices)]).assigned
    return {str(replica): value for replica, variables in given.items() for value in variables.values()}


def test_each_process_has_devices_of_its_own() -> None:
    assert handed(
        role("driver", count=0, profile="cpu"), role("trainer", 2), role("rollout", 2, count=3), devices=8
    ) == {
        "rollout-0": "0,1,2",
        "rollout-1": "3,4,5",
        "trainer-0": "6",
        "trainer-1": "7",
    }


def test_roles_share_one_device_by_their_shares() -> None:
    assert handed(role("trainer", share=0.6), role("rollout", 2, share=0.2), devices=1) == dict.fromkeys(
        ("trainer-0", "rollout-0", "rollout-1"), "0"
    )


def test_ranks_of_a_gang_never_share_one() -> None:
    both = role("trainer", 2, share=0.5), role("rollout", 2, share=0.5)
    assert handed(*both, devices=2) == {"trainer-0": "0", "trainer-1": "1", "rollout-0": "0", "rollout-1": "1"}
    with pytest.raises(
        ManifestError, match=r"too few for trainer 2 x 0.5 of one, .*; ranks of a trainer never share one"
    ):
        handed(*both, devices=1)
    two = handed(role("trainer", 2, share=0.5), role("critic", 2, share=0.5), devices=2)
    assert two == {"trainer-0": "0", "trainer-1": "1", "critic-0": "0", "critic-1": "1"}


def test_devices_are_shared_to_the_last_part() -> None:
    halves = handed(role("trainer", share=0.6), role("rollout", 2, share=0.3), devices=3)
    assert halves == {"trainer-0": "0", "rollout-0": "1", "rollout-1": "2"}, "on the devices with the most room"
    thirds = role("trainer", share=0.4), role("rollout", 2, share=0.3)
    assert handed(*thirds, devices=1) == dict.fromkeys(("trainer-0", "rollout-0", "rollout-1"), "0")
    with pytest.raises(ManifestError) as refused:
        handed(role("rollout", 2, share=0.6), devices=1)
    assert "this machine has 1 NVIDIA device, too few for rollout 2 x 0.6 of one" in str(refused.value)
    assert "ranks of a trainer" not in str(refused.value)


def job(trainer: dict[str, Any], rollout: dict[str, Any], **more: Any) -> RLJob:
    source = {"source": "tiny://reverse-digits"}
    spec = {"model": source, "data": {"train": source}, "reward": {"function": "task"}, "algorithm": {"steps": 1}}
    workers = {"trainer": {"accelerator": trainer, **more}, "rollout": {"accelerator": rollout}}
    return RLJob.model_validate(
        {"metadata": {"name": "auto"}, "spec": {**spec, **workers, "sampling": {"maxTokens": 8}}}
    )


def resolved(
    trainer: dict[str, Any], *, visible: str = "", devices: int = 0, **more: Any
) -> tuple[str, int, list[str]]:
    names = [str(index) for index in range(devices)]
    given, notes = resolve(job(trainer, {}, **more), find=lambda facts: names if facts.visible == visible else [])
    chosen = given.spec.trainer.accelerator
    return chosen.profile, chosen.count, notes


AUTO, CUDA, NPU = {"profile": "auto"}, "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"


def test_auto_is_what_the_machine_has() -> None:
    assert resolved(AUTO, visible=CUDA, devices=4)[:2] == ("nvidia", 1)
    assert resolved(AUTO, visible=NPU, devices=8)[:2] == ("ascend-a2", 1)
    assert resolved(AUTO | {"count": 16}, visible=NPU, devices=16)[:2] == ("ascend-a3", 16)
    assert resolved(AUTO, visible=CUDA, devices=4, ranksPerReplica=2)[:2] == ("nvidia", 2)
    assert resolved({"profile": "cpu"}, visible=CUDA, devices=4) == ("cpu", 0, [])


@pytest.mark.parametrize(("visible", "count", "profile"), [(CUDA, 2, "nvidia"), (NPU, 16, "ascend-a3")])
def test_auto_stands_for_devices_of_tasks_too(visible: str, count: int, profile: str) -> None:
    base = job({"profile": "cpu"}, {}).model_dump(mode="json", by_alias=True, exclude_none=True)
    task = {"name": "a", "function": "m:f", "reads": ["reward"], "writes": [{"name": "x"}]}
    task |= {"accelerator": AUTO | {"count": count}}
    base["spec"] |= {"tasks": [task], "reference": {"accelerator": AUTO}, "critic": {"role": {"accelerator": AUTO}}}
    base["spec"]["reward"]["role"] = {"accelerator": AUTO}
    base["spec"]["algorithm"] |= {"name": "ppo", "kl": {"coefficient": 0.1}}
    given, notes = resolve(RLJob.model_validate(base), find=lambda facts: ["0"] if facts.visible == visible else [])
    usual = {CUDA: "nvidia", NPU: "ascend-a2"}[visible]
    critic = given.spec.critic
    assert critic is not None
    for asking, expected in (
        (given.spec.reference, (usual, 1)),
        (critic.role, (usual, 1)),
        (given.spec.reward.role, (usual, 1)),
        (given.spec.tasks[0], (profile, count)),
    ):
        assert asking is not None
        assert (asking.accelerator.profile, asking.accelerator.count) == expected
    assert [note.partition(":")[0] for note in notes] == [
        "spec.reference.accelerator",
        "spec.critic.role.accelerator",
        "spec.reward.role.accelerator",
        "spec.tasks.0.accelerator",
    ]


def test_no_device_is_looked_for_where_a_task_is_left_to_the_users_process() -> None:
    base = job({"profile": "cpu"}, {}, external=True).model_dump(mode="json", by_alias=True, exclude_none=True)
    base["spec"]["tasks"] = [{"name": "a", "reads": ["reward"], "writes": [{"name": "x"}], "accelerator": AUTO}]
    mine = RLJob.model_validate(base)
    assert resolve(mine, find=lambda _: ["0"]) == (mine, [])


def test_auto_is_the_cpu_only_where_no_device_was_asked_for_and_says_so() -> None:
    profile, count, notes = resolved(AUTO)
    assert (profile, count) == ("cpu", 0)
    assert notes == ["spec.trainer.accelerator: auto is {profile: cpu, count: 0}: this machine has no device"]
    assert resolved(AUTO, visible=CUDA, devices=4, backend={"name": "counting"})[:2] == ("cpu", 0)
    asked, _ = resolve(job(AUTO | {"count": 2}, {}), find=lambda _: [])
    with pytest.raises(ManifestError, match="0 NVIDIA devices, too few for trainer 1 x 2"):
        DeviceAllocator(plan(asked).roles, find=lambda _: [])


def test_what_auto_stands_for_keeps_the_rules() -> None:
    for visible in (CUDA, NPU):
        with pytest.raises(ManifestError, match="cannot have this number of devices"):
            resolved(AUTO | {"count": 20}, visible=visible, devices=32)
    with pytest.raises(ManifestError, match="the engine computes on the CPU"):
        resolve(job({}, AUTO | {"count": 1}), find=lambda _: ["0"])


def test_too_few_are_refused_with_what_all_roles_ask_for() -> None:
    with pytest.raises(ManifestError) as refused:
        handed(role("trainer", 2, count=2), role("rollout", count=1), devices=4)
    assert refused.value.where == "spec.rollout.accelerator"
    assert "this machine has 4 NVIDIA devices, too few for trainer 2 x 2, rollout 1 x 1" in str(refused.value)
    for name, section in (("task-mine", "spec.tasks[mine]"), ("critic", "spec.critic.role")):
        with pytest.raises(ManifestError) as refused:
            handed(role(name), devices=0)
        assert refused.value.where == f"{section}.accelerator"


def test_vendors_do_not_mix_and_profiles_of_one_vendor_do() -> None:
    chips = {"CUDA_VISIBLE_DEVICES": ["a"], "ASCEND_RT_VISIBLE_DEVICES": ["0", "1"]}
    roles = role("trainer", profile="ascend-a2"), role("rollout", profile="ascend-a3"), role("critic")
    assert DeviceAllocator(roles, find=lambda facts: chips[facts.visible]).assigned == {
        LocalReplica("trainer", 0): {"ASCEND_RT_VISIBLE_DEVICES": "0"},
        LocalReplica("rollout", 0): {"ASCEND_RT_VISIBLE_DEVICES": "1"},
        LocalReplica("critic", 0): {"CUDA_VISIBLE_DEVICES": "a"},
    }


def test_devices_that_a_template_names_are_nobody_elses() -> None:
    own = replace(role("trainer"), env={"CUDA_VISIBLE_DEVICES": "0, 7"})
    assert handed(own, role("rollout"), devices=2) == {"rollout-0": "1"}
    with pytest.raises(ManifestError, match="all 2 replicas would see the same devices"):
        handed(replace(own, replicas=2), devices=8)
    with pytest.raises(ManifestError, match="names 2 of the 4 devices that a process requests"):
        handed(replace(own, resources=replace(own.resources, accelerators=4)), devices=8)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ("0", "1", "2")),
        ("4, 6", ("4", "6")),
        ("GPU-8a,GPU-8b", ("GPU-8a", "GPU-8b")),
        ("", ()),
        ("-1", ()),
        ("2,-1,3", ("2",)),
    ],
)
def test_devices_are_those_of_the_environment_or_all(
    tmp_path: Path, visible: str | None, expected: tuple[str, ...]
) -> None:
    for name in ("nvidia0", "nvidia5", "nvidia7", "nvidiactl", "nvidia-uvm", "davinci0", "davinci_manager"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {NVIDIA.visible: visible}
    assert devices_of(NVIDIA, environ=environ, folder=tmp_path) == expected
    assert devices_of(PROFILES["ascend-a2"], environ=environ, folder=tmp_path) == ("0",)


@given(
    devices=st.integers(0, 8),
    wanted=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.one_of(
                st.tuples(st.integers(0, 4), st.just(1.0)),
                st.tuples(st.just(1), st.sampled_from((0.1, 0.25, 0.5, 0.6))),
            ),
        ),
        min_size=2,
        max_size=2,
    ),
)
def test_no_device_is_assigned_beyond_its_whole(devices: int, wanted: list[tuple[int, tuple[int, float]]]) -> None:
    names: tuple[RoleName, RoleName] = ("trainer", "rollout")
    roles = [role(name, n, count=count, share=share) for name, (n, (count, share)) in zip(names, wanted, strict=True)]
    try:
        given = handed(*roles, devices=devices)
    except ManifestError:
        assert sum(each.replicas * each.resources.accelerators for each in roles) > devices
        return
    used = dict.fromkeys(map(str, range(devices)), 0.0)
    for each in roles:
        lists = [
            given[f"{each.name}-{index}"].split(",")
            for index in range(each.replicas if each.resources.accelerators else 0)
        ]
        for chosen in lists:
            assert len(set(chosen)) == each.resources.accelerators
            for device in chosen:
                used[device] += each.resources.share
        if each.gang:
            assert len({device for chosen in lists for device in chosen}) == sum(map(len, lists))
    assert all(amount < 1 + 1e-6 for amount in used.values())


def test_a_replica_that_joins_is_given_what_is_left_and_nobody_else_changes() -> None:
    room = DeviceAllocator([role("trainer", 2), role("rollout", 1, count=2)], find=lambda _: [str(i) for i in range(6)])
    before = dict(room.assigned)
    for _ in range(2):
        room.assign(LocalReplica("rollout", 1))
    assert room.assigned == before | {LocalReplica("rollout", 1): {"CUDA_VISIBLE_DEVICES": "4,5"}}
    with pytest.raises(ManifestError, match="6 NVIDIA devices, too few for trainer 2 x 1, rollout 3 x 2"):
        room.assign(LocalReplica("rollout", 2))
    assert len(room.assigned) == 4
