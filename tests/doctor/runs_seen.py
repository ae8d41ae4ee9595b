"""Evidence of runs, made from a few figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncflow.api.load import load_job
from asyncflow.doctor.evidence import Evidence
from asyncflow.driver.lives import Life

EXAMPLES = Path(__file__).parents[2] / "examples"
BEGAN = 1000.0
TOOK = 100.0


def life(role: str, *, busy: float | None = None, held: float = 0.0, **figures: float) -> Life:
    """Return the life of a process over the whole run. busy: share of it in which it worked, held: had work."""
    tokens = int(figures.pop("tokens", 0))
    return Life(
        role=role,
        started=BEGAN,
        seen=BEGAN + TOOK,
        busy_s=None if busy is None else busy * TOOK,
        busy_seen=BEGAN + TOOK,
        held_s=held * TOOK,
        tokens=tokens,
        figures=figures,
    )


def steps(number: int = 12, *, wait: float = 0.2, **figures: Any) -> list[dict[str, Any]]:
    """Return lines of steps of a second each. wait: share of it; a sequence among ``figures`` has a value a step."""
    made = []
    for index in range(number):
        line = {
            "step": index + 1,
            "attempt": 0,
            "at": BEGAN + index,
            "wall_s": 1.0,
            "wait_s": wait,
            "reward": 0.1 * index,
        }
        of_step = {
            name: value[index] if isinstance(value, list) else value
            for name, value in ({"loss": 0.1} | figures).items()
        }
        made.append(line | of_step)
    return made


def evidence(
    *settings: str,
    of: str = "quickstart.yaml",
    lines: list[dict[str, Any]] | None = None,
    lives: Mapping[str, Life] | None = None,
    **rest: Any,
) -> Evidence:
    """Return the evidence of a run of an example: a healthy one, except for the given changes."""
    return Evidence(
        name="run",
        spec=load_job(EXAMPLES / of, settings).spec,
        steps=steps() if lines is None else lines,
        events=[{"event": "first dispatch", "at": BEGAN}],
        lives={"rollout-0-a": life("rollout", busy=0.8)} if lives is None else lives,
        **rest,
    )
