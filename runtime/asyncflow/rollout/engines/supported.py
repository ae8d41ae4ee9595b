"""What the engine ``transformers`` can run, told from a model's configuration alone.

Invariant: importing this loads no torch, so that ``asyncflow validate`` refuses what the engine would refuse later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow.errors import ManifestError, NotYetError

DTYPES = ("float32", "bfloat16")
FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of ``model_type`` for which the engine's promises are tested."""


def check_model(config: Mapping[str, Any], *, dtype: str, where: str) -> None:
    """Refuse a model whose attention is not full, whose rows would influence each other, or that nobody has tested.

    config: the content of config.json; where: its folder. Raises NotYetError, ManifestError for an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ManifestError(f"dtype {dtype!r}", where=where, hint=f"Use one of {', '.join(DTYPES)}")
    family = config.get("model_type")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if family not in FAMILIES:
        raise NotYetError(f"model type {family!r}", where=where, hint=f"Known: {', '.join(FAMILIES)}")
    if kind in ("dynamic", "longrope"):
        raise NotYetError(f"rope type {kind!r}: a row's positions would depend on the others' lengths", where=where)
    if set(config.get("layer_types") or ()) - {"full_attention"} or config.get("use_sliding_window"):
        raise NotYetError("layers with sliding-window attention", where=where)


def check_length(max_length: int, limit: int, *, where: str) -> None:
    """Refuse sequences that are longer than the model has positions. Raises ManifestError."""
    if max_length > limit:
        raise ManifestError(
            f"the model has {limit} positions, and a sequence may have {max_length} tokens",
            where=where,
            hint="Lower sampling.maxPromptTokens or sampling.maxTokens",
        )
