"""Observations as JSON, and back."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from model_samples import START, job_of

from asyncflow.api.load import load
from asyncflow.api.status import DriverStatus, JobStatus
from asyncflow.api.weights import JobWeightsSpec, WeightsSpec
from asyncflow_operator.encoding import Redactor, decode, encode
from asyncflow_operator.observed import (
    Assigned,
    Denial,
    DriverProbe,
    JobState,
    NodeFree,
    ObjectView,
    Owner,
    PodView,
    Ref,
    ReferredObject,
    SyncState,
    TransferQueueState,
)

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
TIMES = st.one_of(st.just(0.0), st.floats(START, START + 1e6), st.integers(0, 10).map(float))
MAYBE_TIMES = st.none() | TIMES
SOME = st.lists(WORDS, max_size=3).map(tuple)
FLAGS = st.booleans()
CONTENT = st.recursive(
    st.none() | FLAGS | st.integers(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=5,
)
MANIFESTS = st.dictionaries(WORDS, CONTENT, max_size=3)
REFS = st.builds(Ref, WORDS, WORDS)
PODS = st.builds(
    PodView,
    **dict.fromkeys(("name", "uid", "role", "digest", "node", "ip", "waiting", "last_words", "disruption"), WORDS),
    **dict.fromkeys(("ready", "deleting", "forced", "unreachable", "leftover", "gated", "disrupted"), FLAGS),
    **dict.fromkeys(("index", "attempt"), st.integers(0, 9)),
    **dict.fromkeys(("ends_by", "started", "finished"), MAYBE_TIMES),
    **dict.fromkeys(("claims", "gates", "finalizers"), SOME),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
    created=TIMES,
    exit_code=st.none() | st.integers(0, 255),
)
ASSIGNED = st.builds(Assigned, flavors=SOME, more=st.lists(MANIFESTS, max_size=2).map(tuple))
OBJECTS = st.builds(
    ObjectView,
    **dict.fromkeys(("uid", "digest", "held", "phase", "said", "version"), WORDS),
    ref=REFS,
    conditions=st.lists(MANIFESTS, max_size=2).map(tuple),
    assigned=st.dictionaries(WORDS, ASSIGNED, max_size=2),
    deleting=FLAGS,
)
STATUSES = st.builds(DriverStatus, phase=st.sampled_from(["Running", "Suspended"]), step=st.integers(0, 99))
PROBES = st.builds(
    DriverProbe, status=st.none() | STATUSES, at=TIMES, pod=WORDS, error=WORDS, failing_since=MAYBE_TIMES
)
OWNERS = st.builds(
    Owner,
    **dict.fromkeys(("namespace", "name", "uid"), WORDS),
    kind=st.just("RLJob"),
    generation=st.integers(0, 9),
    created=TIMES,
    deleting=FLAGS,
    labels=st.dictionaries(WORDS, WORDS, max_size=2),
)
FREE = st.builds(NodeFree, name=WORDS, free=st.dictionaries(WORDS, st.floats(0, 1e12), max_size=2))
NAMES_A_SYNC = job_of(weightSync={"name": "shared"}).with_weights(JobWeightsSpec.of(WeightsSpec(keep=4), name="shared"))
JOBS = st.sampled_from(
    [None, job_of(), NAMES_A_SYNC, job_of(rollout={"replicas": 1, "template": {"labels": {"a": "b"}}})]
)
STATES = st.builds(
    JobState,
    **dict.fromkeys(("problem", "problem_reason"), WORDS),
    owner=OWNERS,
    job=JOBS,
    status=st.sampled_from([JobStatus(), JobStatus(phase="Running", attempt=3, images={"driver": "x"})]),
    pods=st.lists(PODS, max_size=3).map(tuple),
    objects=st.dictionaries(REFS, OBJECTS, max_size=3),
    probe=PROBES,
    scaled_by=SOME,
    namespace_ending=FLAGS,
    denied=st.lists(st.builds(Denial, REFS, WORDS, FLAGS), max_size=2).map(tuple),
    nodes=st.none() | st.lists(FREE, max_size=2).map(tuple),
    found=st.dictionaries(REFS, st.builds(ReferredObject, content=MANIFESTS, problem=WORDS), max_size=2),
)


def there_and_back(kind: type[Any], state: Any) -> Any:
    return decode(kind, json.loads(json.dumps(encode(state, Redactor(b"key")))))


@settings(max_examples=30, deadline=None)
@given(STATES)
def test_an_observation_of_a_job_is_what_it_was(state: JobState) -> None:
    assert there_and_back(JobState, state) == state


@settings(max_examples=10, deadline=None)
@given(STATES, st.lists(PODS, max_size=2).map(tuple))
def test_observations_of_its_queue_and_its_versions_are_what_they_were(state: JobState, pods: Any) -> None:
    queue = TransferQueueState(owner=state.owner, queue=None, job=state, pods=pods)
    assert there_and_back(TransferQueueState, queue) == queue
    sync = SyncState(owner=state.owner, sync=None, job=state, probe=state.probe)
    assert there_and_back(SyncState, sync) == sync


SECRET = "hunter2-hunter2"
WITH_SECRETS = {
    "rollout": {
        "replicas": 1,
        "template": {
            "env": [{"name": "HF_TOKEN", "value": SECRET}],
            "podSpec": {"containers": [{"name": "beside", "env": [{"name": "PASS", "value": SECRET}]}]},
        },
    },
    "data": {"train": {"source": "gym://chain_sum", "config": {"hubToken": SECRET, "api_key": SECRET}}},
    "reward": {"function": "gym"},
}


def test_secrets_of_a_spec_are_replaced_by_fingerprints_and_nothing_else_is() -> None:
    state = JobState(owner=Owner(kind="RLJob", namespace="n", name="j", uid="u"), job=job_of(**WITH_SECRETS))
    written, redactor = [], Redactor(b"key")
    for key in (b"key", b"key", b"other"):
        redactor = Redactor(key)
        written.append(json.dumps(encode(state, redactor)))
        assert redactor.found
    assert SECRET not in "".join(written)
    assert written[0] == written[1] != written[2]
    job = decode(JobState, json.loads(written[0])).job
    assert job.spec.sampling == job_of().spec.sampling
    assert [variable.name for variable in job.spec.rollout.template.env] == ["HF_TOKEN"]
    assert job.spec.rollout.template.env[0].value.startswith("redacted-")


def test_a_job_without_secrets_is_written_as_it_is() -> None:
    redactor = Redactor(b"key")
    tolerations = [{"key": "pool", "operator": "Equal", "value": "big"}]
    job = job_of(template={"podSpec": {"tolerations": tolerations, "hostname": ""}})
    assert encode(job, redactor) == job.model_dump(mode="json", by_alias=True)
    assert not redactor.found


@pytest.mark.parametrize(
    "wrong",
    [
        {"owner": 5},
        {"owner": {"kind": "RLJob"}},
        {"nonsense": 1},
        {"owner": {"kind": "RLJob", "namespace": 3, "name": "", "uid": ""}},
    ],
)
def test_what_is_no_observation_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"JobState|is not a str|not iterable|items"):
        decode(JobState, wrong)


def test_jobs_of_all_examples_are_what_they_were() -> None:
    from pathlib import Path

    for file in sorted((Path(__file__).parents[3] / "examples").glob("*.yaml")):
        manifest = load(file)
        assert decode(type(manifest), encode(manifest, Redactor(b"key"))) == manifest
