"""A TransferQueue: of a job, and alone."""

from dataclasses import replace

import pytest
from model import World
from model_samples import DESIRED, JOB, QUEUE, START, dead, job_of, names, pending, pod_view

from asyncflow.api.queue import QueueStatus, TransferQueue
from asyncflow.api.status import DriverStatus, QueueDepth
from asyncflow_operator.actions import Apply, Plan
from asyncflow_operator.decide import decide_queue
from asyncflow_operator.observed import Denial, DriverProbe, NodeFree, ObjectView, Owner, Ref, TransferQueueState

OWNER = Owner(kind="TransferQueue", namespace="team", name="demo", uid="uid-queue", generation=2)


def alone(*pods, units: int = 2, status: QueueStatus | None = None, **changes) -> TransferQueueState:
    metadata = {"name": "demo", "namespace": "team"}
    queue = TransferQueue.model_validate({"metadata": metadata, "spec": {"storageUnits": units}})
    supported = {
        Ref(each["kind"], each["metadata"]["name"]): ObjectView(
            ref=Ref(each["kind"], each["metadata"]["name"]),
            uid="u",
            digest=each["metadata"]["annotations"]["asyncflow.dev/digest"],
        )
        for each in DESIRED.queue_supporting(TransferQueueState(owner=OWNER, queue=queue))
    }
    usual = {"owner": OWNER, "queue": queue, "pods": pods, "objects": supported, "status": status or QueueStatus()}
    return TransferQueueState(**(usual | changes))


def decide(state: TransferQueueState, now: float = START) -> Plan:
    return decide_queue(state, now=now, desired=DESIRED)


def made(plan: Plan) -> list[str]:
    actions = [action for stage in plan.stages for action in stage if isinstance(action, Apply)]
    return [each.manifest["metadata"]["name"] for each in actions if each.manifest["kind"] == "Pod"]


def removed(plan: Plan) -> list[str]:
    return [action.ref.name for stage in plan.stages for action in stage if not isinstance(action, Apply)]


def after(state: TransferQueueState, plan: Plan) -> TransferQueueState:
    return replace(state, status=QueueStatus.model_validate(plan.status, by_name=False)) if plan.status else state


def condition(plan: Plan, kind: str) -> tuple[str, str]:
    return next((each["status"], each["reason"]) for each in plan.status["conditions"] if each["type"] == kind)


def test_alone_the_controller_comes_first():
    first = decide(alone(objects={}))
    assert made(first) == ["demo-controller-0"]
    assert {each.manifest["kind"] for each in first.stages[0]} >= {"ConfigMap", "Secret", "Service"}
    starts = alone(pod_view("controller", ready=False))
    assert made(decide(starts)) == []
    assert made(decide(after(starts, decide(starts)))) == []
    going = {ref: replace(view, deleting=ref.kind == "Service") for ref, view in starts.objects.items()}
    assert made(decide(replace(starts, objects=going))) == []
    assert made(decide(alone(pod_view("controller")))) == ["demo-storage-0", "demo-storage-1"]


def test_alone_it_says_where_it_is_and_when_it_is_ready():
    ready = decide(alone(pod_view("controller"), pod_view("storage", 0), pod_view("storage", 1)))
    assert ready.status["address"] == "tcp://demo-controller.team.svc:5571"
    assert ready.status["readyUnits"] == 2
    assert "rows" not in ready.status
    assert condition(ready, "Ready") == ("True", "Ready")
    assert condition(ready, "Accepted") == ("True", "Accepted")
    assert condition(ready, "Progressing") == ("False", "Settled")
    waiting = decide(alone(pod_view("controller"), pod_view("storage", 0), pending("storage", 1, node="node-1")))
    assert condition(waiting, "Ready") == ("False", "Starting")
    lost = replace(pod_view("storage", 1), ready=False, unreachable=True)
    gone = decide(alone(pod_view("controller"), pod_view("storage", 0), lost))
    assert condition(gone, "Ready") == ("False", "NodeLost")
    assert condition(waiting, "Progressing") == ("True", "Starting")


def test_alone_it_says_why_a_process_does_not_run():
    claim = Ref("PersistentVolumeClaim", "demo-ledger")
    words = "pod has unbound immediate PersistentVolumeClaims"
    pod = pending("controller", unschedulable=words, claims=(claim.name,))
    state = alone(pod, objects={claim: ObjectView(ref=claim, uid="u", phase="Pending")})
    (ready,) = (each for each in decide(state).status["conditions"] if each["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ClaimPending")
    only, why = "Only controller 0/1, storage 0/2 ready", "demo-controller-0 needs a volume, and no volume is bound to"
    assert ready["message"] == f"{only}. {why} demo-ledger. `kubectl describe pvc` says why"
    nodes = (NodeFree(name="n", free={"cpu": 0.5}),)
    small = decide(alone(replace(pod, unschedulable="Insufficient cpu"), nodes=nodes))
    assert condition(small, "Ready") == ("False", "Unschedulable")
    quota = (Denial(Ref("Pod", "demo-storage-0"), "exceeded quota", missing=True),)
    assert condition(decide(alone(pod, denied=quota)), "Ready") == ("False", "Denied"), "as WhyPending of a job"
    change = (replace(quota[0], missing=False),)
    assert condition(decide(alone(pod, denied=change)), "Ready") == ("False", "Unschedulable")


def test_once_it_was_ready_a_unit_does_not_wait_for_the_controller():
    state = alone(pod_view("controller"), pod_view("storage", 0), pod_view("storage", 1))
    ran = after(state, decide(state))
    assert made(decide(replace(ran, pods=(pending("controller"), pod_view("storage", 1))))) == ["demo-storage-0"]


def test_units_come_and_go_at_the_upper_end_one_after_another():
    controller, units = pod_view("controller"), [pod_view("storage", index) for index in range(4)]
    assert made(decide(alone(controller, units[0], units=4))) == [f"demo-storage-{index}" for index in (1, 2, 3)]
    assert removed(decide(alone(controller, *units, units=2))) == ["demo-storage-3"]
    leaving = replace(units[3], deleting=True)
    assert removed(decide(alone(controller, *units[:3], leaving, units=2))) == []
    assert removed(decide(alone(controller, *units[:3], units=2))) == ["demo-storage-2"]
    unbegun = pending("storage", 2, outdated=True)
    assert removed(decide(alone(controller, *units[:2], unbegun, units[3], units=2))) == ["demo-storage-3"]


def test_a_holder_too_many_goes_after_its_unit():
    spec = {"storageUnits": 1, "backend": "redis"}
    queue = TransferQueue.model_validate({"metadata": {"name": "demo", "namespace": "team"}, "spec": spec})
    stays = (pod_view("controller"), pod_view("holder"), pod_view("storage"))
    unit, holder = pod_view("storage", 1), pod_view("holder", 1)
    assert removed(decide(alone(*stays, unit, holder, queue=queue))) == ["demo-storage-1"]
    assert removed(decide(alone(*stays, replace(unit, deleting=True), holder, queue=queue))) == []
    assert removed(decide(alone(*stays, holder, queue=queue))) == ["demo-holder-1"]


def test_a_lost_unit_is_replaced_alone_after_its_backoff():
    lost = dead("storage", 1, at=START)
    state = alone(pod_view("controller"), pod_view("storage", 0), lost)
    counted = decide(state, START)
    assert removed(counted) == []
    assert [note.reason for note in counted.notes] == ["StorageFailed"]
    state = after(state, counted)
    assert removed(decide(state, START + 1)) == [lost.name]
    again = decide(replace(state, pods=state.pods[:2]), START + 2)
    assert made(again) == [lost.name]
    assert again.stages[-1][0].manifest["metadata"]["labels"]["asyncflow.dev/attempt"] == "1"


def test_a_unit_that_has_not_begun_is_made_again_by_a_spec_that_changed():
    state = alone(pod_view("controller"), pod_view("storage", 0), pending("storage", 1, outdated=True))
    assert removed(decide(state)) == ["demo-storage-1"]
    again = decide(replace(state, pods=state.pods[:2]))
    assert made(again) == ["demo-storage-1"]
    assert again.stages[-1][0].manifest["metadata"]["labels"]["asyncflow.dev/attempt"] == "0"


def test_a_budget_that_is_used_up_degrades_it_until_the_window_is_over():
    state = alone(pod_view("controller"), pod_view("storage", 0), dead("storage", 1))
    record = {"storage": {"restarts": 10, "windowStart": "2027-01-15T08:00:00Z", "attempt": 3}}
    state = replace(state, status=QueueStatus.model_validate({"failures": record}, by_name=False))
    plan = decide(state, START + 10)
    assert condition(plan, "Degraded") == ("True", "BudgetExceeded")
    assert condition(plan, "Ready") == ("False", "BudgetExceeded"), "it does not start"
    assert plan.again_in_s == 3590.0
    stuck = after(state, plan)
    assert removed(decide(stuck, START + 100)) == []
    assert removed(decide(stuck, START + 3600)) == ["demo-storage-1"]


def test_a_jobs_queue_shows_the_drivers_figures():
    world = World(job_of())
    world.settle()
    depth = QueueDepth(ready=3, leased=4, staged=5, bytes=600, limit=1000)
    seen = world.probe.status.model_copy(update={"queue": depth})
    world.probe = DriverProbe(status=seen, at=world.now)
    world.now += 20
    world.reconcile(QUEUE)
    status = world.resources[QUEUE].status
    assert (status.rows, status.bytes, status.limit, status.partitions) == (12, 600, 1000, 1)
    assert status.address == "tcp://demo-driver.team.svc:5571"
    assert status.selector == "asyncflow.dev/job=demo,asyncflow.dev/role=storage"
    world.probe = DriverProbe()
    assert world.decide(QUEUE).status is None, "an operator that has just started keeps the figures"
    state = world.observe(QUEUE)
    ended = replace(state, job=replace(state.job, status=state.job.status.model_copy(update={"phase": "Succeeded"})))
    status = after(ended, decide(ended, world.now)).status
    assert (status.rows, status.bytes, status.limit, status.partitions) == (None, None, None, 0)


@pytest.mark.parametrize("units", [1, 4])
def test_a_jobs_queue_that_somebody_scales_is_put_back_and_no_unit_notices(units: int):
    world = World(job_of())
    world.settle()
    before = [pod.uid for pod in world.with_role("storage")]
    world.scale_queue(units)
    world.see_all()
    assert world.decide(QUEUE).stages == ()
    world.settle()
    assert [pod.uid for pod in world.with_role("storage")] == before
    assert world.resources[QUEUE].model.spec.storage_units == 2
    assert world.notes.count("PutBack") == 1


def test_a_jobs_queue_has_as_many_units_as_the_job_says():
    world = World(job_of())
    world.settle()
    for units in (4, 1, 3):
        world.edit(transferQueue={"storageUnits": units})
        world.settle()
        assert [pod.index for pod in world.with_role("storage")] == list(range(units))
        assert world.resources[QUEUE].model.spec.storage_units == units
    assert world.status.attempt == 0
    assert world.resources[QUEUE].status.failures["storage"].restarts == 0


def test_a_jobs_queue_waits_for_the_driver_and_stops_with_the_job():
    world = World(job_of())
    world.reconcile(JOB)
    assert world.decide(QUEUE).stages == ()
    world.settle()
    world.edit(suspend=True)
    world.settle()
    assert names(world.pods.values()) == []
    assert world.decide(QUEUE).stages == ()


def test_a_queue_whose_job_is_being_deleted_or_refused_makes_nothing():
    world = World(job_of())
    world.settle()
    world.vanish(world.with_role("storage")[0])
    world.see_all()
    state = world.observe(QUEUE)
    assert made(decide(state, world.now)) == ["demo-storage-0"]
    going = replace(state.job, owner=replace(state.job.owner, deleting=True))
    for job in (going, replace(state.job, job=None, problem="spec.x: wrong")):
        plan = decide(replace(state, job=job), world.now)
        assert made(plan) == []
        assert condition(plan, "Ready") == ("False", "Inactive")


def test_restarts_of_the_queue_are_shown_by_its_job():
    world = World(job_of())
    world.settle()
    world.end(world.with_role("storage")[0], code=1)
    world.settle()
    assert world.status.restarts == {"storage": 1}
    assert world.status.attempt == 0


def test_a_spec_that_the_contract_refuses_is_reported():
    plan = decide(alone(queue=None, problem="spec.storageUnits = 0: is too small", problem_reason="Invalid"))
    assert condition(plan, "Accepted") == ("False", "Invalid")
    assert plan.stages == ()


def test_a_queue_that_is_being_deleted_is_left_alone():
    assert decide(alone(owner=replace(OWNER, deleting=True))) == Plan()


def test_a_driver_says_nothing_of_a_queue_that_stands_alone():
    assert DriverStatus().queue.ready == 0
    denied = (Denial(Ref("Pod", "demo-controller-0"), "exceeded quota", missing=True),)
    for kind in ("Progressing", "Ready"):
        assert condition(decide(alone(denied=denied)), kind) == ("False", "Denied")
