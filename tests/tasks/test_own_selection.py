"""The selection of the guide, installed as a package and run as it stands there by a controller of its own process."""

import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from served_queue import served

from asyncflow.commands.preflight import runnable_job
from asyncflow.errors import ManifestError
from asyncflow.flow.selection import SELECTIONS
from asyncflow.queue.blocking import BlockingPartition
from asyncflow.queue.protocol.messages import TOKENS_TAG, TaskSpec

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "tasks.md"
TOKENS = [7, 3, 9, 1, 5]


def shown(language: str) -> str:
    """Return the last example of the guide in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[-1]


def install(folder: Path) -> None:
    """Put the guide's module and its entry points into ``folder``, as an installation does."""
    points = tomllib.loads(shown("toml"))["project"]["entry-points"][SELECTIONS]
    module = {target.partition(":")[0] for target in points.values()}.pop()
    about = folder / f"{module}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{SELECTIONS}]", *lines, ""]))
    (folder / f"{module}.py").write_text(shown("python"))


def task(order: str) -> TaskSpec:
    return TaskSpec(partition="corpus", name=order, needs=["n"], order=order)


@pytest.mark.process
def test_a_controller_orders_rows_by_the_selection_of_an_installed_package(tmp_path: Path) -> None:
    install(tmp_path / "packages")
    with served(tmp_path, packages=tmp_path / "packages") as queue:
        queue.declare([task("short-first"), task("longest")], timeout=30)
        corpus = BlockingPartition(queue, "corpus")
        corpus.put({"n": np.array(TOKENS)}, tags=[{TOKENS_TAG: tokens} for tokens in TOKENS])
        taken = {
            order: [int(corpus.get(corpus.claim(order, 1), ["n"])["n"][0]) for _ in TOKENS]
            for order in ("short-first", "longest")
        }
        assert taken == {"short-first": sorted(TOKENS), "longest": sorted(TOKENS, reverse=True)}
        with pytest.raises(ManifestError, match=f"no installed package offers 'tallest' in {SELECTIONS}"):
            queue.declare([task("tallest")], timeout=30)


def test_validate_knows_an_installed_selection_and_refuses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path)
    (tmp_path / "m.py").write_text("def f(rows):\n    return rows\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    order = "tasks=[{{name: a, function: 'm:f', reads: [reward], writes: [{{name: x}}], order: {}}}]"
    file = shutil.copy(ROOT / "examples" / "counting.yaml", tmp_path)
    assert runnable_job(file, [order.format("short-first")]).spec.tasks[0].order == "short-first"
    known = "fifo, key, longest, oldest, short-first"
    with pytest.raises(ManifestError, match=rf"the order of the task a.*'tallest' in {SELECTIONS}.*one of: {known}$"):
        runnable_job(file, [order.format("tallest")])
