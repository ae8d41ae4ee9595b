"""Python on the pages of the documentation needs what users import; a plug-in needs its interface, too."""

import ast
import re
from pathlib import Path

import pytest

import asyncflow

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
INTERFACES = {
    "tasks.md": {"asyncflow.flow.selection"},
    "queue-backends.md": {"asyncflow.queue.storage.backend", "asyncflow.queue.storage.packed"},
    "weights.md": {"asyncflow.weights"},
    "simulator.md": {"asyncflow.sim"},
    "algorithm.md": {"asyncflow.algorithms.base", "asyncflow.algorithms.losses"},
    "engine.md": {"asyncflow.errors", "asyncflow.rollout.engines.base", "asyncflow.rollout.sampling"},
}
"""By page: the modules with what a plug-in that it shows derives from, or the package that it is about."""
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, ast.Module]]:
    return [(page.name, ast.parse(block)) for page in PAGES for block in BLOCK.findall(page.read_text())]


def imported(tree: ast.Module) -> set[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return {module for module in modules if module.partition(".")[0] == "asyncflow"}


@pytest.mark.parametrize(("page", "tree"), blocks(), ids=[page for page, _ in blocks()])
def test_python_of_the_docs_imports_nothing_deeper_than_asyncflow(page: str, tree: ast.Module) -> None:
    assert imported(tree) <= {"asyncflow"} | INTERFACES.get(page, set()), page


def test_every_name_of_asyncflow_that_the_docs_use_is_public() -> None:
    used = {
        node.attr
        for _, tree in blocks()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "asyncflow"
    } | {
        alias.name
        for _, tree in blocks()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "asyncflow"
        for alias in node.names
    }
    assert {"load", "train", "StepDataset"} <= used <= set(asyncflow.__all__)
