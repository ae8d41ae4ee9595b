"""Fields and values that the cluster's definitions lack."""

import pytest

from asyncflow_operator.definitions import lacking

PHASES = {"type": "string", "enum": ["Running", "Failed"]}
ENTRY = {"type": "object", "properties": {"name": {"type": "string"}}}
STATUS = {
    "properties": {
        "phase": PHASES,
        "entries": {"type": "array", "items": ENTRY},
        "restarts": {"type": "object", "additionalProperties": ENTRY},
    }
}


def served(**changed: object) -> dict[str, object]:
    return {"properties": {**STATUS["properties"], **changed}}


@pytest.mark.parametrize(
    ("definition", "lacks"),
    [
        (STATUS, []),
        (served(newer={"type": "string"}, phase={"type": "string", "enum": ["Running", "Failed", "Newer"]}), []),
        (served(phase={"type": "string"}), []),
        (served(phase={"type": "string", "enum": ["Running"]}), ["'Failed' for status.phase"]),
        (served(entries={"type": "array", "items": {"properties": {}}}), ["status.entries.name"]),
        (served(restarts={"type": "object", "additionalProperties": {}}), ["status.restarts.name"]),
        ({}, ["status.phase", "status.entries", "status.restarts"]),
    ],
    ids=["same", "newer", "any value", "value", "field of an item", "field of a value", "nothing"],
)
def test_each_field_and_value_is_named(definition: dict[str, object], lacks: list[str]) -> None:
    assert list(lacking(STATUS, definition, at="status")) == lacks
