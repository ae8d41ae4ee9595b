"""The page `docs/guide/own/reward.md`: its functions and its manifest, scored in real processes."""

import json
import re
from pathlib import Path

import pytest
import yaml

from asyncflow.api.rewards import RewardSpec
from asyncflow.rewards.components import WeightedRewards
from asyncflow.rewards.wire import Example

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "own" / "reward.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


async def test_the_rewards_of_the_page_are_what_it_says(tmp_path: Path) -> None:
    (code,), (manifest,) = blocks("python"), blocks("yaml")
    (tmp_path / "mine.py").write_text(code)
    spec = RewardSpec.model_validate_json(json.dumps(yaml.safe_load(manifest)["reward"]), by_name=False)
    rewards = WeightedRewards.of(spec, workdir=tmp_path)
    await rewards.start()
    assert rewards.by_group
    examples = [
        Example(prompt="1 2 3", response=response, answer="321", length=len(response) + 1)
        for response in ("321", "3210000", "12 ")
    ]
    right, long, wrong = await rewards.score(examples)
    await rewards.close()
    assert right.components == {"right": 1.0, "brevity": 1.0, "judged": 1.0, "overlong": 0.0}
    assert right.value == pytest.approx(1.2)
    assert long.components == {"right": 0.0, "brevity": 0.5, "judged": 0.0, "overlong": -1.0}
    assert wrong.value == pytest.approx(0.2)
    assert json.loads(wrong.details) == {"right": {"said": "12"}}
