"""The pages about a loop of one's own say what the examples do, which tests/system/test_own_loop.py runs."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / "docs" / "guide" / page).read_text())


def test_the_page_of_a_loop_has_the_example_whole() -> None:
    (code,) = blocks("own/loop.md")
    assert (OWN / "loop.py").read_text().endswith(code)
    assert len(code.splitlines()) <= 40


def test_the_class_of_the_page_is_that_of_the_example() -> None:
    code = blocks("python.md")[0].partition("\n\n\n")[0]
    assert code in (OWN / "algorithm.py").read_text()


@pytest.mark.parametrize("name", ["trl_grpo.py", "actor_learner.py", "algorithm.py"])
def test_examples_that_pages_name_exist(name: str) -> None:
    assert f"examples/own/{name}" in (ROOT / "docs" / "guide" / "python.md").read_text()
    assert (OWN / name).exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("actor_learner.py", []), ("actor_learner.py", ["teacher", "nowhere"]), ("algorithm.py", []), ("loop.py", [])],
)
def test_an_example_that_is_called_wrong_says_how_it_is_called(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit, match=rf"python {name} "):
        runpy.run_path(str(OWN / name), run_name="__main__")
