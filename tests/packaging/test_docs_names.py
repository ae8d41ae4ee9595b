"""Files and functions of the runtime, and commands, that the pages of the documentation name are there."""

import ast
import re
import tomllib
from pathlib import Path

import click
import pytest

from asyncflow import cli
from asyncflow.telemetry.sinks.names import FIELD

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime" / "asyncflow"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = "|".join(sorted(path.name for path in RUNTIME.iterdir() if path.is_dir() and path.name != "__pycache__"))
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w/]+)(?:\.py)?(?:\.[\w.]+)?`")
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?asyncflow ([a-z].*)")
PROCESS = "fork server"
"""What `ps` shows, and is no command."""
STEP = re.compile(r"^\| `([\w/]+)` \| `(\w+)\.(\w+)` \|", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_the_runtime_that_a_page_names_is_there(page: Path) -> None:
    named = set(NAMED.findall(page.read_text())) - FIELD.keys()
    assert [name for name in named if not (RUNTIME / name).is_dir() and not (RUNTIME / f"{name}.py").is_file()] == []


def test_the_way_of_a_claim_names_functions_that_are_there() -> None:
    steps = STEP.findall((ROOT / "docs" / "internals" / "loop.md").read_text())
    assert len(steps) > 10
    for file, owner, function in steps:
        classes = [
            node for node in ast.parse((RUNTIME / f"{file}.py").read_text()).body if isinstance(node, ast.ClassDef)
        ]
        (body,) = [node.body for node in classes if node.name == owner]
        functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert function in functions, f"{file}: {owner}.{function}"


def test_the_table_of_extras_has_all_that_a_user_installs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "README.md").read_text().partition("| extra |")[2], re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert extras.keys() - {"dev", "docs"} <= listed


def commands_of(page: str) -> list[list[str]]:
    """Return the words behind `asyncflow` of each command on a page, in its text or in a block."""
    blocks = "".join(FENCED.findall(page)).replace("\\\n", " ")
    lines = [*blocks.splitlines(), *SPAN.findall(FENCED.sub("", page))]
    found = [match[1].partition("#")[0] for line in lines if (match := COMMAND.match(line))]
    return [words.split() for words in found if words != PROCESS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_that_a_page_names_is_there(page: Path) -> None:
    for words in commands_of(page.read_text()):
        command: click.Command = cli.app
        while isinstance(command, click.Group) and words and (under := command.commands.get(words[0])):
            command, words = under, words[1:]
        assert command is not cli.app, f"{page.name} names asyncflow {words[0]}"
        known = {"--help", *(flag for each in command.params for flag in (*each.opts, *each.secondary_opts))}
        named = {flag for word in words for flag in re.findall(r"^\[?(--?[a-z][\w-]*)", word)}
        assert isinstance(command, click.Group) or named <= known, f"{page.name}: {command.name} {named - known}"


def test_pages_say_backend_as_names_do() -> None:
    assert [page.name for page in PAGES if re.search(r"\bback[ -]end", page.read_text(), re.IGNORECASE)] == []
