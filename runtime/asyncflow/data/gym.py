"""Prompts of reasoning-gym: ``gym://DATASET``, generated tasks with their own checkers.

Invariant: task ``index`` depends on nothing but (dataset, config, seed, index). reasoning-gym is imported lazily.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from asyncflow.data.base import HELD_OUT_SHARE, GeneratedSource, Prompt, Purpose
from asyncflow.errors import ManifestError

SHARE = "held_out"
INDICES = 1_000_000
"""Number of tasks that a dataset is asked to have; ``size`` in the config overrides it, for datasets that limit it."""


def open_gym(
    name: str, *, config: Mapping[str, Any], seed: int, purpose: Purpose, size: int | None, where: str
) -> GeneratedSource:
    """Open the dataset ``name`` of reasoning-gym.

    config: the dataset's own fields, without ``seed``, and ``held_out``, the share of all questions that is kept for
    evaluation (for datasets with few). Raises ManifestError where the package is missing, or it does not know the
    dataset or refuses the config.
    """
    config = dict(config)
    share = config.pop(SHARE, HELD_OUT_SHARE)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ManifestError(f"{SHARE} = {share!r}", where=where, hint="Give a share between 0 and 1, or leave it out")
    settings = {"size": INDICES, **config}
    dataset = make_dataset(name, {**settings, "seed": seed}, where=where)

    def generate(index: int) -> Prompt:
        entry = dataset[index]
        meta = {"dataset": name, "config": dict(config), "metadata": _plain(entry["metadata"])}
        return Prompt(question=entry["question"], answer=entry["answer"], task=f"gym://{name}", meta=meta)

    return GeneratedSource(
        generate,
        name=f"gym://{name}",
        indices=settings["size"],
        seed=seed,
        purpose=purpose,
        size=size,
        share=share,
    )


def make_dataset(name: str, config: Mapping[str, Any], *, where: str) -> Any:
    """Make a reasoning-gym dataset. Raises ManifestError where that is not possible."""
    try:
        import reasoning_gym  # noqa: F401  importing it registers the datasets
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ManifestError(
            f"`gym://` needs reasoning-gym: {error}", where=where, hint="pip install 'asyncflow[gym]'"
        ) from error
    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4))
        raise ManifestError(
            f"reasoning-gym has no dataset {name!r}",
            where=where,
            hint=f"near it: {near or 'nothing'}",
        )
    try:
        return create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise ManifestError(
            f"reasoning-gym refuses the config of {name!r}: {error}", where=where, hint="see the dataset's fields"
        ) from error


def _plain(metadata: Any) -> Any:
    """Return the metadata as JSON values: a checker sees lists for tuples, and text for what JSON cannot say."""
    return json.loads(json.dumps(metadata, default=str))
