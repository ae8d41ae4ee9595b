"""The reward ``gym``: reasoning-gym's own checker of the dataset that the prompt came from.

Invariant: the checker is made with the config that the prompt was made with; what is slow to import is imported with
this module, before the first sample's time runs.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import reasoning_gym  # noqa: F401  importing it registers the datasets
from reasoning_gym.factory import create_dataset


def score(*, response: str, prompt: str, answer: Any, meta: dict[str, Any]) -> float:
    """Score by the dataset's ``score_answer``, which may give partial credit. Raises ValueError for other prompts."""
    if "dataset" not in meta:
        message = "the reward `gym` scores prompts of gym:// only; this one says no dataset"
        raise ValueError(message)
    checker = _checker(meta["dataset"], json.dumps(meta["config"], sort_keys=True))
    entry = {"question": prompt, "answer": answer, "metadata": meta["metadata"]}
    return float(checker.score_answer(response or None, entry))


@functools.cache
def _checker(dataset: str, config: str) -> Any:
    return create_dataset(dataset, **{"size": 1, **json.loads(config), "seed": 0})
