"""Anything may happen in any order: processes die, pods vanish, people delete and scale, events come late or not at
all, the operator is killed between any two writes, the API server refuses. Then trouble ends, and the cluster must come
to the one state that was wanted, having counted every failure once.

The model itself asserts what must never happen at any time: a second pod of a replica, an attempt that goes back, ranks
of two attempts side by side, a pod deleted without a reason on record, a condition with a wrong time.
"""

import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import World
from model_api import MODELS
from model_samples import JOB, QUEUE, SYNC, job_of, names

KEYS = st.sampled_from([JOB, QUEUE, SYNC])
WHICH = st.integers(0, 10_000)
ACTIVE = ("Pending", "Starting", "Running")


class ClusterMachine(RuleBasedStateMachine):
    ranks = 2

    @initialize(seed=st.integers(0, 1000), rollouts=st.integers(0, 4), units=st.integers(1, 3), runs=st.booleans())
    def start(self, seed: int, rollouts: int, units: int, runs: bool) -> None:
        rollout = {"replicas": rollouts, "minReplicas": 0, "maxReplicas": 16}
        job = job_of(trainer={"replicas": self.ranks}, rollout=rollout, transferQueue={"storageUnits": units})
        self.world = World(job, order=random.Random(seed))
        if runs:
            self.world.settle()

    def some(self, which: int, **wanted: object):
        pods = sorted(self.world.pods.values(), key=lambda pod: pod.name)
        pods = [pod for pod in pods if all(getattr(pod, name) == value for name, value in wanted.items())]
        return pods[which % len(pods)] if pods else None

    # The operator.

    @rule(key=KEYS)
    def reconcile(self, key):
        self.world.reconcile(key)

    @rule(key=KEYS, writes=st.integers(0, 6))
    def reconcile_and_die(self, key, writes):
        self.world.reconcile(key, killed_after=writes)

    @rule()
    def operator_restarts(self):
        self.world.restart_operator()

    @rule(which=WHICH, whole=st.booleans())
    def an_event_arrives(self, which, whole):
        late = self.world.late()
        if late and not whole:
            self.world.see(late[which % len(late)])
        elif whole:
            self.world.see_spec()

    @rule()
    def all_events_arrive(self):
        self.world.see_all()

    @rule()
    def the_driver_is_asked(self):
        self.world.look_at_driver()

    # The cluster.

    @rule(which=WHICH)
    def a_pod_moves_on(self, which):
        pod = self.some(which)
        if pod is None or pod.uid in self.world.silent:
            return
        if pod.deleting:
            self.world.vanish(pod)
        elif pod.phase == "Pending":
            self.world.run(pod)
        elif pod.phase == "Running" and not pod.ready:
            self.world.become_ready(pod)

    @rule()
    def all_pods_move_on(self):
        self.world.kubelets_work()

    @rule(which=WHICH, code=st.sampled_from([1, 137, 143]))
    def a_process_dies(self, which, code):
        if pod := self.some(which, phase="Running"):
            self.world.end(pod, code=code)

    @rule(which=WHICH)
    def a_process_just_ends(self, which):
        pod = self.some(which, phase="Running")
        if pod is not None and pod.role != "driver":
            self.world.end(pod, code=0)

    @rule(which=WHICH)
    def a_pod_is_evicted(self, which):
        if pod := self.some(which, phase="Running"):
            self.world.end(pod, code=137, disrupted=True)

    @rule(which=WHICH, given_up=st.booleans())
    def a_node_stops_answering(self, which, given_up):
        if pod := self.some(which, phase="Running"):
            self.world.lose_node_of(pod)
            if given_up and not pod.deleting:
                self.world.take(self.world.pods[pod.name])

    @rule()
    def the_nodes_return(self):
        self.world.nodes_return()

    @rule(which=WHICH)
    def a_person_deletes_a_pod(self, which):
        if pod := self.some(which, deleting=False):
            self.world.take(pod)

    @rule(which=WHICH)
    def a_pod_vanishes(self, which):
        if pod := self.some(which):
            self.world.vanish(pod)

    @rule()
    def the_driver_works(self):
        self.world.driver_works()

    @rule(rollouts=st.integers(0, 6))
    def a_person_scales(self, rollouts):
        self.world.edit(rollout={"replicas": rollouts})

    @precondition(lambda self: QUEUE in self.world.resources)
    @rule(units=st.integers(1, 6))
    def a_person_scales_the_queue(self, units):
        self.world.scale_queue(units)

    @rule(units=st.integers(1, 4))
    def a_person_changes_the_units_of_the_job(self, units):
        self.world.edit(transferQueue={"storageUnits": units})

    @rule(which=WHICH, deletes=st.booleans())
    def a_person_deletes_or_changes_an_object(self, which, deletes):
        refs = sorted(ref for ref in self.world.objects if ref.kind not in MODELS)
        if refs and deletes:
            del self.world.objects[refs[which % len(refs)]]
        elif refs:
            self.world.meddle(refs[which % len(refs)])

    @rule(kind=st.sampled_from(["Service", "PodDisruptionBudget", "ConfigMap", "Secret", "NetworkPolicy"]))
    def the_server_refuses_a_kind_or_no_more(self, kind):
        self.world.refuses ^= {kind}

    @rule()
    def a_person_suspends_or_resumes(self):
        self.world.edit(suspend=not self.world.spec.suspend)

    @rule(refuses=st.booleans())
    def the_quota(self, refuses):
        self.world.quota = refuses

    @rule(rounds=st.integers(1, 12))
    def all_goes_well_for_a_while(self, rounds):
        self.world.run_rounds(rounds)

    @rule(rounds=st.integers(1, 12))
    def all_goes_well_again(self, rounds):
        self.world.run_rounds(rounds)

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0, 120.0]))
    def time_passes(self, seconds):
        self.world.now += seconds

    # What holds.

    @invariant()
    def a_suspended_job_stays_down(self):
        if self.world.status.phase == "Suspended" and self.world.spec.suspend:
            assert not [pod for pod in self.world.pods.values() if pod.role in ("driver", "trainer", "rollout")]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.quota = False
        world.refuses.clear()
        world.give_nodes_up()
        if world.spec.suspend:
            world.settle()
            assert world.status.phase == "Suspended"
            assert world.pods == {}
            world.edit(suspend=False)
        world.settle(healthy=lambda: world.status.phase == "Running")
        rollouts = world.with_role("rollout")
        assert len(rollouts) == world.spec.rollout.replicas
        assert names(pod for pod in world.pods.values() if pod.role != "rollout") == sorted(
            [
                "controller-0",
                "driver-0",
                *(f"storage-{index}" for index in range(world.spec.transfer_queue.storage_units)),
                *(f"trainer-{index}" for index in range(self.ranks)),
            ]
        )
        assert all(pod.ready and not pod.deleting for pod in world.pods.values())
        assert world.resources[QUEUE].model.spec.storage_units == world.spec.transfer_queue.storage_units
        assert {pod.attempt for pod in world.with_role("trainer")} == {world.status.attempt}
        assert world.status.replicas == len(rollouts)
        assert world.status.draining == ()
        self.failures_are_counted_once()
        self.nothing_more_happens()

    def failures_are_counted_once(self) -> None:
        world = self.world
        for role in ("driver", "controller", "storage", "rollout"):
            record = world.record(role)
            assert record.restarts == world.due[role], role
        deaths = len({pod.attempt for rank in range(self.ranks) for pod in world.made[f"demo-trainer-{rank}"]})
        assert world.record("trainer").restarts <= deaths

    def nothing_more_happens(self) -> None:
        world = self.world
        before = world.writes
        for _ in range(12):  # test_idle.py looks at each minute of the hour
            world.now += 300.0
            for key in (JOB, QUEUE, SYNC):
                plan = world.reconcile(key)
                assert plan.stages == ()
                assert plan.status is None or self.says_it_stalls(plan.status)
        assert world.writes - before <= 1

    def says_it_stalls(self, status) -> bool:
        return any(each["type"] == "Stalled" and each["status"] == "True" for each in status["conditions"])


class OneRankMachine(ClusterMachine):
    ranks = 1


def run(machine, *, histories: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_history_ends_in_the_wanted_state() -> None:
    run(ClusterMachine, histories=60, steps=60)


def test_any_history_with_a_trainer_of_one_rank() -> None:
    run(OneRankMachine, histories=60, steps=60)
