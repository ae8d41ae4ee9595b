"""A WeightSync that publishes a model by itself: its one pod, and what its status says."""

from dataclasses import replace
from typing import Any

from model_samples import DESIRED, START, dead, pending, pod_view

from asyncflow.api.status import DriverStatus
from asyncflow.api.versions import VersionsState
from asyncflow.api.weights import WeightsStatus, WeightSync
from asyncflow_operator.actions import Apply, Delete, Plan
from asyncflow_operator.decide import decide_sync
from asyncflow_operator.observed import Denial, DriverProbe, ObjectView, Owner, Ref, SyncState

OWNER = Owner(kind="WeightSync", namespace="team", name="demo", uid="uid-sync", generation=1)
SOURCE = {"model": "pvc://exports/math", "watch": True}
SYNC = WeightSync.model_validate({"metadata": {"name": "demo", "namespace": "team"}, "spec": {"source": SOURCE}})
POD = "demo-publisher-0"
SERVES = DriverStatus(version=7, attempt=2, versions=VersionsState(followers=3, lag=(3,), bytes=1000))


def state(*pods: Any, answer: DriverStatus | None = None, **changes: Any) -> SyncState:
    refs = [(Ref(each["kind"], each["metadata"]["name"]), each) for each in DESIRED.sync_supporting(bare())]
    seen = {
        ref: ObjectView(ref=ref, uid="u", digest=each["metadata"]["annotations"]["asyncflow.dev/digest"])
        for ref, each in refs
    }
    probe = DriverProbe(status=answer, at=START)
    return replace(bare(), **({"pods": pods, "objects": seen, "probe": probe} | changes))


def bare() -> SyncState:
    return SyncState(owner=OWNER, sync=SYNC)


def decide(state: SyncState, now: float = START) -> Plan:
    return decide_sync(state, now=now, desired=DESIRED)


def after(state: SyncState, plan: Plan) -> SyncState:
    return replace(state, status=WeightsStatus.model_validate(plan.status, by_name=False)) if plan.status else state


def made(plan: Plan) -> list[str]:
    actions = [action for stage in plan.stages for action in stage if isinstance(action, Apply)]
    return [action.ref.name for action in actions if action.ref.kind == "Pod"]


def removed(plan: Plan) -> list[str]:
    return [action.ref.name for stage in plan.stages for action in stage if isinstance(action, Delete)]


def condition(plan: Plan, kind: str) -> tuple[str, str, str]:
    found = next(each for each in plan.status["conditions"] if each["type"] == kind)
    return found["status"], found["reason"], found.get("message", "")


def test_it_makes_what_the_publisher_needs_and_then_the_publisher():
    first = decide(bare())
    kinds = [action.ref.kind for action in first.stages[0]]
    assert sorted(kinds) == sorted(["ServiceAccount", "ConfigMap", "NetworkPolicy", "Service", *["Secret"] * 3])
    (pod,) = first.stages[1]
    assert made(first) == [POD]
    assert {ref.kind for ref in pod.needs} == {"ServiceAccount", "ConfigMap", "NetworkPolicy", "Secret"}
    assert made(decide(state(pod_view("publisher")))) == []


def test_its_status_says_where_it_is_and_what_followers_have():
    plan = decide(state(pod_view("publisher"), answer=SERVES))
    status = plan.status
    assert status["address"] == "tcp://demo-publisher.team.svc:5571"
    assert status["certificate"].startswith("demo-tls-follower-")
    assert (status["version"], status["attempt"], status["followers"], status["bytes"]) == (7, 2, 3, 1000)
    assert condition(plan, "Ready")[:2] == ("True", "Serving")
    known = after(state(pod_view("publisher")), plan)
    unasked = replace(known, probe=DriverProbe())
    assert decide(unasked, START + 60).status is None, "an operator that has just started has not asked it yet"
    for silent in (
        replace(unasked, pods=(pod_view("publisher", ready=False),)),
        replace(known, probe=DriverProbe(failing_since=START)),
    ):
        status = decide(silent, START + 60).status
        assert [status.get(name) for name in ("followers", "behind", "lag")] == [0, 0, []]
    lost = pod_view("publisher", ready=False, unreachable=True, node="node-2")
    assert condition(decide(replace(known, pods=(lost,))), "Ready")[:2] == ("False", "NodeLost")


def test_until_it_has_published_it_says_what_it_waits_for():
    assert condition(decide(state(pod_view("publisher"))), "Ready")[:2] == ("False", "NoVersion")
    waits = DriverStatus(waiting_for="/mnt/exports/math: no whole model: config.json is missing")
    said = condition(decide(state(pod_view("publisher"), answer=waits)), "Ready")
    assert said == ("False", "NoVersion", f"The publisher waits for {waits.waiting_for}")
    refused = state(denied=(Denial(ref=Ref("Pod", POD), why="exceeded quota", missing=True),))
    assert condition(decide(refused), "Ready")[0] == "False"
    assert "exceeded quota" in condition(decide(refused), "Ready")[2]
    pulls = condition(decide(state(pending("publisher", waiting="ImagePullBackOff"))), "Ready")
    assert pulls[:2] == ("False", "ImagePull")
    assert "demo-publisher-0 cannot pull its image" in pulls[2]
    change = (Denial(ref=Ref("ConfigMap", "demo"), why="no", missing=False),)
    both = state(pending("publisher", waiting="ImagePullBackOff"), denied=change)
    assert condition(decide(both), "Ready")[:2] == ("False", "ImagePull"), "as WhyPending of a job"


def test_one_that_ends_is_made_again_as_a_newer_attempt_after_its_backoff():
    lost = state(dead("publisher", at=START))
    counted = decide(lost)
    assert removed(counted) == []
    assert [note.reason for note in counted.notes] == ["PublisherFailed"]
    lost = after(lost, counted)
    assert removed(decide(lost, START + 5)) == [POD]
    again = decide(replace(lost, pods=()), START + 6)
    assert made(again) == [POD]
    assert again.stages[-1][0].manifest["metadata"]["labels"]["asyncflow.dev/attempt"] == "1"


def test_one_that_is_gone_without_a_sign_is_made_again_as_a_newer_attempt():
    def attempt(plan: Plan) -> str:
        return plan.stages[-1][0].manifest["metadata"]["labels"]["asyncflow.dev/attempt"]

    asked = after(state(), decide(state()))
    assert attempt(decide(asked)) == "0", "nobody has seen one yet"
    seen = replace(asked, pods=(pod_view("publisher"),))
    seen = after(seen, decide(seen))
    again = decide(replace(seen, pods=()))
    assert (made(again), attempt(again)) == ([POD], "1")
    assert attempt(decide(replace(after(seen, again), pods=()))) == "1", "it is not seen before it is made"


def test_one_whose_newest_spec_is_refused_is_made_again_by_the_last_accepted_one():
    accepted = decide(state(pod_view("publisher")))
    assert accepted.status["acceptedGeneration"] == 1
    edited = replace(
        after(state(), accepted), owner=replace(OWNER, generation=2), problem="spec.x: wrong", problem_reason="Invalid"
    )
    plan = decide(edited)
    assert made(plan) == [POD]
    said = condition(plan, "Accepted")
    assert said == ("False", "Invalid", "Generation 1 stays in force. spec.x: wrong")


def test_one_that_refuses_its_model_is_left_for_people_to_see():
    refused = state(dead("publisher", code=2, last_words="models/math: no whole model"))
    plan = decide(refused)
    assert condition(plan, "Degraded")[:2] == ("True", "Refused")
    assert "no whole model" in condition(plan, "Degraded")[2]
    assert (made(plan), removed(plan)) == ([], [])
    assert decide(after(refused, plan), START + 60).status is None
    mended = after(refused, plan)
    assert condition(decide(replace(mended, pods=(pod_view("publisher"),))), "Degraded")[:2] == ("False", "Mended")
