"""What a gang scheduler's object says, and what becomes of it."""

import pytest

from asyncflow_operator.cluster.views import object_view
from asyncflow_operator.decide.admission import admitted, evicted, given_back, waits_for
from asyncflow_operator.observed import ObjectView, Ref

WORKLOAD = Ref("Workload", "demo")


def workload(**conditions: tuple[str, str]) -> dict[Ref, ObjectView]:
    """As Kueue leaves it: by type, status and message."""
    stated = [{"type": kind, "status": status, "message": words} for kind, (status, words) in conditions.items()]
    raw = {"metadata": {"name": "demo", "uid": "u"}, "status": {"conditions": stated}}
    return {WORKLOAD: object_view(raw, kind="Workload")}


@pytest.mark.parametrize(
    ("objects", "may", "must"),
    [
        ({}, False, False),
        (workload(), False, False),
        (workload(QuotaReserved=("True", "")), False, False),
        (workload(QuotaReserved=("True", ""), Admitted=("True", "")), True, False),
        (workload(Admitted=("True", ""), Evicted=("True", "preempted")), False, True),
        (workload(Admitted=("True", ""), Evicted=("False", "")), True, False),
        (workload(Admitted=("True", ""), Finished=("True", "")), False, False),
    ],
)
def test_pods_are_made_while_a_workload_is_admitted_and_no_longer(objects, may, must):
    assert admitted(objects, gang="kueue") is may
    assert evicted(objects, gang="kueue") is must
    assert admitted(objects, gang="volcano")
    assert not evicted(objects, gang="none")


def test_what_a_workload_waits_for_is_kueues_to_say():
    assert waits_for(workload(QuotaReserved=("False", "8 more cpu needed"))) == "8 more cpu needed"
    assert waits_for({}) == "it has said nothing yet"


def test_what_holds_a_place_is_given_back_once():
    group = Ref("PodGroup", "demo")
    service = Ref("Service", "demo")
    objects = {ref: ObjectView(ref=ref, uid=ref.kind) for ref in (WORKLOAD, group, service)}
    assert [(each.ref, each.uid) for each in given_back(objects)] == [(WORKLOAD, "Workload"), (group, "PodGroup")]
    assert given_back({group: ObjectView(ref=group, uid="u", deleting=True)}) == ()
