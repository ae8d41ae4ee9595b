"""The backend that the guide shows is a backend, and its steps are all that it takes to use it."""

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest
from served_queue import served

from asyncflow.plan.roles import REFUSED
from asyncflow.queue.blocking import BlockingPartition
from asyncflow.queue.storage.backend import BACKENDS, Place, Site
from asyncflow.queue.values import encode
from asyncflow.rpc.columns import Jagged

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "queue-backends.md"
COMMAND = [sys.executable, "-m", "asyncflow"]
QUEUE = "{apiVersion: asyncflow.dev/v1alpha1, kind: TransferQueue, metadata: {name: q}, spec: {backend: folder}}"


def shown(language: str) -> str:
    """Return the one example of the guide in ``language``."""
    (source,) = re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return textwrap.dedent(source)


async def test_the_store_of_the_guide_gives_back_what_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLS", str(tmp_path))
    names = {}
    exec(shown("python"), names)
    for incarnation in ("first", "second"):
        site = Site(unit=3, incarnation=incarnation, host="127.0.0.1", find=lambda *_: None)
        backend = names["FolderBackend"].create(site)
        await backend.open()
        assert list(tmp_path.iterdir()) == []
        put = {"x": Jagged.from_rows([[1, 2], [], [3]], "int64"), "y": encode(["a", "b", ""])}
        await backend.put(1, put)
        assert await backend.get([Place(1, row) for row in range(3)], ["y", "x"]) == put
        await backend.free([Place(1, 0)], ["x", "y"])
        assert len(list(tmp_path.iterdir())) == 2
        await backend.close()


def install(folder: Path) -> None:
    """Put the guide's package into ``folder`` as an installation does."""
    project = tomllib.loads(shown("toml"))["project"]
    about = folder / f"my_package-{project['version']}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [f"{name} = {value}" for name, value in project["entry-points"][BACKENDS].items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{BACKENDS}]", *points, ""]))
    (folder / "my_package.py").write_text(shown("python"))


@pytest.mark.process
def test_an_installed_package_is_all_that_another_backend_takes(tmp_path):
    install(tmp_path / "packages")
    cells = tmp_path / "cells"
    cells.mkdir()
    packages, env = tmp_path / "packages", {"CELLS": str(cells)}
    with served(tmp_path, "--backend", "folder", packages=packages, env=env) as queue:
        corpus = BlockingPartition(queue, "corpus")
        corpus.declare("read", ["n"])
        corpus.put({"n": np.arange(8)})
        assert len(list(cells.iterdir())) == 8
        leased = corpus.claim("read", 8)
        assert sorted(int(value) for value in corpus.get(leased, ["n"])["n"]) == list(range(8))


@pytest.mark.process
def test_a_unit_whose_backend_is_not_installed_says_so_and_ends_for_good(tmp_path):
    (tmp_path / "queue.yaml").write_text(QUEUE)
    place = ["--driver", "tcp://127.0.0.1:9", "--index", "0", "--attempt", "0", "--workdir", str(tmp_path)]
    unit = subprocess.run(
        [*COMMAND, "role", "storage", "--job", "queue.yaml", *place],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert unit.returncode == REFUSED
    assert f"backend of the queue: no installed package offers 'folder' in {BACKENDS}." in unit.stdout
    assert "Install its package, or use one of: memory, mooncake, redis" in unit.stdout
    assert "Traceback" not in unit.stdout
