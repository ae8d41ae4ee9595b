"""Every metric that is declared is set by somebody: a dashboard must not wait for a figure that never comes."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "runtime" / "asyncflow"


def test_every_declared_metric_has_a_user() -> None:
    declared = (PACKAGE / "telemetry" / "metrics.py").read_text()
    names = set(re.findall(r"self\.(\w+) = self\.(?:gauge|figure|counter|histogram|total)", declared))
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "metrics.py")
    assert len(names) > 20
    unused = {name for name in names if not re.search(rf"metrics\.{name}\b", code)}
    assert unused == {name for name in unused if re.search(rf"self\.{name}\.", declared)}, "set by a method there"
    methods = set(re.findall(r"def (count_\w+)", declared))
    assert {name for name in methods if not re.search(rf"metrics\.{name}\b", code)} == set()
