"""The tasks of ``tasks.yaml``, one that computes and one that waits, and the reward function of ``update_modes``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from asyncflow.tasks.rows import TaskRow


def measure(rows: Sequence[TaskRow], _config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"length": len(row["response_ids"])} for row in rows]


async def ask(rows: Sequence[TaskRow], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    await asyncio.sleep(config.get("seconds", 0.0))
    return [{"mark": float(row["length"][0] == len(row["response_ids"]))} for row in rows]


def begins(response: str, answer: str) -> float:
    """Return 1 for a response that starts with the answer, and 0 otherwise."""
    return float(response.startswith(answer))
