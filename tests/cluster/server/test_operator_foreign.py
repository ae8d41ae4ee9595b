"""Objects that somebody else made are never taken over, of any kind that the operator writes, on a real API server."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from asyncflow.api.job import RLJob
from asyncflow.api.names import API_VERSION
from asyncflow.api.records import RoleRecord
from asyncflow.api.status import JobStatus
from asyncflow_operator.actions import Apply
from asyncflow_operator.cluster.apply import Failures, PlanExecutor
from asyncflow_operator.cluster.client import Api
from asyncflow_operator.cluster.kinds import BY_NAME, CUSTOM_KINDS, POD
from asyncflow_operator.cluster.store import ObjectStore
from asyncflow_operator.decide.draft import to_write
from asyncflow_operator.decide.times import Alarm
from asyncflow_operator.decide.upkeep import intact
from asyncflow_operator.desired import Desired, DesiredSettings, Registry
from asyncflow_operator.desired.secrets import SecretPart
from asyncflow_operator.observed import JobState, Owner, Ref, TransferQueueState
from asyncflow_operator.watch import project
from kube import foreign
from kube.plane import ControlPlane
from kube.rest import Refused

DESIRED = Desired(DesiredSettings(registry=Registry(prefix="registry", tag="1"), master=b"m" * 32))
CLAIM = {"claim": {"size": "1Gi"}}
KINDS = sorted(kind.name for kind in BY_NAME.values() if kind.name != "RLJob")
SERVED = {kind.name: kind.at(kind.older) if kind.older else kind for kind in BY_NAME.values()}
"""As the plane of these tests has them, which has an older Kueue."""
CHANGED = sorted(set(KINDS) - {"Pod", "Secret"})
"""Kinds whose objects are changed when something else is wanted."""


SPEC: dict[str, Any] = {
    "model": {"source": "tiny://reverse-digits"},
    "data": {"train": {"source": "tiny://reverse-digits"}},
    "reward": {"function": "task"},
    "algorithm": {"steps": 10},
    "sampling": {"maxTokens": 16},
    "storage": {"ledger": CLAIM, "checkpoints": CLAIM},
}


class NoDriver:
    def order(self, owner: Owner, path: str) -> None:
        raise AssertionError(f"{path} asked of {owner.name}")


class Cluster:
    """A namespace with a job in it, and the operator's executor of plans."""

    def __init__(self, plane: ControlPlane, api: Api, namespace: str) -> None:
        self.plane = plane
        self.owner = Owner(kind="RLJob", namespace=namespace, name="math", uid="0000-1111")
        self.store = ObjectStore(partial(project, now=time.time), lambda *_: None)
        self.executor = PlanExecutor(api, self.store, NoDriver())

    def manifest(self, kind: str, **spec: Any) -> dict[str, Any]:
        """Return the object of this kind that the job needs."""
        gang = {"PodGroup": "volcano", "Workload": "kueue"}.get(kind, "none")
        usual = SPEC | {"scheduling": {"gang": gang}}
        job = RLJob.model_validate({"metadata": {"name": "math"}, "spec": usual | spec})
        state = JobState(owner=self.owner, job=job)
        queue = TransferQueueState(owner=self.owner, queue=None, job=state)
        pod = DESIRED.queue_pod(queue, "storage", 0, 0)
        secret = DESIRED.secret(self.owner, SecretPart(role="rollout", leaves=2, period=10_000))
        made = (*DESIRED.supporting(state), *DESIRED.children(state), secret, pod)
        return next(each for each in made if each["kind"] == kind)

    def path(self, manifest: dict[str, Any]) -> str:
        return SERVED[manifest["kind"]].path(self.owner.namespace, manifest["metadata"]["name"])

    def create_foreign(self, manifest: dict[str, Any], **meta: Any) -> dict[str, Any]:
        """Make an object of the same name as a person does."""
        kind = SERVED[manifest["kind"]]
        body = json.loads(json.dumps(kind.written(manifest)))
        body["metadata"] = {"name": manifest["metadata"]["name"]} | meta
        return self.plane.api.create(kind.path(self.owner.namespace), body)

    async def apply(self, manifest: dict[str, Any]) -> Failures:
        return await self.executor.carry_out(self.owner, [[Apply(manifest=manifest)]])

    def see(self, kind: str, name: str) -> None:
        """Have the store know an object as a watch does."""
        path = SERVED[kind].path(self.owner.namespace, name)
        self.store.put(kind, self.plane.api.get(path))


@pytest.fixture(scope="module")
def known(plane: ControlPlane) -> ControlPlane:
    foreign.install(plane, kueue=foreign.OLDER)
    return plane


@pytest.fixture
async def cluster(known: ControlPlane, namespace: str) -> AsyncIterator[Cluster]:
    api = await Api.connect(kubeconfig=known.admin, connections=8)
    await api.settle(BY_NAME["Workload"])
    yield Cluster(known, api, namespace)
    await api.close()


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"Secret"}))
async def test_an_object_of_somebody_else_is_refused_and_named(cluster: Cluster, kind: str, seen: bool) -> None:
    manifest = cluster.manifest(kind)
    labels = manifest["metadata"]["labels"] if seen else {}
    before = cluster.create_foreign(manifest, labels=labels)
    if seen:
        cluster.see(kind, manifest["metadata"]["name"])
    failures = await cluster.apply(manifest)
    (denial,) = failures.denied
    assert denial.ref == Ref(kind, manifest["metadata"]["name"])
    assert denial.missing
    assert "already exists" in denial.why
    assert "does not belong to this RLJob" in denial.why
    assert cluster.plane.api.get(cluster.path(manifest)) == before


async def test_a_secret_of_somebody_else_is_not_even_met(cluster: Cluster) -> None:
    theirs = cluster.create_foreign(cluster.manifest("Secret") | {"metadata": {"name": "math-keys"}})
    assert not await cluster.apply(cluster.manifest("Secret"))
    assert not await cluster.apply(cluster.manifest("Secret"))
    assert cluster.plane.api.get(cluster.path(theirs)) == theirs
    ours = cluster.plane.api.get(cluster.path(cluster.manifest("Secret")))
    assert ours["metadata"]["ownerReferences"][0]["uid"] == cluster.owner.uid


@pytest.mark.parametrize("kind", CHANGED)
async def test_what_is_the_jobs_is_made_changed_and_cleared_of_what_is_wanted_no_more(
    cluster: Cluster, kind: str
) -> None:
    manifest = cluster.manifest(kind)
    more = json.loads(json.dumps(manifest))
    more["metadata"]["labels"]["tier"] = "gold"
    assert not await cluster.apply(more)
    assert not await cluster.apply(manifest)
    raw = cluster.plane.api.get(cluster.path(manifest))
    assert raw["metadata"]["labels"] == manifest["metadata"]["labels"]
    entry = cluster.store.get(kind, cluster.owner.namespace, manifest["metadata"]["name"])
    assert entry is not None
    assert intact(entry.view.held, manifest)


@pytest.mark.parametrize("kind", CHANGED)
async def test_one_that_has_taken_the_name_since_is_not_changed(cluster: Cluster, kind: str) -> None:
    manifest = cluster.manifest(kind)
    assert not await cluster.apply(manifest)
    cluster.plane.api.patch(cluster.path(manifest), {"metadata": {"finalizers": None}})
    cluster.plane.api.delete(cluster.path(manifest))
    before = cluster.create_foreign(manifest)
    failures = await cluster.apply(manifest)
    assert failures.errors
    assert not failures.denied
    assert cluster.plane.api.get(cluster.path(manifest)) == before


@pytest.mark.parametrize("kind", sorted(set(CHANGED) - {kind.name for kind in CUSTOM_KINDS}))
async def test_what_has_lost_its_labels_is_the_jobs_all_the_same(cluster: Cluster, kind: str) -> None:
    manifest = cluster.manifest(kind)
    assert not await cluster.apply(manifest)
    entry = cluster.store.get(kind, cluster.owner.namespace, manifest["metadata"]["name"])
    assert entry is not None
    labels = dict.fromkeys(manifest["metadata"]["labels"])
    cluster.plane.api.patch(cluster.path(manifest), {"metadata": {"labels": labels}})
    stripped = cluster.plane.api.get(cluster.path(manifest))["metadata"]
    at = int(stripped["resourceVersion"])
    cluster.store.remove(kind, cluster.owner.namespace, stripped["name"], entry.uid, version=at)
    assert not await cluster.apply(manifest)
    raw = cluster.plane.api.get(cluster.path(manifest))
    assert raw["metadata"]["labels"] == manifest["metadata"]["labels"]
    assert raw["metadata"]["uid"] == entry.uid
    assert cluster.store.get(kind, cluster.owner.namespace, stripped["name"]) is not None


async def test_a_pod_that_has_lost_its_labels_is_deleted_and_one_that_has_them_is_left(cluster: Cluster) -> None:
    manifest = cluster.manifest(POD.name)
    assert not await cluster.apply(manifest)
    uid = cluster.plane.api.get(cluster.path(manifest))["metadata"]["uid"]
    assert not await cluster.apply(manifest), "as when the answer was lost, and the watch is late"
    assert cluster.plane.api.get(cluster.path(manifest))["metadata"]["uid"] == uid
    cluster.plane.api.patch(cluster.path(manifest), {"metadata": {"labels": {"asyncflow.dev/role": "mine"}}})
    failures = await cluster.apply(manifest)
    assert "its labels were changed" in str(failures.errors[0])
    assert not cluster.plane.api.exists(cluster.path(manifest))
    assert not await cluster.apply(manifest)


CHANGES: dict[str, dict[str, Any]] = {
    "ConfigMap": {"data": {"job.yaml": "theirs"}},
    "Service": {"spec": {"selector": {"app": "theirs"}}},
    "ServiceAccount": {"automountServiceAccountToken": True},
    "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": {"app": "theirs"}}}},
    "PodDisruptionBudget": {"spec": {"minAvailable": 0}},
    "TransferQueue": {"spec": {"storageUnits": 9}},
}


@pytest.mark.parametrize("kind", CHANGES)
async def test_what_somebody_changed_is_seen_and_put_back_and_what_he_added_stays(cluster: Cluster, kind: str) -> None:
    manifest = cluster.manifest(kind)
    assert not await cluster.apply(manifest)
    name = manifest["metadata"]["name"]

    def held() -> str:
        entry = cluster.store.get(kind, cluster.owner.namespace, name)
        assert entry is not None
        return str(entry.view.held)

    cluster.plane.api.patch(cluster.path(manifest), {"metadata": {"annotations": {"a": "b"}, "labels": {"c": "d"}}})
    cluster.see(kind, name)
    assert intact(held(), manifest)
    before = cluster.plane.api.get(cluster.path(manifest))
    for change in (CHANGES[kind], dict.fromkeys(CHANGES[kind]), {"metadata": {"labels": {"asyncflow.dev/job": "k"}}}):
        try:
            cluster.plane.api.patch(cluster.path(manifest), change)
        except Refused:
            continue
        cluster.see(kind, name)
        assert not intact(held(), manifest), change
        assert not await cluster.apply(manifest)
        after = cluster.plane.api.get(cluster.path(manifest))
        assert {key: after.get(key) for key in ("data", "spec")} == {key: before.get(key) for key in ("data", "spec")}
        assert after["metadata"]["labels"] == before["metadata"]["labels"]
        assert intact(held(), manifest)


async def test_a_port_that_somebody_has_renumbered_is_put_back(cluster: Cluster) -> None:
    """A server-side apply adds the port again, and the Service would have two ports of one name."""
    manifest = cluster.manifest("Service")
    assert not await cluster.apply(manifest)
    before = cluster.plane.api.get(cluster.path(manifest))["spec"]["ports"]
    cluster.plane.api.patch(cluster.path(manifest), {"spec": {"ports": [{**before[0], "port": 1}]}})
    cluster.see("Service", manifest["metadata"]["name"])
    assert not await cluster.apply(manifest)
    assert cluster.plane.api.get(cluster.path(manifest))["spec"]["ports"] == before


async def test_the_status_of_an_earlier_job_is_not_written_into_that_of_its_name(cluster: Cluster) -> None:
    """The API server checks no UID that is applied to a status: a new job would be over before it has begun."""
    path = BY_NAME["RLJob"].path(cluster.owner.namespace)
    body = {"apiVersion": API_VERSION, "kind": "RLJob", "metadata": {"name": "math"}, "spec": SPEC}
    owner = replace(cluster.owner, uid=cluster.plane.api.create(path, body)["metadata"]["uid"])
    for wrong in ({"phase": "Nonsense"}, {"newer": 1}):
        (refused,) = (await cluster.executor.write_status(owner, wrong)).errors
        assert not refused.replaced, "the job is there, and its status is not legal"
    (refused,) = (await cluster.executor.write_status(cluster.owner, {"phase": "Succeeded"})).errors
    assert "status" not in cluster.plane.api.get(f"{path}/math")
    assert refused.replaced


async def test_a_status_whose_maps_become_empty_is_written(cluster: Cluster) -> None:
    kind = BY_NAME["RLJob"]
    path = kind.path(cluster.owner.namespace)
    body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": "math"}, "spec": SPEC}
    owner = replace(cluster.owner, uid=cluster.plane.api.create(path, body)["metadata"]["uid"])
    before = JobStatus()
    for number in (1, 2):
        after = JobStatus(restarts={"driver": 1}, failures={"driver": RoleRecord()}) if number == 1 else JobStatus()
        status = to_write(before, after, figures=(), alarm=Alarm(number * 100.0))
        assert status is not None
        assert not await cluster.executor.write_status(owner, status)
        before = after
    assert "restarts" not in cluster.plane.api.get(f"{path}/math")["status"]
