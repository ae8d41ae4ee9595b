"""Our objects as the API server sends them: what counts of one whose newest spec is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncflow.api.document import parse
from asyncflow_operator.cluster.owners import CustomResource, custom_resource, recover_accepted
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.observed import JobState, SyncState

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart.yaml"
DESIRED = Desired(DesiredSettings(registry=Registry(prefix="a", tag="1"), master=b"m" * 32))
RUNNING = {"phase": "Running", "startTime": "2026-11-23T00:00:00Z"}
PLANNED = {"trainer": {"external": True}}
"""A part of the spec that is legal and not done yet."""


def raw(*, generation: int = 1, status: Any = None, uid: str = "u", **spec: Any) -> dict[str, Any]:
    usual = parse(QUICKSTART.read_text(), source="q").data["spec"]
    for part, value in spec.items():
        usual[part] = usual.get(part, {}) | value if isinstance(value, dict) else value
    meta = {"name": "q", "namespace": "ns", "uid": uid, "generation": generation}
    return {
        "apiVersion": "asyncflow.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": meta,
        "spec": usual,
        "status": RUNNING if status is None else status,
    }


def seen(*raws: dict[str, Any]) -> CustomResource:
    """Return the view after these versions."""
    view = None
    for each in raws:
        view = custom_resource("RLJob", each, view)
    assert view is not None
    return view


def test_a_job_that_has_begun_goes_on_by_the_last_accepted_spec() -> None:
    view = seen(
        raw(), raw(generation=2, **PLANNED, rollout={"replicas": 4}), raw(generation=3, **PLANNED, suspend=True)
    )
    assert view.problem_reason == "NotYet"
    assert view.model.spec.rollout.engine.name == "transformers"
    assert view.model.spec.rollout.replicas == 2
    assert view.model.spec.suspend
    again = seen(raw(), raw(generation=2, **PLANNED), raw(generation=3, rollout={"replicas": 3}))
    assert (again.problem, again.model.spec.rollout.replicas) == ("", 3)


def test_a_trainer_of_ones_own_does_not_join_a_job_of_a_cluster_yet() -> None:
    view = seen(raw(trainer={"external": True}))
    assert (view.model, view.problem_reason) == (None, "NotYet")
    assert "spec.trainer.external = true: not supported yet" in view.problem


@pytest.mark.parametrize("replicas", [-1, 0, 5, 10_000, "3", True, None, {}])
def test_a_scale_that_is_out_of_bounds_is_not_obeyed(replicas: Any) -> None:
    assert seen(raw(), raw(generation=2, **PLANNED, rollout={"replicas": replicas})).model.spec.rollout.replicas == 2


def test_a_job_that_has_not_begun_is_refused() -> None:
    pending = {"phase": "Pending"}
    assert seen(raw(status=pending), raw(generation=2, status=pending, **PLANNED)).model is None
    assert seen(raw(**PLANNED)).model is None


def test_a_job_that_waits_to_be_resumed_has_begun() -> None:
    waits = {"phase": "Pending", "failures": {"trainer": {"attempt": 1}}}
    assert seen(raw(status=waits), raw(generation=2, status=waits, **PLANNED)).model is not None


@pytest.mark.parametrize("phase", ["Suspending", "Suspended"])
def test_nothing_is_resumed_by_a_spec_that_is_refused(phase: str) -> None:
    status = {"phase": phase}
    view = seen(raw(status=status, suspend=True), raw(generation=2, status=status, suspend=False, **PLANNED))
    assert view.model.spec.suspend
    assert recover_accepted(
        seen(raw(status=status, **PLANNED)), raw(status=status, **PLANNED), config()
    ).model.spec.suspend


def config(**changes: Any) -> dict[str, Any]:
    view = seen(raw(rollout={"replicas": 3}))
    made = DESIRED.supporting(JobState(owner=view.owner, job=view.model))
    manifest: dict[str, Any] = next(each for each in made if each["kind"] == "ConfigMap")
    return manifest | changes


def test_an_operator_that_did_not_see_it_finds_the_spec_in_the_config_of_the_pods() -> None:
    newest = raw(generation=7, **PLANNED, rollout={"replicas": 4})
    view = seen(newest)
    assert view.model is None
    known = recover_accepted(view, newest, config())
    assert known.model.spec.rollout.engine.name == "transformers"
    assert known.model.spec.rollout.replicas == 4
    assert not known.model.spec.suspend
    assert known.problem == view.problem
    later = custom_resource("RLJob", raw(generation=8, **PLANNED, rollout={"replicas": 1}), known)
    assert later.model.spec.rollout.replicas == 1


def test_a_spec_that_an_older_version_accepted_stays_in_force() -> None:
    stagger = {"weightSync": {"stagger": 2}}
    view = seen(raw(**stagger))
    assert (view.model, view.problem_reason) == (None, "Invalid")
    manifest = json.loads(config()["data"]["job.yaml"])
    manifest["spec"] |= stagger
    known = recover_accepted(view, raw(**stagger), config(data={"job.yaml": json.dumps(manifest)}))
    assert known.model.spec.weight_sync.stagger == 2
    assert "stagger has an effect with update: staggered only" in known.problem


def test_a_publisher_goes_on_by_the_last_accepted_spec_and_is_found_by_its_config() -> None:
    def publishing(generation: int, **spec: Any) -> dict[str, Any]:
        meta = {"name": "q", "namespace": "ns", "uid": "u", "generation": generation}
        spec = {"source": {"model": "pvc://exports/math"}, "keep": 3, **spec}
        return {"kind": "WeightSync", "metadata": meta, "spec": spec, "status": {"failures": {"publisher": {}}}}

    accepted = custom_resource("WeightSync", publishing(1), None)
    refused = publishing(2, stagger=2)
    assert custom_resource("WeightSync", refused, accepted).model == accepted.model
    view = custom_resource("WeightSync", refused, None)
    assert view.model is None
    made = DESIRED.sync_supporting(SyncState(owner=accepted.owner, sync=accepted.model))
    known = recover_accepted(view, refused, next(each for each in made if each["kind"] == "ConfigMap"))
    assert (known.model.spec, known.problem) == (accepted.model.spec, view.problem)
    fresh = custom_resource("WeightSync", publishing(1) | {"status": {"address": "tcp://q-driver"}}, None)
    assert custom_resource("WeightSync", refused | {"status": {}}, fresh).model is None, "it has no publisher yet"


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"job.yaml": "["},
        {"job.yaml": "[]"},
        {"job.yaml": json.dumps({"metadata": {"uid": "u"}, "spec": {"model": 1}})},
        {"job.yaml": config()["data"]["job.yaml"].replace('"uid": "u"', '"uid": "another"')},
    ],
)
def test_a_config_that_is_not_the_jobs_or_not_legible_is_no_spec(data: Any) -> None:
    view = seen(raw(**PLANNED))
    assert recover_accepted(view, raw(**PLANNED), config(data=data)) == view
