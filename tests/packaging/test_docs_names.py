"""Files and functions of the runtime that the pages of the documentation name are there."""

import ast
import re
from pathlib import Path

import pytest

from asyncflow.telemetry.sinks.names import FIELD

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "runtime" / "asyncflow"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = "|".join(sorted(path.name for path in RUNTIME.iterdir() if path.is_dir() and path.name != "__pycache__"))
NAMED = re.compile(rf"`((?:{FOLDERS})/[\w/]+)(?:\.py)?(?:\.[\w.]+)?`")
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
