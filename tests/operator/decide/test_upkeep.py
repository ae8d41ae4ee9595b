"""Objects beside pods: which are written, and whether somebody else has changed them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from asyncflow.api.names import DIGEST
from asyncflow_operator.cluster.views import object_view
from asyncflow_operator.decide.upkeep import intact, restore_notes, upkeep
from asyncflow_operator.observed import Denial, ObjectView, Ref

REF = Ref("Service", "demo")
SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "demo", "labels": {"job": "demo", "role": "driver"}, "annotations": {DIGEST: "now"}},
    "spec": {
        "ports": [{"name": "rpc", "port": 5571}, {"name": "http", "port": 9571}],
        "selector": {"job": "demo", "role": "driver"},
        "topologyKeys": ["a", "b"],
        "externalIPs": ["a", "b"],
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 9}},
    },
}
LABELS: dict[str, Any] = {"f:job": {}, "f:role": {}}
PORTS: dict[str, Any] = {
    'k:{"port":5571,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}},
    'k:{"port":9571,"protocol":"TCP"}': {".": {}, "f:name": {}, "f:port": {}},
}
RECORD: dict[str, Any] = {
    "f:metadata": {
        "f:labels": LABELS,
        "f:annotations": {f"f:{DIGEST}": {}},
        "f:ownerReferences": {'k:{"uid":"u"}': {}},
    },
    "f:spec": {
        "f:ports": PORTS,
        "f:selector": LABELS,
        "f:topologyKeys": {},
        "f:externalIPs": {'v:"a"': {}, 'v:"b"': {}},
        "f:sessionAffinityConfig": {},
    },
}
"""The fields of SERVICE as an API server records them: a port has a protocol that SERVICE leaves to its default,
and there are lists and mappings that have one owner as a whole."""


def each_without_one(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of every field with the record that is left when the field belongs to somebody else."""
    for key, inner in fields.items():
        if key != ".":
            yield key, {other: value for other, value in fields.items() if other != key}
            for path, less in each_without_one(inner):
                yield f"{key}/{path}", fields | {key: less}


def test_an_object_is_intact_until_any_field_that_it_says_belongs_to_somebody_else():
    assert intact(json.dumps(RECORD), SERVICE)
    assert intact("", SERVICE), "of a kind of which no record is kept"
    assert not intact("{}", SERVICE)
    not_compared = ("f:annotations", "f:ownerReferences", "/v:")
    for path, less in each_without_one(RECORD):
        assert intact(json.dumps(less), SERVICE) == any(name in path for name in not_compared), path


def test_the_record_of_an_object_is_what_the_operator_wrote_of_it_in_any_version_of_the_api():
    def entry(fields: dict[str, Any], **other: str) -> dict[str, Any]:
        return {"manager": "asyncflow-operator", "operation": "Apply", "fieldsV1": fields} | other

    first, second = ({name: RECORD[name]} for name in ("f:metadata", "f:spec"))
    kubectl, status = entry(second, manager="kubectl"), entry(second, subresource="status")

    def is_intact(*entries: dict[str, Any], kind: str = "Service") -> bool:
        raw = SERVICE | {"metadata": SERVICE["metadata"] | {"managedFields": list(entries)}}
        return intact(object_view(raw, kind=kind).held, SERVICE)

    assert is_intact(entry(first), entry(second, apiVersion="v1beta1"))
    assert not is_intact(entry(first), kubectl)
    assert not is_intact(entry(first), status)
    assert is_intact(entry(first), kubectl, kind="Workload"), "a part of it belongs to Kueue"


@pytest.mark.parametrize(
    ("seen", "written", "absent", "going", "changed"),
    [
        (None, True, True, False, False),
        ({"digest": "now", "deleting": True}, False, True, True, False),
        ({"digest": "older"}, True, False, False, False),
        ({"digest": "older", "held": "{}"}, True, False, False, False),
        ({"digest": "now"}, False, False, False, False),
        ({"digest": "now", "held": json.dumps(RECORD)}, False, False, False, False),
        ({"digest": "now", "held": '{"f:other":{}}'}, True, False, False, True),
    ],
)
def test_an_object_is_written_where_it_is_absent_older_or_changed(seen, written, absent, going, changed):
    views = {} if seen is None else {REF: ObjectView(ref=REF, uid="u", **seen)}
    found = upkeep([SERVICE], seen=views)
    assert [action.ref for action in found.write] == [REF] * written
    assert (list(found.absent), list(found.terminating), list(found.changed)) == (
        [REF] * absent,
        [REF] * going,
        [REF] * changed,
    )


def test_what_is_put_back_is_said_unless_it_may_not_be_written():
    other = Ref("ConfigMap", "demo")
    (note,) = restore_notes([REF, other], [Denial(ref=other, why="Forbidden", missing=False)], owner="RLJob demo")
    assert note.type == "Warning"
    assert note.message == (
        "Service/demo was changed and is restored, because it follows RLJob demo: change that instead"
    )
