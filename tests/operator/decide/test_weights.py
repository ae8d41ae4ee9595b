"""A WeightSync: whose it is, what its status says of versions, and which job may have the fields of one."""

import io
from dataclasses import replace
from types import SimpleNamespace

import model_samples
import pytest
from model_samples import START, job_of

from asyncflow.api.load import load
from asyncflow.api.names import DIGEST
from asyncflow.api.status import DriverStatus, JobStatus
from asyncflow.api.versions import Laggard, PhaseSeconds, VersionCount, VersionsState
from asyncflow.api.weights import SyncSpec, WeightsSpec, WeightsStatus, WeightSync
from asyncflow_operator.actions import Plan
from asyncflow_operator.decide import decide_sync
from asyncflow_operator.decide.naming import NamedSync, weights_for
from asyncflow_operator.observed import Denial, DriverProbe, JobState, ObjectView, Owner, SyncState

OWNER = Owner(kind="WeightSync", namespace="team", name="demo", uid="uid-sync", generation=1)
SYNC = WeightSync.model_validate({"metadata": {"name": "demo", "namespace": "team"}})
FOLLOWED = WeightSync.model_validate({"metadata": {"name": "demo"}, "spec": {"source": {"job": "training"}}})
DESIRED = SimpleNamespace(
    address=lambda job: f"tcp://{job.name}-driver",
    certificate=lambda job, role: f"{job.name}-{role}",
    sync_supporting=model_samples.DESIRED.sync_supporting,
)
SECONDS = PhaseSeconds(publish=0.1, transfer=0.051332831382751465, stage=0.2, swap=0.01)


def state(
    *lags: int, sync: WeightSync = SYNC, status: WeightsStatus | None = None, phase: str = "Running", followers: int = 0
) -> SyncState:
    """Return the state of a job with a rollout that is so many versions behind for each of ``lags``."""
    versions = VersionsState(
        rollouts=len(lags),
        followers=followers,
        behind=sum(lag > 0 for lag in lags),
        serving=tuple(VersionCount(version=20 - lag, instances=lags.count(lag)) for lag in sorted({*lags})),
        lag=tuple(lags.count(lag) for lag in range(max(lags, default=-1) + 1)),
        laggards=tuple(
            Laggard(id=f"rollout-{lag}", version=20 - lag, lag=lag, cause="receiving θ_20, 40% of it here")
            for lag in sorted(lags, reverse=True)
            if lag
        ),
        bytes=1000,
        wire_bytes=100,
        seconds=SECONDS,
    )
    job = JobState(
        owner=replace(OWNER, kind="RLJob"),
        job=job_of(),
        status=JobStatus(phase=phase),
        probe=DriverProbe(status=DriverStatus(version=20, attempt=2, versions=versions), at=START),
    )
    return SyncState(owner=OWNER, sync=sync, status=status or WeightsStatus(), job=job)


def decided(state: SyncState, *, now: float = START) -> Plan:
    return decide_sync(state, now=now, desired=DESIRED)


def conditions(plan: Plan) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in plan.status["conditions"]}


def test_the_status_says_what_the_driver_says_and_how_to_follow():
    plan = decided(state(0, 0, 1, followers=2))
    status = plan.status
    assert (status["version"], status["attempt"], status["rollouts"], status["followers"]) == (20, 2, 3, 2)
    assert (status["behind"], status["lag"]) == (1, [2, 1])
    assert status["serving"] == [{"version": 20, "instances": 2}, {"version": 19, "instances": 1}]
    assert status["laggards"] == [
        {"id": "rollout-1", "version": 19, "lag": 1, "cause": "receiving θ_20, 40% of it here"}
    ]
    assert (status["bytes"], status["wireBytes"]) == (1000, 100)
    assert status["seconds"] == {"publish": 0.1, "transfer": 0.05133, "stage": 0.2, "swap": 0.01}
    assert (status["job"], status["address"], status["certificate"]) == ("demo", "tcp://demo-driver", "demo-follower")
    assert conditions(plan)["Accepted"] == ("True", "Accepted")
    assert plan.stages == ()


def test_lagging_begins_late_and_ends_when_all_have_caught_up():
    assert conditions(decided(state(0, 2)))["Lagging"] == ("False", "CaughtUp")
    close = WeightsStatus.model_validate(decided(state(0, 1)).status, by_name=False)
    assert conditions(decided(state(0, 2, status=close), now=START + 60))["Lagging"] == ("False", "CaughtUp")
    behind = decided(state(0, 3))
    assert conditions(behind)["Lagging"] == ("True", "Behind")
    said = next(each["message"] for each in behind.status["conditions"] if each["type"] == "Lagging")
    assert said == "1 instance is more than 1 versions behind, rollout-3 by 3: receiving θ_20, 40% of it here"
    lagged = WeightsStatus.model_validate(behind.status, by_name=False)
    assert conditions(decided(state(0, 2, status=lagged), now=START + 60))["Lagging"] == ("True", "Behind")
    assert conditions(decided(state(0, 1, status=lagged), now=START + 60))["Lagging"] == ("False", "CaughtUp")


def test_without_a_job_or_an_answer_it_says_so():
    assert conditions(decided(replace(state(), job=None)))["Ready"] == ("False", "NoJob")
    assert conditions(decided(replace(state(sync=FOLLOWED), job=None)))["Ready"] == ("False", "NoSource")
    assert conditions(decided(state(phase="Suspended")))["Ready"] == ("False", "Suspended")
    known = WeightsStatus.model_validate(decided(state(0, 1, followers=2)).status, by_name=False)
    ended = decided(state(phase="Succeeded", status=known), now=START + 60).status
    assert [ended.get(name) for name in ("rollouts", "followers", "behind")] == [0, 0, 0]
    assert [ended.get(name) for name in ("serving", "lag", "laggards")] == [[], [], []]
    silent = replace(state(), job=replace(state().job, probe=DriverProbe()))
    assert conditions(decided(silent))["Ready"] == ("False", "NoVersion")
    suspended = WeightsStatus.model_validate(decided(state(phase="Suspended")).status, by_name=False)
    resumed = decided(replace(silent, status=suspended), now=START + 60)
    assert conditions(resumed)["Ready"] == ("False", "NoVersion"), "the job is not suspended any more"
    assert decided(replace(silent, status=known), now=START + 60) == Plan(), "by an operator that has just started"
    assert conditions(decided(state(0)))["Ready"] == ("True", "Serving")


def test_one_for_followers_is_ready_when_one_of_them_serves():
    assert conditions(decided(state(0, 0, sync=FOLLOWED)))["Ready"] == ("False", "NoFollower")
    assert conditions(decided(state(0, 0, sync=FOLLOWED, followers=1)))["Ready"] == ("True", "Serving")


def test_of_the_followers_of_a_job_a_weight_sync_counts_its_own():
    known = state(0, 5, sync=FOLLOWED, followers=3)
    job = known.job.probe.status
    fleet = VersionsState(followers=2, behind=0, lag=(2,), bytes=1000, seconds=PhaseSeconds(publish=0.1, swap=0.5))

    def told(**fleets: VersionsState) -> Plan:
        probe = replace(known.job.probe, status=job.model_copy(update={"fleets": fleets}))
        return decided(replace(known, job=replace(known.job, probe=probe)))

    own = told(demo=fleet, other=VersionsState(followers=1, behind=1))
    assert (own.status["rollouts"], own.status["followers"], own.status["behind"], own.status["lag"]) == (0, 2, 0, [2])
    assert (own.status["version"], own.status["seconds"]) == (20, {"publish": 0.1, "swap": 0.5})
    assert conditions(own)["Lagging"] == ("False", "CaughtUp"), "whatever the job's rollouts do"
    nobody = told(other=VersionsState(followers=1, behind=1))
    assert (nobody.status["followers"], nobody.status["bytes"]) == (0, 1000)
    assert nobody.status["seconds"] == {"publish": 0.1}
    assert conditions(nobody)["Ready"] == ("False", "NoFollower")


def test_followers_of_a_job_read_how_they_follow_and_a_job_s_own_has_nothing_to_read():
    spec = {"source": {"job": "training"}, "update": "staggered", "stagger": 2}
    staggered = WeightSync.model_validate({"metadata": {"name": "demo", "namespace": "team"}, "spec": spec})
    (written,) = decided(state(0, sync=staggered)).stages[0]
    assert (written.ref.kind, written.ref.name) == ("ConfigMap", "demo.sync")
    read = load(io.StringIO(written.manifest["data"]["job.yaml"]))
    assert isinstance(read, WeightSync)
    assert read.spec == staggered.spec
    there = ObjectView(ref=written.ref, uid="u", digest=written.manifest["metadata"]["annotations"][DIGEST])
    assert decided(replace(state(0, sync=staggered), objects={written.ref: there})).stages == ()
    assert decided(state(0)).stages == ()
    refusal = Denial(written.ref, "exceeded quota: configmaps=5", missing=True)
    refused = decided(replace(state(0, sync=staggered, followers=1), denied=(refusal,)))
    assert conditions(refused)["Ready"] == ("False", "Denied"), "followers do not start without it"


def test_an_unchanged_status_is_not_written_and_a_refused_spec_is_reported():
    plan = decided(state(0, 1))
    known = WeightsStatus.model_validate(plan.status, by_name=False)
    assert decided(state(0, 1, status=known), now=START + 3600) == Plan()
    bad = replace(state(), sync=None, problem="spec.transport: not yet", problem_reason="NotYet")
    assert conditions(decided(bad))["Accepted"] == ("False", "NotYet")
    assert decided(replace(state(), owner=replace(OWNER, deleting=True))) == Plan()


FIELDS = SyncSpec(keep=3, stagger=2)
BEGUN = WeightsSpec(keep=7)


@pytest.mark.parametrize(
    ("sync", "reason"),
    [
        (NamedSync(name="shared"), "no such WeightSync"),
        (NamedSync(name="shared", exists=True), "refused"),
        (NamedSync(name="shared", exists=True, spec=FIELDS, owned=True), "another job"),
        (NamedSync(name="shared", exists=True, spec=FOLLOWED.spec), "another job"),
        (NamedSync(name="shared", exists=True, spec=FIELDS, user="first"), "RLJob first uses"),
    ],
)
def test_a_job_begins_only_with_a_weight_sync_that_it_may_have(sync: NamedSync, reason: str):
    weights, why = weights_for("second", sync, staggered=True, current=None)
    assert weights is None
    assert why.startswith("spec.weightSync.name = 'shared': ")
    assert reason in why
    assert weights_for("second", sync, staggered=True, current=BEGUN) == (BEGUN, why), "one that has begun goes on"


def test_a_job_has_the_fields_of_its_weight_sync_and_follows_changes_of_them():
    sync = NamedSync(name="shared", exists=True, spec=FIELDS, user="first")
    assert weights_for("first", sync, staggered=True, current=None) == (WeightsSpec(keep=3, stagger=2), "")
    assert weights_for("first", sync, staggered=True, current=BEGUN) == (WeightsSpec(keep=3, stagger=2), "")


def test_a_weight_sync_with_a_stagger_is_for_a_job_whose_rollouts_are_staggered():
    sync = NamedSync(name="shared", exists=True, spec=FIELDS, user="first")
    weights, why = weights_for("first", sync, staggered=False, current=None)
    assert weights is None
    assert why.startswith("spec.weightSync.name = 'shared': it has a stagger")
    assert weights_for("first", sync, staggered=False, current=BEGUN) == (BEGUN, why), "one that has begun goes on"


def test_the_transport_stays_although_the_weight_sync_is_made_again():
    sync = NamedSync(name="shared", exists=True, spec=SyncSpec(transport="mooncake"), user="first")
    weights, why = weights_for("first", sync, staggered=False, current=BEGUN)
    assert weights == BEGUN
    assert "its transport is mooncake, and was host when the job started" in why
