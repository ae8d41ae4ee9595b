from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow_operator.cluster.store import ObjectGroup, ObjectStore

JOB = {"asyncflow.dev/job": "j"}


def raw(name: str, *, version: int, uid: str = "u1", value: object = 0, labels: dict[str, str] | None = None) -> Any:
    meta = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version), "labels": labels or JOB}
    return {"metadata": meta, "value": value}


class Noted:
    def __init__(self) -> None:
        self.changes: list[tuple[str, Any, Any]] = []
        self.told: list[str] = []
        self.store = ObjectStore(lambda _kind, raw, _before: raw["value"], self._changed)

    def _changed(self, group: ObjectGroup, kind: str, before: Any, after: Any) -> None:
        self.changes.append((kind, before, after))
        self.told.append(group.name)

    def view(self, name: str) -> Any:
        entry = self.store.get("Pod", "ns", name)
        return None if entry is None else entry.view


def test_an_older_version_does_not_replace_a_newer_one() -> None:
    noted = Noted()
    noted.store.put("Pod", raw("a", version=5, value="new"))
    noted.store.put("Pod", raw("a", version=4, value="old"))
    noted.store.put("Pod", raw("a", version=5, value="same"))
    assert noted.view("a") == "new"


def test_only_a_change_of_the_view_is_reported() -> None:
    noted = Noted()
    noted.store.put("Pod", raw("a", version=1, value="x"))
    noted.store.put("Pod", raw("a", version=2, value="x"))
    noted.store.put("Pod", raw("a", version=3, value="y"))
    assert noted.changes == [("Pod", None, "x"), ("Pod", "x", "y")]


def test_a_deleted_object_does_not_come_back_by_a_late_message() -> None:
    noted = Noted()
    noted.store.put("Pod", raw("a", version=1))
    noted.store.remove("Pod", "ns", "a", "u1")
    noted.store.put("Pod", raw("a", version=2))
    assert noted.view("a") is None
    noted.store.put("Pod", raw("a", version=3, uid="u2", value="another"))
    assert noted.view("a") == "another"


def test_an_object_that_left_the_watch_comes_back_with_its_labels() -> None:
    noted = Noted()
    noted.store.put("Pod", raw("a", version=1, value="mine"))
    noted.store.remove("Pod", "ns", "a", "u1", version=3)
    noted.store.put("Pod", raw("a", version=2, value="late"))
    assert noted.view("a") is None
    noted.store.put("Pod", raw("a", version=4, value="labelled again"))
    assert noted.view("a") == "labelled again"
    noted.store.remove("Pod", "ns", "a", "u1")
    noted.store.remove("Pod", "ns", "a", "u1", version=5)
    noted.store.put("Pod", raw("a", version=6, value="deleted"))
    assert noted.view("a") is None


def test_the_end_of_an_older_object_does_not_remove_its_successor() -> None:
    noted = Noted()
    noted.store.put("Pod", raw("a", version=9, uid="u2"))
    noted.store.remove("Pod", "ns", "a", "u1")
    assert noted.view("a") == 0


def test_a_list_removes_missing_objects_but_none_that_is_newer() -> None:
    noted = Noted()
    noted.store.put("Pod", raw("listed", version=1, uid="u1"))
    noted.store.put("Pod", raw("lost", version=2, uid="u2"))
    noted.store.put("Pod", raw("written-since", version=11, uid="u3"))
    noted.store.retain("Pod", "", {"u1"}, 10)
    assert [noted.view(name) for name in ("listed", "lost", "written-since")] == [0, None, 0]


def test_a_group_holds_the_objects_that_belong_together() -> None:
    noted = Noted()
    owner = {"kind": "RLJob", "name": "j", "uid": "uj", "controller": True}
    noted.store.put("RLJob", raw("j", version=1, uid="uj", labels={}))
    noted.store.put("Pod", raw("j-driver-0", version=2, uid="up"))
    child = raw("j", version=3, uid="uq")
    child["metadata"]["ownerReferences"] = [owner]
    noted.store.put("TransferQueue", child)
    noted.store.put("TransferQueue", raw("alone", version=4, uid="ua", labels={}))
    noted.store.put("Pod", raw("alone-storage-0", version=5, uid="us", labels={"asyncflow.dev/queue": "alone"}))
    kinds = sorted(entry.kind for entry in noted.store.of(ObjectGroup("ns", "RLJob", "j")))
    assert kinds == ["Pod", "RLJob", "TransferQueue"]
    assert sorted(entry.uid for entry in noted.store.of(ObjectGroup("ns", "TransferQueue", "alone"))) == ["ua", "us"]


def test_an_object_that_changes_its_group_is_in_one_only_and_both_are_told() -> None:
    noted = Noted()
    noted.store.put("Pod", raw("a", version=1))
    noted.store.put("Pod", raw("a", version=2, labels={"asyncflow.dev/job": "k"}))
    assert noted.told == ["j", "j", "k"]
    assert noted.changes == [("Pod", None, 0), ("Pod", 0, None), ("Pod", None, 0)]
    assert not noted.store.of(ObjectGroup("ns", "RLJob", "j"))
    assert len(noted.store.of(ObjectGroup("ns", "RLJob", "k"))) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=1, max_size=12), st.randoms())
def test_whatever_the_order_of_arrival_the_newest_version_remains(changes: list[tuple[str, int]], rng: Any) -> None:
    history = [raw(name, version=number + 1, uid=name, value=value) for number, (name, value) in enumerate(changes)]
    arrived = history + history[: len(history) // 2]
    rng.shuffle(arrived)
    noted = Noted()
    for each in arrived:
        noted.store.put("Pod", each)
    for name in {name for name, _ in changes}:
        newest = [each for each in history if each["metadata"]["name"] == name][-1]
        assert noted.view(name) == newest["value"]
