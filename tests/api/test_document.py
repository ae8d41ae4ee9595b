"""YAML as input from anybody: bounded work, one document, plain data; and what is written reads back the same."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.api.document import MAX_ALIASES, MAX_BYTES, MAX_DEPTH, MAX_NODES, dump, parse
from asyncflow.api.load import load
from asyncflow.errors import ManifestError

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))

REFUSED = {
    "tab": ("a:\n\t- 1", "not YAML"),
    "unclosed": ("a: [1, 2", "not YAML"),
    "nul byte": ("a: \x00", "not YAML"),
    "empty": ("", "empty"),
    "only a comment": ("# nothing\n", "empty"),
    "null": ("null", "empty"),
    "nothing twice": ("---\n---\n", "the file is empty"),
    "nothing first": ("---\n---\na: 1\n", "an empty document"),
    "two documents": ("a: 1\n---\na: 2\n", "a second document"),
    "key twice": ("a: 1\nb: 2\na: 3\n", "key 'a' occurs twice"),
    "nested key twice": ("a: {b: 1, b: 2}", "key 'b' occurs twice"),
    "mapping as key": ("{a: 1}: 2", "a key is not a plain string"),
    "list as key": ("? [a]\n: 2", "a key is not a plain string"),
    "python object": ("a: !!python/object/apply:os.system [ls]", "tag"),
    "binary": ("a: !!binary aGk=", "tag"),
    "own tag": ("a: !secret b", "tag"),
    "tag of a text": ("a: ! 5", "tag"),
    "alias of nothing": ("a: *b", "not YAML|alias"),
    "alias of itself": ("a: &a [*a]", "alias"),
    "billion laughs": (LAUGHS, "more than"),
    "many aliases": ("a: &a 1\nb: [" + ", ".join(["*a"] * (MAX_ALIASES + 1)) + "]", "aliases"),
    "a long text, often": ("a: &a " + "x" * 90_000 + "\nb: [" + ", ".join(["*a"] * 50) + "]", "more than"),
    "deep": ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "deep"),
    "very deep": ("[" * 200_000, "deep"),
    "wide": ("[" + "1," * (MAX_NODES + 1) + "]", "more than"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_with_one_clear_message(text: str, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason) as refused:
        parse(text, source="job.yaml")
    assert refused.value.where.startswith("job.yaml")
    assert refused.value.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("-7", -7),
        ("+7", 7),
        ("1:30", "1:30"),
        ("2026-11-21", "2026-11-21"),
        ("yes ma'am", "yes ma'am"),
        ("0x", "0x"),
        ("0e5f", "0e5f"),
        ("1.2.3", "1.2.3"),
        ("_1", "_1"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("'5'", "5"),
        ('"true"', "true"),
        ("e5", "e5"),
    ],
)
def test_a_scalar_is_what_json_would_make_of_it(text: str, value: object) -> None:
    found = parse(f"a: {text}", source="s").data["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["yes", "n", "Off", "007", "08", "0x10", "-0b1", "0o7", "1_000", ".nan", "-.inf", "1e999"]
)
def test_what_kubectl_reads_as_another_value_is_refused_unless_quoted(text: str) -> None:
    for line in (f"a: {text}", f"a: [{text}]", f"a: {{{text}: 1}}"):
        with pytest.raises(ManifestError, match="kubectl does not read"):
            parse(line, source="job.yaml")
    assert parse(f"a: {{'{text}': '{text}'}}", source="s").data == {"a": {text: text}}


@pytest.mark.parametrize("key", ["<<", "~", "null", "True", "1.0", ".5", "+1"])
def test_a_key_that_kubectl_reads_as_another_one_is_refused_unless_quoted(key: str) -> None:
    with pytest.raises(ManifestError, match="kubectl does not read"):
        parse(f"a: &a {{b: 1}}\nc:\n  {key}: *a", source="job.yaml")
    assert parse(f"c: {{'{key}': 1, 1: 2}}", source="s").data == {"c": {key: 1, "1": 2}}


def test_a_modest_alias_is_fine_and_shares_nothing() -> None:
    data = parse("a: &a {b: [1]}\nc: *a", source="s").data
    assert data == {"a": {"b": [1]}, "c": {"b": [1]}}
    assert data["a"] is not data["c"]


def test_aliases_behind_a_long_list_cost_what_they_repeat() -> None:
    text = f"a: [{'1,' * (MAX_NODES // 2)}]\nb: &b {{c: 1}}\nd: [{'*b,' * 90}]"
    assert parse(text, source="s").data["d"] == [{"c": 1}] * 90


def test_what_is_written_keeps_its_order_and_is_quoted_only_where_it_must() -> None:
    assert dump({"b": "plain: not", "a": "plain", "c": {"z": 1, "x": "1"}}) == (
        "b: 'plain: not'\na: plain\nc:\n  z: 1\n  x: '1'\n"
    )


def test_every_value_knows_its_line() -> None:
    document = parse("a: 1\nb:\n  c:\n    - x\n    - z\n", source="s")
    assert document.line(("a",)) == 1
    assert document.line(("b", "c")) == 3
    assert document.line(("b", "c", 1)) == 5
    assert document.line(("b", "missing")) == 2
    assert document.line(("nothing",)) == 0


def test_files_that_cannot_be_read_are_refused(tmp_path) -> None:
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00a")
    for file, reason in (
        (large, "larger than"),
        (binary, "not UTF-8"),
        (tmp_path, "directory"),
        (tmp_path / "none.yaml", "No such file"),
    ):
        with pytest.raises(ManifestError, match=reason):
            load(file)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30)
    | st.sampled_from(
        [
            "5e-4",
            "1E3",
            "null",
            "~",
            "yes",
            "n",
            "Off",
            "0o17",
            "0x_F",
            "-0b1",
            "007",
            "1_",
            ".Inf",
            "1e999",
            "1_0",
            "1:30",
            "=",
            "<<",
            "2026-11-21",
            " a",
            "a: b",
        ]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(data=st.dictionaries(st.text(min_size=1, max_size=12), json_values, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_what_is_dumped_is_parsed_back(data: dict[str, object]) -> None:
    again = parse(dump(data), source="s").data
    assert repr(_normal(again)) == repr(_normal(data))


def _normal(value: object) -> object:
    """Make -0.0 and 0.0, and the order of keys, not matter."""
    if isinstance(value, dict):
        return sorted((key, _normal(inner)) for key, inner in value.items()) if value else "{}"
    if isinstance(value, list):
        return [_normal(inner) for inner in value]
    return 0.0 if isinstance(value, float) and math.copysign(1, value) < 0 and value == 0 else value
