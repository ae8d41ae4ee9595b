"""Looking at objects: with a real store and observer, and decisions that the test makes."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client.configuration import Configuration

from asyncflow.api.document import parse
from asyncflow.api.names import DIGEST
from asyncflow.api.status import DriverStatus
from asyncflow.errors import AsyncFlowError
from asyncflow_operator.actions import Apply, Delete, Plan, Release
from asyncflow_operator.cluster.apply import AT_ONCE, Failures, PlanExecutor
from asyncflow_operator.cluster.client import Api, ApiError, Refusal, Unreachable
from asyncflow_operator.cluster.events import Recorder
from asyncflow_operator.cluster.store import ObjectStore
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.desired.blueprint import requested_by_job
from asyncflow_operator.desired.objects import digest
from asyncflow_operator.observe import ENDING_S, Observer, RefusalRecord
from asyncflow_operator.observed import LEFT_BEHIND, Denial, DriverProbe, Owner, Ref
from asyncflow_operator.reconcile import CachedDesired, Reconciler
from asyncflow_operator.references import Key, References
from asyncflow_operator.telemetry import Metrics
from asyncflow_operator.watch import project

JOB = Key("RLJob", "ns", "quickstart")
CHILD = {"kind": "RLJob", "name": "quickstart", "uid": "uj", "controller": True}


class NoDriver:
    def order(self, owner: Owner, path: str) -> None:
        raise AssertionError(path)


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.plan = Plan()
        self.decided: list[Any] = []
        self.refused = RefusalRecord(lambda: self.now)
        self.probe = DriverProbe()
        self.store = ObjectStore(partial(project, now=lambda: self.now), lambda *_: None)
        self.observer = Observer(self.store, probe=lambda _: self.probe, nodes=lambda: None, refused=self.refused)
        self.api = Api(Configuration(host="http://127.0.0.1:1"))
        self.executor = PlanExecutor(self.api, self.store, NoDriver())
        self.reconciler = Reconciler(
            observer=self.observer,
            decide=dict.fromkeys(("RLJob", "TransferQueue", "WeightSync"), self._decide),
            executor=self.executor,
            recorder=Recorder(self.api, reporter="test"),
            refused=self.refused,
            metrics=Metrics(),
            now=lambda: self.now,
        )

    def _decide(self, state: Any, _: float) -> Plan:
        self.decided.append(state)
        return self.plan

    def put(
        self, kind: str, name: str, *, uid: str, version: int, owner: Any = None, meta: Any = None, **more: Any
    ) -> None:
        usual: dict[str, Any] = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
        usual |= {"labels": {"asyncflow.dev/job": "quickstart"}, "ownerReferences": [owner] if owner else []}
        metadata = usual | {"generation": 1} | (meta or {})
        raw = {"apiVersion": "asyncflow.dev/v1alpha1", "kind": kind, "metadata": metadata} | more
        self.store.put(kind, raw)

    def put_job(self, *, uid: str = "uj", version: int = 1) -> None:
        file = Path(__file__).parents[3] / "examples/quickstart.yaml"
        self.put("RLJob", "quickstart", uid=uid, version=version, spec=parse(file.read_text(), source="q").data["spec"])


@pytest.fixture
def world() -> World:
    return World()


async def test_an_unchanged_state_is_not_decided_again(world: World) -> None:
    world.put_job()
    for _ in range(3):
        assert not (await world.reconciler.reconcile(JOB)).failed
    assert len(world.decided) == 1
    world.put("Pod", "quickstart-driver-0", uid="p", version=2, owner=CHILD)
    await world.reconciler.reconcile(JOB)
    assert len(world.decided) == 2


async def test_when_its_time_has_come_it_is_decided_again_though_nothing_changed(world: World) -> None:
    world.put_job()
    world.plan = Plan(again_in_s=30.0)
    assert (await world.reconciler.reconcile(JOB)).again_in_s == 30.0
    world.now += 10
    assert (await world.reconciler.reconcile(JOB)).again_in_s == 20.0
    world.now += 20
    await world.reconciler.reconcile(JOB)
    assert len(world.decided) == 2


async def test_a_refused_object_is_left_alone_unless_it_is_to_be_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    async def carry_out(_: Owner, stages: Any, **__: Any) -> Failures:
        done.extend(action for stage in stages for action in stage)
        return Failures()

    monkeypatch.setattr(world.executor, "carry_out", carry_out)
    world.put_job()
    refused, other = Ref("Workload", "quickstart"), Ref("Service", "quickstart")
    world.refused.note(JOB, 1, [Denial(refused, "no", missing=False)], tried=[refused], ends=False)
    writes = [Apply(manifest={"kind": ref.kind, "metadata": {"name": ref.name}}) for ref in (refused, other)]
    world.plan = Plan(stages=((*writes, Delete(ref=refused, uid="w", why="")),))
    await world.reconciler.reconcile(JOB)
    assert done == [writes[1], Delete(ref=refused, uid="w", why="")]


async def test_an_object_that_is_not_there_is_gone(world: World) -> None:
    assert (await world.reconciler.reconcile(JOB)).gone
    assert world.decided == []


async def test_an_object_that_was_made_again_during_the_write_is_not_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = True

    async def write_status(owner: Owner, _: Any) -> Failures:
        world.store.remove("RLJob", "ns", "quickstart", owner.uid)
        if again:
            world.put_job(uid="another", version=9)
        return Failures(errors=[AsyncFlowError("the UID is another")])

    monkeypatch.setattr(world.executor, "write_status", write_status)
    world.plan = Plan(status={})
    world.put_job()
    outcome = await world.reconciler.reconcile(JOB)
    assert (outcome.gone, outcome.failed) == (False, False), "else what was marked for the new one would be forgotten"
    again = False
    assert (await world.reconciler.reconcile(JOB)).gone


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal('rljobs.asyncflow.dev "quickstart" not found', where="it", status=404, reason="NotFound"),
        Refusal("admission webhook denied the request", where="it", status=422),
    ],
    ids=["a proxy without a route, or a definition without a status", "a webhook"],
)
async def test_no_refusal_of_a_status_says_that_its_object_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise refusal

    monkeypatch.setattr(world.api, "_call", refuse)
    world.plan = Plan(status={})
    world.put_job()
    outcome = await world.reconciler.reconcile(JOB)
    assert (outcome.gone, outcome.failed) == (False, True), "its watch says so, or it is tried again"
    assert world.observer.resource(JOB) is not None


MODIFIED = 'Operation cannot be fulfilled on it "quickstart": the object has been modified'
OTHER_UID = "Precondition failed: UID in precondition: u, UID in object meta: another"


@pytest.mark.parametrize(("what", "stays"), [(MODIFIED, True), (OTHER_UID, False)])
async def test_only_another_uid_says_that_an_object_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str, stays: bool
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise Refusal(what, where="it", status=409, reason="Conflict")

    for verb in ("delete", "merge"):
        monkeypatch.setattr(world.api, verb, refuse)
    world.put_job()
    world.put("Pod", "quickstart-driver-0", uid="p", version=2, owner=CHILD)
    owner = world.observer.resource(JOB).owner
    pod = Ref("Pod", "quickstart-driver-0")
    for action in (Release(ref=pod, uid="p", gates=()), Delete(ref=pod, uid="p", why="")):
        failures = await world.executor.carry_out(owner, [[action]])
        assert bool(failures.errors) is stays, "what was not done is to be done later"
    assert (world.store.get(pod.kind, "ns", pod.name) is not None) is stays


@pytest.mark.parametrize(("status", "failed"), [(401, True), (403, False), (422, False), (500, True)])
async def test_a_failure_of_the_server_is_told_from_a_refusal_of_an_object(
    world: World, monkeypatch: pytest.MonkeyPatch, status: int, failed: bool
) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise Refusal("no", where="it", status=status)

    monkeypatch.setattr(world.api, "create", refuse)
    world.put_job()
    owner, pod = world.observer.resource(JOB).owner, {"kind": "Pod", "metadata": {"name": "quickstart-driver-0"}}
    failures = await world.executor.carry_out(owner, [[Apply(manifest=pod)]])
    assert [(each.missing, each.failed) for each in failures.denied] == [(True, failed)]


@pytest.mark.parametrize(
    ("refusal", "tried"),
    [
        (Refusal("failed calling webhook", where="it", status=500), AT_ONCE),
        (Unreachable("no answer", where="it"), AT_ONCE),
        (Refusal("exceeded quota", where="it", status=403), 100),
    ],
    ids=["webhook", "silence", "quota"],
)
async def test_where_the_server_fails_at_pods_no_more_of_them_are_begun(
    world: World, monkeypatch: pytest.MonkeyPatch, refusal: ApiError, tried: int
) -> None:
    """Each may take as long as the deadline of a webhook, and holds up what is decided about the job meanwhile."""
    asked: list[str] = []

    async def refuse(_: Any, __: str, manifest: Any) -> Any:
        asked.append(manifest["metadata"]["name"])
        await asyncio.sleep(0)
        raise refusal

    monkeypatch.setattr(world.api, "create", refuse)
    world.put_job()
    owner = world.observer.resource(JOB).owner
    pods = [Apply(manifest={"kind": "Pod", "metadata": {"name": f"p-{number}"}}) for number in range(100)]
    assert await world.executor.carry_out(owner, [pods])
    assert len(asked) == tried


def test_a_job_sees_its_pods_its_queues_pods_and_its_other_objects(world: World) -> None:
    world.put_job()
    world.put("TransferQueue", "quickstart", uid="uq", version=2, owner=CHILD, spec={"storageUnits": 2})
    queue = {"kind": "TransferQueue", "name": "quickstart", "uid": "uq", "controller": True}
    world.put("Pod", "quickstart-driver-0", uid="p1", version=3, owner=CHILD)
    world.put("Pod", "quickstart-storage-0", uid="p2", version=4, owner=queue)
    world.put("Service", "quickstart-driver", uid="s", version=5, owner=CHILD)
    job = world.observer.resource(JOB)
    assert job is not None
    state = world.observer.job(job)
    assert [pod.name for pod in state.pods] == ["quickstart-driver-0", "quickstart-storage-0"]
    assert sorted(ref.kind for ref in state.objects) == ["Service", "TransferQueue"]
    own = world.observer.resource(Key("TransferQueue", "ns", "quickstart"))
    assert own is not None
    queue_state = world.observer.queue(own)
    assert [pod.name for pod in queue_state.pods] == ["quickstart-storage-0"]
    assert queue_state.job is not None
    assert not queue_state.owner.deleting


def test_a_pod_that_has_not_begun_is_outdated_once_the_spec_would_shape_it_otherwise(world: World) -> None:
    world.put_job()
    queue = {"kind": "TransferQueue", "name": "quickstart", "uid": "uq", "controller": True}
    world.put("TransferQueue", "quickstart", uid="uq", version=2, owner=CHILD, spec={"storageUnits": 2})
    before = world.observer.resource(JOB)
    assert before is not None
    for role, owner, phase in (
        ("driver", CHILD, "Pending"),
        ("storage", queue, "Pending"),
        ("rollout", CHILD, "Running"),
    ):
        made_from = {DIGEST: digest(requested_by_job(before.model, role))}
        labels = {"asyncflow.dev/job": "quickstart", "asyncflow.dev/role": role}
        pod = {"owner": owner, "meta": {"labels": labels, "annotations": made_from}, "status": {"phase": phase}}
        world.put("Pod", f"quickstart-{role}-0", uid=role, version=3, **pod)

    def outdated() -> list[set[str]]:
        job, own = (world.observer.resource(key) for key in (JOB, Key("TransferQueue", "ns", "quickstart")))
        assert job is not None
        assert own is not None
        states = (world.observer.job(job), world.observer.queue(own))
        return [{pod.name for pod in state.pods if pod.outdated} for state in states]

    assert outdated() == [set(), set()]
    spec = before.model.model_dump(mode="json", by_alias=True)["spec"] | {"template": {"annotations": {"a": "mended"}}}
    world.put("RLJob", "quickstart", uid="uj", version=5, spec=spec, meta={"generation": 2})
    assert outdated() == [{"quickstart-driver-0", "quickstart-storage-0"}, {"quickstart-storage-0"}]


def test_objects_of_an_earlier_job_of_the_name_are_seen_as_ending(world: World) -> None:
    world.put_job(uid="new")
    world.put("Pod", "quickstart-driver-0", uid="p", version=2, owner=CHILD)
    world.put("TransferQueue", "quickstart", uid="uq", version=3, owner=CHILD, spec={"storageUnits": 2})
    job = world.observer.resource(JOB)
    assert job is not None
    state = world.observer.job(job)
    assert [(pod.deleting, pod.attempt) for pod in state.pods] == [(True, LEFT_BEHIND)]
    assert [view.deleting for view in state.objects.values()] == [True]
    own = world.observer.resource(Key("TransferQueue", "ns", "quickstart"))
    assert own is not None
    assert world.observer.queue(own).owner.deleting


def test_a_queue_that_was_denied_something_denies_its_job(world: World) -> None:
    world.put_job()
    world.put("TransferQueue", "quickstart", uid="uq", version=2, owner=CHILD, spec={"storageUnits": 2})
    denial = Denial(Ref("Pod", "quickstart-storage-0"), "exceeded quota", missing=True)
    world.refused.note(Key("TransferQueue", "ns", "quickstart"), 1, [denial], tried=[denial.ref], ends=False)
    job = world.observer.resource(JOB)
    assert job is not None
    assert world.observer.job(job).denied == (denial,)


def test_a_job_that_has_begun_keeps_its_weight_sync_whatever_job_names_it_later(world: World) -> None:
    spec = parse((Path(__file__).parents[3] / "examples/quickstart.yaml").read_text(), source="q").data["spec"]
    spec |= {"weightSync": {"name": "shared"}}
    sync, keys = Key("WeightSync", "ns", "shared"), [Key("RLJob", "ns", name) for name in ("first", "second")]
    world.put("WeightSync", "shared", uid="uw", version=1, spec={})
    status = {"phase": "Running", "weights": {"keep": 2}}
    world.put("RLJob", "second", uid="u2", version=2, spec=spec, status=status)
    world.put("RLJob", "first", uid="u1", version=3, spec=spec)
    references = References()
    for key in keys:
        references.note(key, world.observer.resource(key).model)
    observer = Observer(
        world.store, probe=lambda _: DriverProbe(), nodes=lambda: None, refused=world.refused, references=references
    )
    first, second = (observer.job(observer.resource(key)) for key in keys)
    assert (second.problem, first.job) == ("", None)
    assert "RLJob second uses that WeightSync" in first.problem
    assert observer.sync(observer.resource(sync)).job.owner.name == "second"


def test_that_a_namespace_ends_is_believed_for_a_while(world: World) -> None:
    world.refused.note(JOB, 1, [], tried=[], ends=True)
    assert world.refused.ends("ns")
    world.now += ENDING_S
    assert not world.refused.ends("ns")


def test_cached_objects_are_built_again_when_they_would_differ(world: World) -> None:
    remembered = CachedDesired(Desired(DesiredSettings(registry=Registry(prefix="a", tag="1"), master=b"x" * 32)))
    world.put_job()
    job = world.observer.resource(JOB)
    assert job is not None
    first = remembered.supporting(world.observer.job(job))
    assert remembered.supporting(world.observer.job(job)) is first
    world.put_job(uid="another", version=9)
    other = world.observer.resource(JOB)
    assert other is not None
    assert remembered.supporting(world.observer.job(other)) != first


async def test_the_answer_of_an_earlier_driver_holds_no_more(world: World) -> None:
    world.put_job()
    labels = {"asyncflow.dev/job": "quickstart", "asyncflow.dev/role": "driver", "asyncflow.dev/index": "0"}
    owner = {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "RLJob", "name": "quickstart", "uid": "uj"}
    meta = {"name": "quickstart-driver-0", "namespace": "ns", "uid": "new", "resourceVersion": "2", "labels": labels}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta | {"ownerReferences": [owner | {"controller": True}]}}
    world.store.put("Pod", pod)
    for said_by, holds in (("old", False), ("new", True)):
        world.probe = DriverProbe(status=DriverStatus(phase="Suspended"), at=world.now, pod=said_by)
        resource = world.observer.resource(JOB)
        assert resource is not None
        state = world.observer.job(resource)
        assert [each.uid for each in state.pods] == ["new"]
        assert state.probe.asked is holds
