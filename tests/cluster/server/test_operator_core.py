"""The operator's own machinery against a real API server: client, informer, leader, recorder."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncflow.errors import ManifestError
from asyncflow_operator.actions import Apply, Delete, Note
from asyncflow_operator.cluster.apply import PlanExecutor
from asyncflow_operator.cluster.client import Api, Refusal
from asyncflow_operator.cluster.events import Recorder
from asyncflow_operator.cluster.informer import Informer
from asyncflow_operator.cluster.kinds import BY_NAME, LEASE, Kind
from asyncflow_operator.cluster.store import ObjectStore
from asyncflow_operator.cluster.views import object_view
from asyncflow_operator.leader import DURATION_S, Leader
from asyncflow_operator.observed import Owner, Ref
from kube.plane import ControlPlane

CONFIG_MAP = BY_NAME["ConfigMap"]
LABELS = {"app.kubernetes.io/managed-by": "asyncflow-operator", "asyncflow.dev/job": "j"}


class NoDriver:
    def order(self, owner: Owner, path: str) -> None:
        raise AssertionError(f"{path} asked of {owner.name}")


@pytest.fixture
async def api(plane: ControlPlane) -> AsyncIterator[Api]:
    connected = await Api.connect(kubeconfig=plane.admin, connections=16)
    yield connected
    await connected.close()


def config_map(name: str, namespace: str, **data: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "labels": LABELS}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def store() -> ObjectStore:
    return ObjectStore(lambda kind, raw, _: object_view(raw, kind=kind), lambda *_: None)


def owner(namespace: str) -> Owner:
    return Owner(kind="RLJob", namespace=namespace, name="j", uid="0000")


async def eventually(condition: Any, what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"waited 10 s for {what}")


async def test_no_configuration_is_said_in_one_error(tmp_path: Any) -> None:
    with pytest.raises(ManifestError, match="no usable configuration for the API server"):
        await Api.connect(kubeconfig=tmp_path / "none", connections=8)


async def test_objects_are_applied_read_listed_and_deleted(api: Api, namespace: str) -> None:
    for number in range(5):
        await api.apply(CONFIG_MAP, namespace, config_map(f"c{number}", namespace, a="1"), force=True)
    raw = await api.get(CONFIG_MAP, namespace, "c0")
    assert raw["data"] == {"a": "1"}
    names = []
    selector = "asyncflow.dev/job=j"
    async for page in api.pages(CONFIG_MAP, namespace=namespace, labels=selector, metadata_only=True, size=2):
        assert len(page["items"]) <= 2
        assert all("data" not in item for item in page["items"])
        names += [item["metadata"]["name"] for item in page["items"]]
    assert names == ["c0", "c1", "c2", "c3", "c4"]
    with pytest.raises(Refusal) as refused:
        await api.delete(CONFIG_MAP, namespace, "c0", uid="another")
    assert refused.value.conflict
    await api.delete(CONFIG_MAP, namespace, "c0", uid=raw["metadata"]["uid"])
    with pytest.raises(Refusal) as refused:
        await api.get(CONFIG_MAP, namespace, "c0")
    assert refused.value.absent


async def test_an_unknown_field_is_refused_with_the_servers_words(api: Api, namespace: str) -> None:
    with pytest.raises(Refusal, match="nonsense"):
        await api.apply(CONFIG_MAP, namespace, config_map("c", namespace) | {"nonsense": 1}, force=True)


async def test_a_field_of_someone_else_is_not_taken_unless_forced(
    api: Api, plane: ControlPlane, namespace: str
) -> None:
    plane.kubectl("apply", "--server-side", "-f", "-", manifest=config_map("c", namespace, a="theirs"))
    with pytest.raises(Refusal) as refused:
        await api.apply(CONFIG_MAP, namespace, config_map("c", namespace, a="ours"), force=False)
    assert refused.value.conflict
    assert (await api.apply(CONFIG_MAP, namespace, config_map("c", namespace, a="ours"), force=True))["data"][
        "a"
    ] == "ours"


async def test_the_informer_follows_what_happens(api: Api, namespace: str) -> None:
    await api.apply(CONFIG_MAP, namespace, config_map("before", namespace), force=True)
    known = store()
    informer = Informer(api, known, CONFIG_MAP, namespace=namespace, labels="asyncflow.dev/job=j")
    following = asyncio.create_task(informer.run())
    await asyncio.wait_for(informer.synced.wait(), 60)
    assert known.get("ConfigMap", namespace, "before")
    raw = await api.apply(CONFIG_MAP, namespace, config_map("after", namespace), force=True)
    await eventually(lambda: known.get("ConfigMap", namespace, "after"), "the new object")
    await api.delete(CONFIG_MAP, namespace, "after", uid=raw["metadata"]["uid"])
    await eventually(lambda: not known.get("ConfigMap", namespace, "after"), "its end")
    following.cancel()


async def test_an_informer_that_missed_everything_lists_again(
    api: Api, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow_operator.cluster.informer.IDLE_S", 0.2)
    first = await api.apply(CONFIG_MAP, namespace, config_map("first", namespace), force=True)
    known = store()
    informer = Informer(api, known, CONFIG_MAP, namespace=namespace, labels="asyncflow.dev/job=j")
    following = asyncio.create_task(informer.run())
    await asyncio.wait_for(informer.synced.wait(), 60)
    await asyncio.sleep(0.5)
    await api.delete(CONFIG_MAP, namespace, "first", uid=first["metadata"]["uid"])
    await api.apply(CONFIG_MAP, namespace, config_map("second", namespace), force=True)
    await eventually(lambda: known.get("ConfigMap", namespace, "second"), "the second object")
    await eventually(lambda: not known.get("ConfigMap", namespace, "first"), "the end of the first")
    following.cancel()


async def test_a_kind_that_the_cluster_lacks_is_no_error(api: Api) -> None:
    informer = Informer(api, store(), BY_NAME["PodGroup"])
    following = asyncio.create_task(informer.run())
    await asyncio.wait_for(informer.synced.wait(), 60)
    following.cancel()


async def test_a_plan_is_carried_out_and_known_at_once(api: Api, namespace: str) -> None:
    known = store()
    executor = PlanExecutor(api, known, NoDriver())
    made = await executor.carry_out(owner(namespace), [[Apply(manifest=config_map("c", namespace))]])
    assert not made
    entry = known.get("ConfigMap", namespace, "c")
    assert entry is not None
    ended = Delete(ref=Ref("ConfigMap", "c"), uid=entry.uid, why="")
    assert not await executor.carry_out(owner(namespace), [[ended]])
    assert known.get("ConfigMap", namespace, "c") is None
    assert not await executor.carry_out(owner(namespace), [[ended]])


async def test_what_is_refused_stops_only_what_needs_it(api: Api, namespace: str) -> None:
    known = store()
    wrong = Apply(manifest=config_map("Not A Name", namespace))
    beside, later, other = (Apply(manifest=config_map(name, namespace)) for name in ("beside", "later", "other"))
    needing = Apply(manifest=config_map("needing", namespace), needs=frozenset([wrong.ref, beside.ref]))
    executor = PlanExecutor(api, known, NoDriver())
    failures = await executor.carry_out(owner(namespace), [[wrong, beside], [later, needing]])
    (denial,) = failures.denied
    assert (denial.ref, denial.missing) == (wrong.ref, True)
    assert [bool(known.get("ConfigMap", namespace, name)) for name in ("beside", "later", "needing")] == [
        True,
        True,
        False,
    ]
    assert not await executor.carry_out(owner(namespace), [[other, needing]], lacking=[wrong.ref])
    assert known.get("ConfigMap", namespace, "needing") is None


async def test_no_stage_begins_after_one_in_which_the_server_was_silent(api: Api, namespace: str) -> None:
    known = store()
    first, then = ([Apply(manifest=config_map(name, namespace))] for name in ("first", "then"))
    api.may_write = lambda: False
    failures = await PlanExecutor(api, known, NoDriver()).carry_out(owner(namespace), [first, then])
    assert len(failures.errors) == 1


async def test_a_quota_is_told_as_a_denial(api: Api, plane: ControlPlane, namespace: str) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q", "namespace": namespace}}
    quota |= {"spec": {"hard": {"count/configmaps": "0"}}}
    plane.kubectl("apply", "-f", "-", manifest=quota)
    plane.api.patch(
        f"/api/v1/namespaces/{namespace}/resourcequotas/q/status",
        {"status": {"hard": {"count/configmaps": "0"}, "used": {"count/configmaps": "0"}}},
    )
    executor = PlanExecutor(api, store(), NoDriver())

    async def denied() -> str:
        failures = await executor.carry_out(owner(namespace), [[Apply(manifest=config_map("c", namespace))]])
        return "; ".join(map(str, failures.denied))

    for _ in range(50):
        if words := await denied():
            break
        await asyncio.sleep(0.1)
    assert "exceeded quota: q" in words


async def test_a_namespace_that_ends_is_told(api: Api, plane: ControlPlane, namespace: str) -> None:
    plane.api.delete(f"/api/v1/namespaces/{namespace}")
    executor = PlanExecutor(api, store(), NoDriver())
    failures = await executor.carry_out(owner(namespace), [[Apply(manifest=config_map("c", namespace))]])
    assert failures.ends
    assert not failures.denied


async def test_the_status_of_an_object_that_is_gone_is_not_written(api: Api, namespace: str) -> None:
    failures = await PlanExecutor(api, store(), NoDriver()).write_status(owner(namespace), {"phase": "Running"})
    assert [(type(each), each.absent) for each in failures.errors] == [(Refusal, True)]


async def test_the_same_note_is_one_event(api: Api, plane: ControlPlane, namespace: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("asyncflow_operator.cluster.events.REPEAT_S", 0.0)
    note = Note(type="Warning", reason="Lost", message="rollout-2 is gone")
    events = f"/api/v1/namespaces/{namespace}/events"
    recorder = Recorder(api, reporter="me")
    for _ in range(3):
        await recorder.record(owner(namespace), note)
    (event,) = plane.api.get(events)["items"]
    assert (event["count"], event["reason"], event["involvedObject"]["name"]) == (3, "Lost", "j")
    after_restart = Recorder(api, reporter="me")
    for _ in range(2):
        await after_restart.record(owner(namespace), note)
    (event,) = plane.api.get(events)["items"]
    assert event["count"] == 4


async def test_one_leads_and_the_next_follows_when_it_lets_go(api: Api, namespace: str) -> None:
    first, second = (Leader(api, namespace=namespace, name="l", identity=who) for who in ("first", "second"))
    await asyncio.wait_for(first.acquire(), 60)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(second.acquire(), 0.5)
    assert (first.leads, second.leads) == (True, False)
    await first.release()
    await asyncio.wait_for(second.acquire(), 60)
    lease = await api.get(LEASE, namespace, "l")
    assert lease["spec"]["holderIdentity"] == "second"
    assert lease["spec"]["leaseTransitions"] >= 1


async def test_a_leader_that_still_renews_lets_go_for_good(
    api: Api, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow_operator.leader.RENEW_S", 0.0)
    leader, renewals = Leader(api, namespace=namespace, name="l", identity="first"), 0
    await asyncio.wait_for(leader.acquire(), 60)
    keeping = asyncio.create_task(leader.keep())
    while renewals < 3:
        renewals += (lease := await api.get(LEASE, namespace, "l"))["spec"]["holderIdentity"] == "first"
    await leader.release()
    for _ in range(20):
        lease = await api.get(LEASE, namespace, "l")
        assert (lease["spec"]["holderIdentity"], lease["spec"]["leaseDurationSeconds"]) == ("", 1)
    assert not keeping.done()
    keeping.cancel()


async def test_a_leader_that_is_silent_is_replaced_and_one_that_renews_is_not(api: Api, namespace: str) -> None:
    clock = {"now": 1000.0}
    first = Leader(api, namespace=namespace, name="l", identity="first")
    second = Leader(api, namespace=namespace, name="l", identity="second", clock=lambda: clock["now"])
    await asyncio.wait_for(first.acquire(), 60)
    assert not await second._try()
    clock["now"] += DURATION_S - 1
    assert await first._try()
    assert not await second._try()
    clock["now"] += DURATION_S - 1
    assert not await second._try()
    clock["now"] += 1
    assert await second._try()
    assert not await first._try()


def test_kinds_know_their_paths() -> None:
    assert CONFIG_MAP.path("ns", "c") == "/api/v1/namespaces/ns/configmaps/c"
    assert BY_NAME["RLJob"].path("ns", "j", "status") == "/apis/asyncflow.dev/v1alpha1/namespaces/ns/rljobs/j/status"
    assert Kind(name="Node", api_version="v1", plural="nodes", namespaced=False).path("ns") == "/api/v1/nodes"
