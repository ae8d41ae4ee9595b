"""docs/reference/fields.md: every field has a row, the immutable ones are the CRD's, and decisions are as it says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncflow.api.base import Spec
from asyncflow.api.check import fields, model_of, place_of
from asyncflow.api.job import RLJob, RLJobSpec
from asyncflow.api.names import DIGEST, RoleName
from asyncflow.api.status import JobStatus
from asyncflow.plan import plan
from asyncflow_operator.actions import Apply, Delete
from asyncflow_operator.decide.job import decide_job
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.observed import JobState, Manifest, ObjectView, Owner, PodView, Ref

TABLE = (Path(__file__).parents[2] / "docs" / "reference" / "fields.md").read_text()
KINDS = ("immutable", "at once", "restart", "next start")
NOW = 1_800_000_000.0
DESIRED = Desired(DesiredSettings(registry=Registry(prefix="registry", tag="1"), master=b"m" * 32))

Change = tuple[str, Any]
CHANGES: dict[str, tuple[Change, ...]] = {
    "at once": (
        ("rollout.drainSeconds", 5),
        ("elasticity.enabled", True),
        ("failurePolicy.trainer.maxRestarts", 9),
        ("limits.stallSeconds", 60),
    ),
    "next start": (
        ("algorithm.learningRate", 1e-3),
        ("sampling.temperature", 0.5),
        ("rollout.engine.slots", 8),
        ("rollout.resources.memory", "2Gi"),
        ("trainer.resources.memory", "2Gi"),
        ("trainer.template.image", "another:2"),
        ("driver.resources.cpu", "2"),
        ("template.env", [{"name": "A", "value": "b"}]),
        ("transferQueue.bytesPerUnit", "512Mi"),
        ("storage.checkpoints.every", 5),
        ("evaluation", {"every": 5}),
        ("limits.startSeconds", 60),
        ("scheduling.gang", "volcano"),
    ),
}


def rows() -> dict[str, str]:
    """Return what a change is, by field."""
    found: dict[str, str] = {}
    for names, kind in re.findall(r"^\| (`[^|]+`) \| ([a-z ]+) \|", TABLE, flags=re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", names):
            assert name not in found, f"{name} has two rows"
            found[name] = kind
    return found


def leaves(model: type[Spec], above: tuple[str, ...] = ()) -> Iterator[str]:
    for name, annotation in fields(model).items():
        part = model_of(annotation)
        if part is None:
            yield ".".join((*above, name))
        else:
            yield from leaves(part, (*above, name))


def frozen(model: type[Spec], above: tuple[str, ...] = ()) -> Iterator[str]:
    for each in model.frozen_fields:
        yield ".".join((*above, *place_of(each.reads)))
    for name, annotation in fields(model).items():
        part = model_of(annotation)
        if part is not None:
            yield from frozen(part, (*above, name))


def kind_of(field: str) -> str:
    """Of the row of the field, or of the nearest one above it."""
    table = rows()
    while field and field not in table:
        field = field.rpartition(".")[0]
    return table.get(field, "")


def test_every_field_has_a_row_and_every_row_has_a_field() -> None:
    known = list(leaves(RLJobSpec))
    assert [field for field in known if kind_of(field) not in KINDS] == []
    assert [row for row in rows() if not any(f"{field}.".startswith(f"{row}.") for field in known)] == []


def test_the_immutable_fields_are_those_that_the_server_guards() -> None:
    assert sorted(name for name, kind in rows().items() if kind == "immutable") == sorted(frozen(RLJobSpec))


def a_job(*changes: Change) -> RLJob:
    data: dict[str, Any] = {
        "metadata": {"name": "j", "uid": "u"},
        "spec": {
            "model": {"source": "tiny://reverse-digits"},
            "data": {"train": {"source": "tiny://reverse-digits"}, "eval": {"source": "tiny://reverse-digits"}},
            "reward": {"function": "task"},
            "algorithm": {"steps": 10},
            "sampling": {"maxTokens": 8, "maxPromptTokens": 16},
            "rollout": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4},
            "trainer": {"replicas": 2},
        },
    }
    for field, value in changes:
        here = data["spec"]
        *above, leaf = field.split(".")
        for name in above:
            here = here.setdefault(name, {})
        here[leaf] = value
    return RLJob.model_validate(data)


def state_of(job: RLJob) -> JobState:
    owner = Owner(kind="RLJob", namespace="default", name="j", uid="u", generation=1)
    return JobState(owner=owner, job=job, status=JobStatus(phase="Running", images=DESIRED.images(job)))


def running(job: RLJob) -> JobState:
    """The state in which everything that the job wants is there."""
    state = state_of(job)
    made = (*DESIRED.supporting(state), *DESIRED.children(state))
    pods = tuple(a_pod(state, role.name, index) for role in plan(job).roles for index in range(role.replicas))
    objects = {ref: ObjectView(ref=ref, uid=ref.name, digest=mark) for ref, mark in map(named, made)}
    return JobState(owner=state.owner, job=job, status=settled(state, pods, objects), pods=pods, objects=objects)


def settled(state: JobState, pods: tuple[PodView, ...], objects: dict[Ref, ObjectView]) -> JobStatus:
    """The status after the operator has looked once."""
    seen = JobState(owner=state.owner, job=state.job, status=state.status, pods=pods, objects=objects)
    status = decide_job(seen, now=NOW, desired=DESIRED).status
    return JobStatus.model_validate(status) if status is not None else state.status


def named(manifest: Manifest) -> tuple[Ref, str]:
    metadata = manifest["metadata"]
    return Ref(manifest["kind"], metadata["name"]), metadata["annotations"][DIGEST]


def a_pod(state: JobState, role: RoleName, index: int) -> PodView:
    ref, mark = named(DESIRED.pod(state, role, index, 0))
    return PodView(
        name=ref.name, uid=ref.name, role=role, index=index, attempt=0, digest=mark, phase="Running", ready=True
    )


def changed_pods(change: Change) -> tuple[set[str], set[str]]:
    """The pods that are deleted, and those that are made, in the first pass after a change."""
    before = running(a_job())
    after = JobState(
        owner=before.owner, job=a_job(change), status=before.status, pods=before.pods, objects=before.objects
    )
    actions = [action for stage in decide_job(after, now=NOW + 1, desired=DESIRED).stages for action in stage]
    gone = {action.ref.name for action in actions if isinstance(action, Delete) and action.ref.kind == "Pod"}
    made = {
        action.manifest["metadata"]["name"]
        for action in actions
        if isinstance(action, Apply) and action.manifest["kind"] == "Pod"
    }
    return gone, made


@pytest.mark.parametrize(
    ("kind", "change"), [(kind, change) for kind, changes in CHANGES.items() for change in changes]
)
def test_such_a_change_touches_no_pod(kind: str, change: Change) -> None:
    assert kind_of(change[0]) == kind
    assert changed_pods(change) == (set(), set())


def test_scaling_touches_rollouts_alone() -> None:
    assert kind_of("rollout.replicas") == "at once"
    assert changed_pods(("rollout.replicas", 4)) == (set(), {"j-rollout-2", "j-rollout-3"})
    gone, made = changed_pods(("rollout.replicas", 1))
    assert gone == {"j-rollout-1"}
    assert made == set()


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_restarts_the_gang_and_nothing_else(ranks: int) -> None:
    assert kind_of("trainer.replicas") == "restart"
    assert changed_pods(("trainer.replicas", ranks)) == ({"j-trainer-0", "j-trainer-1"}, set())
