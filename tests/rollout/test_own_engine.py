"""The engine of the guide, run as it stands there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncflow.identity import SampleKey, Version
from asyncflow.plugins import load_plugin
from asyncflow.rollout.engines import GROUP, open_engine
from asyncflow.rollout.engines.base import GenerationRequest, RolloutEngine

from .rollout_world import OF_TURNS, running_world
from .test_episodes import Counting

SIDES = {"model.embed_tokens.weight": np.zeros(20, np.float32)}
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "own" / "engine.md"


def installed(folder: Path) -> None:
    """Write the module of the page and its entry point, as a package that is installed has them."""
    (folder / "dice.py").write_text(re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)[1])
    info = folder / "dice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dice\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ndice = dice:DiceEngine\n")


async def test_the_engine_of_the_guide_makes_samples_and_goes_on_with_them(tmp_path, monkeypatch):
    installed(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugin(GROUP, "dice", kind=RolloutEngine, where="here")
    engine = open_engine("dice", folder=None, slots=4, max_length=64)
    await engine.load(Version(0, 1), SIDES)
    asked = GenerationRequest(key=SampleKey(3, 1), prompt_ids=(1,), max_tokens=30, stop_ids=(7,), seed=2)
    whole = await engine.generate(asked)
    assert whole.ids.tolist().index(7) == len(whole) - 1
    begun = replace(whole.without_last().without_last())
    assert (await engine.generate(replace(asked, continues=begun))).ids.tolist() == whole.ids.tolist()
    async with running_world(tmp_path / "world", columns=OF_TURNS) as world:
        await world.rollout("r0", engine="dice", environment=Counting(), stop_ids=tuple(range(1, 9)), max_tokens=40)
        await world.put([0, 1], step=1, oldest=0)
        await world.publish(0, SIDES)
        rows, columns = await world.made(8)
    assert sum(row.meta.tags["turns"] == 3 for row in rows) >= 4
    assert all(len(ids) == len(mask) for ids, mask in zip(columns["response_ids"], columns["loss_mask"], strict=True))
