"""Tests of what the benchmarks read out of a run whose trainer was killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from run_lines import evaluations


def test_an_evaluation_of_replaced_weights_does_not_count(tmp_path: Path) -> None:
    events = [("evaluation", 0), ("evaluation", 3), ("step made again", 2), ("evaluation", 3), ("evaluation", 6)]
    written = [json.dumps({"event": event, "at": at, "step": step}) for at, (event, step) in enumerate(events)]
    (tmp_path / "events.jsonl").write_text("\n".join([json.dumps({"event": "driver started", "at": 0}), *written]))
    assert [(one["step"], one["at"]) for one in evaluations(tmp_path)] == [(0, 0), (3, 3), (6, 4)]
