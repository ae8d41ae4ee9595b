"""The task on the page that shows how to write one, as it stands there."""

import io
import re
from pathlib import Path

import pytest
from leased_batch import batch

from asyncflow.api.load import load_job
from asyncflow.roles.task import outputs_of
from asyncflow.tasks.functions import TaskFunction

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "own" / "task.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.process
async def test_the_task_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "measures.py").write_text(block("python"))
    manifest = (ROOT / "examples" / "counting.yaml").read_text()
    (task,) = load_job(io.StringIO(manifest + "".join(f"  {line}\n" for line in block("yaml").splitlines()))).spec.tasks
    function = TaskFunction(
        task.function,
        workdir=tmp_path,
        outputs=outputs_of(task, default=8),
        config=task.config,
        decode=lambda ids: "".join(map(str, ids)),
    )
    try:
        await function.start()
        found = await function.compute(*batch(3))
    finally:
        await function.close()
    assert [{name: values.tolist() for name, values in row.items()} for row in found] == [
        {"repeats": [0], "right": [False]}
    ] * 3
