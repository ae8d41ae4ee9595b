"""The YAML blocks of the guide are parts of a manifest, and each algorithm has its page."""

import re
from pathlib import Path
from typing import Any

import pytest

from asyncflow.api.document import dump, parse
from asyncflow.api.job import RLJob
from asyncflow.commands.preflight import load
from asyncflow.plugins import installed

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
FOLDER = GUIDE / "algorithms"
PAGES = sorted(FOLDER.glob("*.md"))
OTHERS = [GUIDE / f"{name}.md" for name in ("corrections", "multi-turn", "python", "rewards", "tasks")]
NAMED = {"dpo": "dpo", "kl": "grpo", "README": "grpo"}
"""By page: the algorithm of its manifests, where that is not its own name."""
MODULE = re.compile(r"^```python\n# (\w+\.py), next to.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)


def merged(whole: Any, part: Any) -> Any:
    if not (isinstance(whole, dict) and isinstance(part, dict)):
        return part
    return whole | {key: merged(whole.get(key), value) for key, value in part.items()}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.stem)
def test_each_block_of_a_page_fits_into_the_quickstart(page: Path, tmp_path: Path) -> None:
    """One after another, as who reads the page writes them."""
    job = parse((ROOT / "examples" / "quickstart.yaml").read_text(), source="quickstart").data
    for name, code in MODULE.findall(page.read_text()):
        (tmp_path / name).write_text(code)
    blocks = BLOCK.findall(page.read_text())
    assert blocks or page.stem == "README"
    for block in blocks:
        job["spec"] = merged(job["spec"], parse(block, source=page.name).data)
        (tmp_path / "job.yaml").write_text(dump(job))
        read = load(tmp_path / "job.yaml")
        assert isinstance(read, RLJob)
        assert read.spec.algorithm.name == ("grpo" if page in OTHERS else NAMED.get(page.stem, page.stem))


def test_every_algorithm_has_a_row_in_the_list_and_a_page() -> None:
    rows = re.findall(r"^\| (\[`.*?) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    listed = dict(link for row in rows for link in re.findall(r"\[`([\w-]+)`\]\(([\w-]+)\.md", row))
    assert set(installed("asyncflow.algorithms")) <= listed.keys()
    assert {page.stem for page in PAGES} == {*listed.values(), "kl", "README"}
