"""docs/reference/events.md names every event of a run, and every reason of events and conditions in a cluster."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

from asyncflow.api.names import ROLES
from asyncflow.api.status import Phase
from asyncflow.driver import journal, progress
from asyncflow.driver.evaluation import EvaluationResult

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "events.md").read_text()
OF_A_RUN, IN_A_CLUSTER = PAGE.split("\n## Kubernetes events\n")
GUIDE = (ROOT / "docs" / "guide" / "operator.md").read_text()
NAME = re.compile(r"[A-Z][A-Za-z]+")
REASON = {"set": 2, "note": 0, "FailureResult": 0, "Obstacle": 0}
"""Position of the reason among the arguments of the operator's functions; others take it by name."""


def calls(folder: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in all modules of a folder, each with the last part of its function's name."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func).rpartition(".")[2], node


def texts(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def reasons() -> set[str]:
    """Return the reasons that stand as texts in the operator's decisions."""
    found: set[str] = set()
    for name, call in calls(ROOT / "operator" / "asyncflow_operator" / "decide"):
        found |= set().union(*(texts(each.value) for each in call.keywords if each.arg == "reason"))
        if name in REASON and len(call.args) > REASON[name]:
            found |= texts(call.args[REASON[name]])
    return {text for text in found if NAME.fullmatch(text)}


def test_every_event_of_a_run_is_on_the_page() -> None:
    rows = dict(re.findall(r"^\| (`[^|]+`) \| [^|]+ \| ?([^|]*) \|$", OF_A_RUN, re.MULTILINE))
    shown = {name for names in rows for name in re.findall(r"`([^`]+)`", names)}
    noted = [call.args[0] for name, call in calls(ROOT / "runtime" / "asyncflow" / "driver") if name == "note"]
    texts_of = {name: value for module in (journal, progress) for name, value in vars(module).items()}
    written = {each.value for each in noted if isinstance(each, ast.Constant)}
    written |= {texts_of[each.id] for each in noted if isinstance(each, ast.Name) and each.id.isupper()}
    assert shown == written | {"Succeeded", "Failed", "Suspended"}
    assert set(re.findall(r"`(\w+)`", rows["`evaluation`"])) == {each.name for each in fields(EvaluationResult)}


def test_every_reason_is_on_a_page() -> None:
    assert len(reasons()) > 30
    assert reasons() - set(NAME.findall(IN_A_CLUSTER + GUIDE)) == {"Gone"}


def test_every_reason_of_the_page_exists() -> None:
    sources = [
        *(ROOT / "operator" / "asyncflow_operator").rglob("*.py"),
        *(ROOT / "runtime/asyncflow/api").glob("*.py"),
    ]
    known = set().union(*(texts(ast.parse(file.read_text())) for file in sources), get_args(Phase))
    known |= {f"{role.capitalize()}{end}" for role in ROLES for end in ("Failed", "Gone")}
    known |= {f"No{kind}" for kind in ("Rollout", "Follower")}
    columns = re.findall(r"^\| ([\w, ]+)(?:, \.\.\.)? \| \w+ \|", IN_A_CLUSTER, re.MULTILINE)
    shown = {name for each in (*columns, *re.findall(r"`([^`]+)`", IN_A_CLUSTER)) for name in each.split(", ")}
    assert {name for name in shown if NAME.fullmatch(name)} - known == set()
