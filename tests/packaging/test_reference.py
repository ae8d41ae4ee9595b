"""docs/reference is what models and command line say: every field with its words, every command with its options."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from asyncflow import cli
from asyncflow.api.base import Spec
from asyncflow.api.check import fields, model_of
from asyncflow.api.load import KINDS
from asyncflow.commands import reference

FILE = Path(__file__).parents[2] / "docs" / "reference" / "reference.md"


def test_the_reference_is_up_to_date() -> None:
    assert reference.check(FILE), "run: asyncflow reference"


def test_what_is_out_of_date_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reference.md"
    for text in (None, FILE.read_text() + "\n"):
        if text is not None:
            file.write_text(text)
        assert cli.invoke(["reference", "--check", "--file", str(file)]) == 1
        assert "out of date" in capsys.readouterr().err
    assert cli.invoke(["reference", "--file", str(file)]) == 0
    assert cli.invoke(["reference", "--check", "--file", str(file)]) == 0
    assert file.read_text() == FILE.read_text()


def described(model: type[Spec]) -> Iterator[str]:
    """The rows that a model and those in it must have, as they begin."""
    for name, annotation in fields(model).items():
        yield f"| `{name}` | "
        if (part := model_of(annotation)) is not None:
            yield from described(part)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_row(kind: str) -> None:
    text = FILE.read_text().partition(f"\n# {kind}\n")[2].partition("\n# ")[0]
    spec = KINDS[kind].model_fields["spec"].annotation
    missing = [row for row in described(spec) if row not in text]
    assert not missing


def test_every_row_has_words_and_every_link_a_target() -> None:
    text = FILE.read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", text, re.MULTILINE)
    assert len(rows) > 150
    assert not [name for name, words in rows if not words.strip() and f"`{name}` | `" not in text]
    targets = {re.sub(r"[^a-z0-9-]", "", heading.lower()) for heading in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    assert set(re.findall(r"\(#([\w-]+)\)", text)) <= targets


def commands(
    group: click.Group, above: str = "asyncflow", *, hidden: bool = False
) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that a person may type, each with its name. hidden: whether to yield the others, too."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{above} {name}", hidden=hidden)
        elif hidden or not command.hidden:
            yield f"{above} {name}", command


def test_the_page_of_the_command_line_has_every_command_and_its_options() -> None:
    page = (FILE.parent / "command-line.md").read_text()
    for name, command in commands(cli.app):
        assert name in page
        options = [each for each in command.params if isinstance(each, click.Option)]
        assert [each.opts for each in options if not re.fullmatch(r"[A-Z].*\.", each.help or "")] == [], name
        flags = {flag for each in options for flag in each.opts}
        if name != "asyncflow role":
            assert {flag for flag in flags if f"`{flag}`" not in page} == set(), name


def test_the_page_of_the_command_line_has_no_other_option_default_exit_status_or_variable() -> None:
    page = (FILE.parent / "command-line.md").read_text()
    for section in page.split("\n## asyncflow ")[1:]:
        name, _, text = section.partition("\n## ")[0].partition("\n")
        options = {
            flag: option
            for command, each in commands(cli.app, hidden=True)
            if f"{command} ".startswith(f"asyncflow {name} ")
            for option in each.params
            for flag in (*option.opts, *option.secondary_opts)
        }
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) <= options.keys(), name
        for flag, default in re.findall(r"^\| `(-[\w-]+)` \| (\d+) \|", text, re.MULTILINE):
            assert options[flag].default == int(default), f"{name} {flag}"
    assert f"0 on success, {cli.FAILED} after a failure, {cli.USAGE} if the input is wrong" in page
    assert f"{cli.INTERRUPTED} after Ctrl-C" in page
    runtime = "".join(file.read_text() for file in Path(cli.__file__).parent.rglob("*.py"))
    assert [name for name in re.findall(r"`(\w+_[A-Z_]+)`", page) if f'"{name}"' not in runtime] == []


def test_the_page_of_a_runs_folder_has_every_request_to_a_driver() -> None:
    page = (FILE.parent / "run-folder.md").read_text()
    runtime = Path(cli.__file__).parent
    text = "".join((runtime / name).read_text() for name in ("driver/status.py", "rpc/http.py", "view/page/routes.py"))
    served = re.findall(r'(?:web\.(?:get|post)\(|[A-Z]+: Final = )"(/[^"]*)"', text)
    assert len(served) >= 12
    assert {path for path in served if f"{path}`" not in page and f"{path}/" not in page} == set()
