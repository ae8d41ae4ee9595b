"""A user's part of a pod, merged over the operator's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_operator.desired.objects import merge

names = st.sampled_from(["containers", "env", "tolerations", "nodeSelector", "args", "affinity", "x"])
leaves = st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "b"])
items = st.fixed_dictionaries({"name": st.sampled_from(["a", "b", "c"])}, optional={"value": leaves, "key": leaves})
specs = st.recursive(
    st.dictionaries(names, leaves | st.lists(items, max_size=3, unique_by=lambda item: item["name"]), max_size=4),
    lambda inner: st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("base", "patch", "expected"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"args": [1, 2]}, {"args": [3]}, {"args": [3]}),
        (
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
            {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
            {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
        ),
        (
            {"tolerations": [{"key": "a", "operator": "Exists"}]},
            {"tolerations": [{"key": "b", "operator": "Exists"}, {"key": "a", "operator": "Exists"}]},
            {"tolerations": [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}]},
        ),
        (
            {"containers": [{"name": "a", "volumeMounts": [{"mountPath": "/x", "name": "x"}]}]},
            {"containers": [{"name": "a", "volumeMounts": [{"mountPath": "/x", "name": "y"}]}]},
            {"containers": [{"name": "a", "volumeMounts": [{"mountPath": "/x", "name": "y"}]}]},
        ),
        ({"volumes": 3}, {"volumes": [{"name": "a"}]}, {"volumes": [{"name": "a"}]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": ["odd"]}, {"tolerations": [{"key": "a"}, "odd"]}),
    ],
)
def test_as_kubectl_patch_would(base, patch, expected):
    assert merge(base, patch) == expected


@given(specs, specs)
def test_twice_is_once_and_nothing_is_nothing(base, patch):
    before = (repr(base), repr(patch))
    once = merge(base, patch)
    assert merge(once, patch) == once
    assert merge(base, {}) == base
    assert (repr(base), repr(patch)) == before
