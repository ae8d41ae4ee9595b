"""Rollouts: who leaves, how, and that those who stay do not notice."""

from dataclasses import replace

import pytest
from model import World
from model_samples import JOB, START, dead, job_of, names, pending, pod_view

from asyncflow.api.records import RoleRecord
from asyncflow.api.status import DrainingRollout, DriverStatus, RolloutState
from asyncflow.plan import plan
from asyncflow_operator.decide.replicas import ReplicaMoves
from asyncflow_operator.decide.rollouts import RegisteredRollouts, plan_rollouts, still_draining
from asyncflow_operator.decide.times import Alarm, to_rfc3339
from asyncflow_operator.observed import DriverProbe, PodView

ROLE = plan(job_of()).role("rollout")
NOBODY = RegisteredRollouts(None, 0.0)


def known(*rollouts: tuple[int, int, int, str], at: float = START + 50) -> RegisteredRollouts:
    states = {
        index: RolloutState(id=f"worker-{index}", index=index, inflight=inflight, version=version, state=state)
        for index, inflight, version, state in rollouts
    }
    return RegisteredRollouts(states, at)


def plan_replicas(pods, *, target, draining=(), registered=NOBODY, record=None, may_make=True, now=START + 50):
    return plan_rollouts(
        ROLE,
        pods,
        record or RoleRecord(),
        target=target,
        draining=tuple(draining),
        registered=registered,
        drain_s=30.0,
        may_make=may_make,
        alarm=Alarm(now),
    )


def chosen(rollouts):
    return [int(each.name.rpartition("-")[2]) for each in rollouts.draining]


def leaves(pod, *, since=START + 40):
    return DrainingRollout(name=pod.name, uid=pod.uid, since=to_rfc3339(since))


def test_new_ones_get_the_lowest_free_names():
    rollouts = plan_replicas([pod_view("rollout", 1), pod_view("rollout", 4)], target=5, record=RoleRecord(attempt=3))
    assert [(replica.index, replica.attempt) for replica in rollouts.moves.make] == [(0, 3), (2, 3), (3, 3)]
    assert plan_replicas([], target=2, may_make=False).moves.make == ()


def test_rollouts_are_drained_in_order_not_running_least_work_oldest_last():
    pods = [pod_view("rollout", index) for index in range(5)] + [pending("rollout", 5)]
    registered = known(
        (0, 4, 9, "ready"), (1, 1, 7, "ready"), (2, 1, 9, "ready"), (3, 2, 9, "ready"), (4, 2, 9, "ready")
    )
    assert [chosen(plan_replicas(pods, target=count, registered=registered)) for count in (5, 4, 3, 2, 1)] == [
        [5],
        [5, 1],
        [5, 1, 2],
        [5, 1, 2, 4],
        [5, 1, 2, 4, 3],
    ]


def test_a_running_rollout_is_drained_and_deleted_when_the_driver_has_let_go():
    pods = [pod_view("rollout", 0), pod_view("rollout", 1)]
    first = plan_replicas(pods, target=1, registered=known((0, 3, 1, "ready"), (1, 2, 1, "ready")))
    assert chosen(first) == [1]
    assert [order.path for order in first.moves.orders] == ["/v1/rollouts/worker-1/drain"]
    assert first.moves.remove == ()
    asked = plan_replicas(
        pods, target=1, draining=first.draining, registered=known((0, 3, 1, "ready"), (1, 2, 1, "draining"))
    )
    assert (asked.moves.orders, asked.moves.remove, asked.moves.make) == ((), (), ())
    gone = plan_replicas(pods, target=1, draining=first.draining, registered=known((0, 3, 1, "ready")))
    assert [delete.ref.name for delete in gone.moves.remove] == ["demo-rollout-1"]


def test_an_answer_from_before_the_choice_does_not_say_that_it_has_left():
    pod = pod_view("rollout", 0)
    registered = known(at=START + 30)
    alarm = Alarm(START + 45)
    rollouts = plan_rollouts(
        ROLE,
        [pod],
        RoleRecord(),
        target=0,
        draining=(leaves(pod),),
        registered=registered,
        drain_s=30.0,
        may_make=True,
        alarm=alarm,
    )
    assert rollouts.moves.remove == ()
    assert alarm.again_in_s == 5.0


def test_an_ended_overdue_or_unknown_rollout_is_deleted():
    slow = pod_view("rollout", 0)
    draining = known((0, 5, 1, "draining"))
    for pods, registered, now in (
        ([dead("rollout", 0, code=0)], draining, START + 50),
        ([slow], draining, START + 81),
        ([slow], NOBODY, START + 41),
    ):
        rollouts = plan_replicas(pods, target=0, draining=[leaves(pods[0])], registered=registered, now=now)
        assert [delete.uid for delete in rollouts.moves.remove] == [pods[0].uid]
    assert (
        plan_replicas([slow], target=0, draining=[leaves(slow)], registered=draining, now=START + 79).moves.remove == ()
    )


def test_a_rollout_that_has_not_begun_is_made_again_by_a_spec_that_changed():
    pods = [pod_view("rollout", 0), pending("rollout", 1, outdated=True), pending("rollout", 2)]
    rollouts = plan_replicas(pods, target=3)
    assert [delete.ref.name for delete in rollouts.moves.remove] == ["demo-rollout-1"]
    assert rollouts.moves.make == ()
    assert [each.index for each in plan_replicas([pods[0], pods[2]], target=3).moves.make] == [1]
    assert plan_replicas([pods[0], replace(pods[1], deleting=True)], target=2).moves == ReplicaMoves()


def test_a_draining_rollout_does_not_count_and_keeps_its_name():
    old = pod_view("rollout", 0)
    rollouts = plan_replicas(
        [old, pod_view("rollout", 1)], target=2, draining=[leaves(old)], registered=known((0, 1, 1, "draining"))
    )
    assert [replica.index for replica in rollouts.moves.make] == [2]
    assert rollouts.staying == 1


def test_a_name_that_has_another_pod_by_now_is_not_draining():
    old, new = pod_view("rollout", 0), pod_view("rollout", 0, attempt=1)
    assert still_draining((leaves(old),), [new]) == ()


@pytest.mark.parametrize("idle", [dead("rollout"), pending("rollout"), pod_view("rollout", deleting=True)])
def test_what_does_not_run_leaves_before_any_rollout_that_does(idle: PodView):
    assert chosen(plan_replicas([idle, pod_view("rollout", 1)], target=1, registered=known((1, 0, 0, "ready")))) == [0]


def test_an_old_answer_of_the_driver_is_no_answer():
    probe = DriverProbe(status=DriverStatus(rollouts=(RolloutState(id="a", index=0),)), at=START)
    assert list(RegisteredRollouts.of(probe, START + 30).by_index or {}) == [0]
    assert RegisteredRollouts.of(probe, START + 31).by_index is None
    assert RegisteredRollouts.of(DriverProbe(), START).by_index is None


def test_scaling_down_and_up_again_in_a_running_job():
    world = World(job_of(rollout={"replicas": 4, "minReplicas": 1, "maxReplicas": 8}))
    world.settle()
    world.edit(rollout={"replicas": 1})
    world.see_all()
    world.reconcile(JOB)
    assert len(world.status.draining) == 3
    assert len(world.drained) == 3
    assert len(world.with_role("rollout")) == 4
    world.edit(rollout={"replicas": 3})
    world.settle()
    assert len(world.with_role("rollout")) == 3
    assert world.status.draining == ()
    assert world.status.failures["rollout"].restarts == 0


def test_drained_rollouts_use_no_budget_and_leave_no_remains():
    world = World(job_of(rollout={"replicas": 3, "minReplicas": 0, "maxReplicas": 8}))
    world.settle()
    world.edit(rollout={"replicas": 0})
    world.settle()
    assert world.with_role("rollout") == []
    assert world.status.failures["rollout"] == RoleRecord()


def test_a_hundred_kills_and_scalings_of_rollouts_never_touch_the_trainer():
    world = World(job_of(rollout={"replicas": 4, "minReplicas": 0, "maxReplicas": 8}, trainer={"replicas": 2}))
    world.settle()
    others = [pod for pod in world.pods.values() if pod.role != "rollout"]
    for turn in range(100):
        rollouts = [pod for pod in world.with_role("rollout") if pod.phase == "Running" and not pod.deleting]
        pod = world.order.choice(rollouts) if rollouts else None
        match turn % 5, pod:
            case (0, _) | (_, None):
                world.edit(rollout={"replicas": world.order.randint(0, 8)})
            case 1, _:
                world.end(pod, code=137)
            case 2, _:
                world.end(pod, code=137, disrupted=True)
            case 3, _:
                world.take(pod)
            case 4, _:
                world.vanish(pod)
        world.run_rounds(world.order.randint(0, 3))
        assert [pod for pod in world.pods.values() if pod.role != "rollout"] == others
    world.settle()
    assert len(world.with_role("rollout")) == world.spec.rollout.replicas
    assert world.status.attempt == 0
    assert names(others) == ["controller-0", "driver-0", "storage-0", "storage-1", "trainer-0", "trainer-1"]


def test_decisions_about_other_roles_read_no_rollouts():
    world = World(job_of(trainer={"replicas": 2}))
    world.settle()
    crashed = [replace(pod, phase="Failed", exit_code=1) for pod in world.with_role("rollout")]
    for pod in crashed:
        world.seen_pods[pod.name] = pod
    plan_ = world.decide(JOB)
    touched = {action.ref.name for stage in plan_.stages for action in stage if hasattr(action, "ref")}
    assert not any("trainer" in name for name in touched)


def test_a_rollout_that_is_being_deleted_is_not_drained_again():
    pod = pod_view("rollout", 0, deleting=True)
    rollouts = plan_replicas([pod], target=0, draining=[leaves(pod)], registered=known((0, 1, 1, "ready")))
    assert rollouts.moves == ReplicaMoves()


def shrinking() -> World:
    """Return a job of three rollouts, two of which are on their way out."""
    world = World(job_of(rollout={"replicas": 3, "minReplicas": 0, "maxReplicas": 8}))
    world.settle()
    world.edit(rollout={"replicas": 1})
    world.see_all()
    world.reconcile(JOB)
    return world


def test_a_rollout_that_fails_on_its_way_out_uses_no_budget():
    world = shrinking()
    for each in world.status.draining:
        world.end(world.pods[each.name], code=1)
    world.settle()
    assert world.status.restarts == {}
    assert world.status.failures["rollout"].attempt == 0


def test_a_rollout_whose_node_is_gone_is_replaced_at_once_under_its_name():
    world = World(job_of(rollout={"replicas": 3, "minReplicas": 0, "maxReplicas": 8}))
    world.settle()
    lost = world.with_role("rollout")[1]
    others = [pod for pod in world.pods.values() if pod.uid != lost.uid]
    world.lose_node_of(lost)
    world.take(world.pods[lost.name])
    world.run_rounds(3)
    assert [(pod.index, pod.attempt, pod.ready) for pod in world.with_role("rollout")] == [
        (0, 0, True),
        (1, 1, True),
        (2, 0, True),
    ]
    assert all(pod in world.pods.values() for pod in others)
    assert world.status.failures["rollout"].restarts == 0
    assert "NodeLost" in world.notes


def test_a_rollout_on_its_way_out_whose_node_is_gone_is_not_waited_for():
    world = shrinking()
    for each in world.status.draining:
        world.lose_node_of(world.pods[each.name])
        world.take(world.pods[each.name])
    world.settle()
    assert len(world.with_role("rollout")) == 1
    assert world.status.draining == ()
