"""The docs: the table of behaviours is whole, every test and metric that is named is there, the example runs."""

import asyncio
import re
from pathlib import Path

from asyncflow.rpc.server import RpcCounters
from asyncflow.telemetry.metrics import ControllerMetrics, StorageMetrics

HERE = Path(__file__).parent
DOCS = (HERE.parents[2] / "docs" / "internals" / "queue-behaviours.md").read_text()
TESTS = {name for path in HERE.glob("test_*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())}
GUIDE = (HERE.parents[2] / "docs" / "guide" / "queue.md").read_text()
LINES = [line.split("|")[1:-1] for line in DOCS.splitlines() if re.match(r"\| W?\d", line)]


def test_every_behaviour_has_its_line_with_a_word_and_a_test():
    lines = {int(number): (kind.strip(), re.findall(r"`(test_\w+)`", tests)) for number, kind, _, tests in LINES[:39]}
    assert sorted(lines) == list(range(1, 40))
    for number, (kind, tests) in lines.items():
        assert kind in ("kept", "reworded", "replaced")
        assert all(name.startswith(f"test_{number:02d}_") for name in tests)
        assert tests


def test_every_test_that_is_named_exists_and_every_numbered_one_is_of_a_line():
    named = re.findall(r"`(test_\w+)`", DOCS)
    assert set(named) <= TESTS
    numbers = {re.match(r"test_(w?\d\d)_", name).group(1) for name in named}
    assert {match.group(1) for name in TESTS if (match := re.match(r"test_(w?\d\d)_", name))} == numbers


def test_every_metric_that_is_named_is_emitted():
    controller, storage = ControllerMetrics(), StorageMetrics()
    controller.watch_rpc(RpcCounters())
    families = [family for role in (controller, storage) for family in role.registry.collect()]
    emitted = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
    named = {name.replace("_ROLE_", "_controller_") for name in re.findall(r"`(asyncflow_\w+)", GUIDE)}
    assert named <= emitted


async def test_the_example_does_what_it_says(address, two_units, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    await asyncio.to_thread(exec, code.replace("tcp://127.0.0.1:5571", address), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first == "{'text': ['right', 'wrong'], 'score': array([1., 0.])}"
    assert second.startswith("{'a': {'status': 'noted'}, 'b': {'status': 'new'}} {'note': [{'by': 'me'")
    assert (await two_units.partition("scores").rows()).rows == []
