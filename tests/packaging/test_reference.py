"""docs/reference.md is what the models say: every field with its words, and links that lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncflow import cli
from asyncflow.api.base import Spec
from asyncflow.api.load import KINDS
from asyncflow.api.paths import fields, model_of
from asyncflow.commands import reference

FILE = Path(__file__).parents[2] / "docs" / "reference.md"


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
