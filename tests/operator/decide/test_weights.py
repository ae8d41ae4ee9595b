"""A WeightSync: how far behind rollouts are, in a bounded status."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given
from model_samples import START, job_of

from asyncflow.api.status import DriverStatus, JobStatus, RolloutState
from asyncflow.api.weights import WeightsStatus, WeightSync
from asyncflow_operator.actions import Plan
from asyncflow_operator.decide import decide_sync
from asyncflow_operator.decide.weights import histogram
from asyncflow_operator.observed import DriverProbe, JobState, Owner, SyncState

OWNER = Owner(kind="WeightSync", namespace="team", name="demo", uid="uid-sync", generation=1)
SYNC = WeightSync.model_validate({"metadata": {"name": "demo", "namespace": "team"}})


def state(*versions: int, newest: int = 20, status: WeightsStatus | None = None, phase: str = "Running") -> SyncState:
    rollouts = tuple(
        RolloutState(id=f"w{index}", index=index, version=version, state="ready")
        for index, version in enumerate(versions)
    )
    seen = DriverStatus(version=newest, attempt=2, rollouts=rollouts, version_bytes=1000, transfer_seconds=0.5)
    job = JobState(
        owner=replace(OWNER, kind="RLJob"),
        job=job_of(),
        status=JobStatus(phase=phase),
        probe=DriverProbe(status=seen, at=START),
    )
    return SyncState(owner=OWNER, sync=SYNC, status=status or WeightsStatus(), job=job)


def conditions(plan: Plan) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in plan.status["conditions"]}


def test_the_histogram_and_the_ten_furthest():
    plan = decide_sync(state(*range(1, 21)), now=START)
    assert plan.status["lag"] == [1] * 15 + [5]
    assert [each["lag"] for each in plan.status["laggards"]] == list(range(19, 9, -1))
    assert (plan.status["version"], plan.status["attempt"]) == (20, 2)
    assert (plan.status["bytes"], plan.status["transferSeconds"]) == (1000, 0.5)
    assert plan.stages == ()


@given(st.lists(st.integers(0, 1000), max_size=200))
def test_a_histogram_counts_everybody_once(lags):
    counts = histogram(lags)
    assert sum(counts) == len(lags)
    assert len(counts) <= 16


def test_lagging_begins_late_and_ends_when_all_have_caught_up():
    assert conditions(decide_sync(state(20, 18), now=START))["Lagging"] == ("False", "CaughtUp")
    behind = decide_sync(state(20, 17), now=START)
    assert conditions(behind)["Lagging"] == ("True", "Behind")
    lagged = WeightsStatus.model_validate(behind.status, by_name=False)
    still = decide_sync(state(20, 18, status=lagged), now=START + 60)
    assert conditions(still)["Lagging"] == ("True", "Behind")
    done = decide_sync(state(20, 19, status=lagged), now=START + 60)
    assert conditions(done)["Lagging"] == ("False", "CaughtUp")


def test_without_a_job_or_an_answer_it_says_so():
    assert conditions(decide_sync(replace(state(), job=None), now=START))["Ready"] == ("False", "NoJob")
    assert conditions(decide_sync(state(phase="Suspended"), now=START))["Ready"] == ("False", "Suspended")
    silent = replace(state(), job=replace(state().job, probe=DriverProbe()))
    assert conditions(decide_sync(silent, now=START))["Ready"] == ("False", "NoVersion")
    assert conditions(decide_sync(state(20), now=START))["Ready"] == ("True", "Serving")


def test_an_unchanged_status_is_not_written_and_a_refused_spec_is_reported():
    plan = decide_sync(state(20, 19), now=START)
    known = WeightsStatus.model_validate(plan.status, by_name=False)
    assert decide_sync(state(20, 19, status=known), now=START + 3600) == Plan()
    bad = replace(state(), sync=None, problem="spec.transport: not yet", problem_reason="NotYet")
    assert conditions(decide_sync(bad, now=START))["Accepted"] == ("False", "NotYet")
    assert decide_sync(replace(state(), owner=replace(OWNER, deleting=True)), now=START) == Plan()
