"""The check of words: each rule finds its bad example, and leaves the good one beside it."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import words

TABLE = words.read_table(
    """
# a comment
homes?   | location | home directory
later    | names: future
seats?   | replica  | api/status\\.py:seat_time$|/engines/
hand(s|ed)? out | lease
"""
)


def found(source: str, path: str = "runtime/asyncflow/queue/table.py") -> list[tuple[str, int, str]]:
    """Return rule, line and advice of each finding."""
    findings = words.check_module(source, path, TABLE)
    return [(each.rule, int(each.where.rpartition(":")[2]), each.use) for each in findings]


@pytest.mark.parametrize(
    ("source", "line", "use"),
    [
        ("class LocalSeat: ...", 1, "replica"),
        ("class HTTPSeat: ...", 1, "replica"),
        ("def fill_seats(): ...", 1, "replica"),
        ("x = 1\nasync def _seat(): ...", 2, "replica"),
        ("def fill(\n    seat: int\n): ...", 2, "replica"),
        ("def fill(*, first_seat: int = 0): ...", 1, "replica"),
        ("class Row:\n    home: str", 2, "location"),
        ("class Row:\n    HOME = 1", 2, "location"),
        ("class Row:\n    def __init__(self):\n        self._home = 1", 3, "location"),
        ("class RunLater: ...", 1, "future"),
        ('"""Rows.\n\nEach has a home.\n"""', 3, "location"),
        ('def f():\n    """Return the seats."""', 2, "replica"),
        ('SIZE = 1\n"""Seats of a table."""', 2, "replica"),
        ('_log.info("seat taken", extra={"by": "x"})', 1, "replica"),
        ('_log.warning(f"{name} has no home")', 1, "location"),
        ('raise Refused(f"no seat for {name}", hint="Ask again")', 1, "replica"),
        ('raise Refused("no room", hint="Take another seat") from error', 1, "replica"),
        ('hint = "Take another seat"', 1, "replica"),
        ('def f():\n    """Hand out rows."""', 2, "lease"),
    ],
)
def test_a_word_of_the_table_is_found_in_names_and_sentences(source: str, line: int, use: str) -> None:
    assert found(source) == [("words", line, use)]


@pytest.mark.parametrize(
    "source",
    [
        "def seating(): ...",
        "seats = 1  # a seat",
        'kinds = {"seat": 1}',
        'print("seat")',
        '"""Rows that come later."""',
        'def f():\n    """Return the home directory."""',
        "import seat",
    ],
)
def test_a_part_of_another_word_data_comments_and_exceptions_are_no_findings(source: str) -> None:
    assert found(source) == []


def test_modules_and_folders_are_names_too() -> None:
    assert found("", "runtime/asyncflow/queue/seat.py") == [("words", 1, "replica")]
    assert found("", "runtime/asyncflow/seats/__init__.py") == [("words", 1, "replica")]
    assert found("", "runtime/asyncflow/seats/table.py") == []


def test_an_exception_names_a_path_and_a_name() -> None:
    source = "class Status:\n    seat_time: str\n    seat: str"
    assert found(source, "runtime/asyncflow/api/status.py") == [("words", 3, "replica")]
    assert found(source, "runtime/asyncflow/api/job.py") == [("words", 2, "replica"), ("words", 3, "replica")]
    assert found('"""Seats."""', "runtime/asyncflow/rollout/engines/batch.py") == []


@pytest.mark.parametrize(
    "first", ["Give rows.", "Gives rows.", "Who asks.", "What it is.", "How many.", "Whether it is."]
)
def test_a_docstring_begins_with_a_noun_or_an_imperative(first: str) -> None:
    assert [rule for rule, *_ in found(f'"""{first}"""')] == ["first"]
    assert found(f'class Row:\n    """{first}"""')[0][:2] == ("first", 2)
    assert found(f'async def f():\n    """{first}"""')[0][:2] == ("first", 2)
    assert found(f'SIZE = 1\n"""{first}"""') == []
    assert found('"""Return whether it is."""\ndef f():\n    """Rows, and who asks."""') == []


@pytest.mark.parametrize("hint", ["Give another", "Use another."])
def test_a_hint_says_what_to_do_without_a_full_stop(hint: str) -> None:
    for source in (f'raise Refused("no", hint="{hint}")', f'x = Rule(fix=f"{hint}")', f'hint = "{hint}"'):
        assert [rule for rule, *_ in found(source)] == ["hint"]
    assert found('raise Refused("no", hint=f"Set {where}.{name}")\nhint = "Use http://HOST..."') == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    same = "class Row: ...\nclass _Own: ..."
    findings = list(words.check_classes({"a.py": same, "b.py": "x = 1\n" + same, "c.py": "class Rows: ..."}))
    assert [(each.where, each.found) for each in findings] == [
        ("a.py:1", "Row, also in b.py"),
        ("b.py:2", "Row, also in a.py"),
    ]


@pytest.mark.parametrize(
    "subject", ["Add a check of words", "Process rows at once", "Feed the queue", "Bring rows back", "Pass " + "x" * 67]
)
def test_subjects_in_the_imperative_are_well(subject: str) -> None:
    assert list(words.check_subject("abc", subject)) == []


@pytest.mark.parametrize(
    "subject",
    [
        "Added a check",
        "Adding a check",
        "Adds a check",
        "add a check",
        "What rows are",
        "A check",
        "",
        "Pass " + "x" * 68,
    ],
)
def test_other_subjects_are_found(subject: str) -> None:
    assert [each.rule for each in words.check_subject("abc", subject)] == ["commit"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
        command = ("git", "-C", str(tmp_path), *who, *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q", "-b", "main")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    return git


def commit(repository: Any, subject: str) -> None:
    repository("commit", "-q", "--allow-empty", "-m", subject)


def test_commits_since_a_base_are_checked_without_merges(repository: Any) -> None:
    commit(repository, "Began")
    repository("switch", "-q", "-c", "side")
    commit(repository, "Add a side")
    repository("switch", "-q", "main")
    commit(repository, "Add a front")
    repository("merge", "-q", "--no-ff", "-m", "Merged all", "side")
    assert sorted(subject for _, subject in words.commits("HEAD~2")) == ["Add a front", "Add a side"]


def test_by_default_commits_since_the_upstream_are_checked_or_since_this_check(repository: Any, tmp_path: Path) -> None:
    assert words.commits(None) == []
    commit(repository, "Began")
    assert words.commits(None) == []
    (tmp_path / "hack").mkdir()
    (tmp_path / "hack" / "words.py").write_text("")
    repository("add", "hack")
    commit(repository, "Add this check")
    for number in range(words.MOST_COMMITS + 1):
        commit(repository, f"Add {number}")
    assert len(words.commits(None)) == words.MOST_COMMITS
    repository("switch", "-q", "-c", "side", "--track", "main")
    assert len(words.commits(None)) == words.MOST_COMMITS
    commit(repository, "Add a side")
    assert [subject for _, subject in words.commits(None)] == ["Add a side"]


def test_findings_are_printed_and_fail(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "PACKAGES", (tmp_path,))
    (tmp_path / "good.py").write_text('"""Rows."""\n')
    assert words.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
    (tmp_path / "bad.py").write_text('"""Rows."""\n\n\nclass Seat:\n    """Give a seat."""\n')
    assert words.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "bad.py:4: seat, in the name Seat -> use replica; in an engine: position",
        'bad.py:5: "Give a seat." -> use "Return ..." or "Yield ..."',
        'bad.py:5: seat, in "Give a seat." -> use replica; in an engine: position',
    ]
    assert words.main([str(tmp_path), "--summary"]) == 1
    assert capsys.readouterr().out == "first: 1\nwords: 2\n"


def test_a_folder_without_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        words.main([str(tmp_path)])


def test_every_word_of_the_project_is_found_where_no_exception_holds() -> None:
    table = words.read_table(words.TABLE.read_text())
    assert len(table) > 30
    for word in table:
        assert word.use
        assert "|" not in word.use
        plain = re.sub(r"\([^)]*\)\?|s\?", "", word.pattern)
        assert word.in_text(f"Return the {plain} of a row.", "a.py") == ("" if word.names_only else plain)
        assert " " in plain or word.in_name(f"row_{plain}_of", "a.py") == plain
