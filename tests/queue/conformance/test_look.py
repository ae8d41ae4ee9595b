"""``asyncflow queue ls|show|peek`` at a queue with a directory, as it stands alone."""

import asyncio
import json

import numpy as np
import pytest

from asyncflow import cli
from asyncflow.roles.controller import _show
from asyncflow.telemetry.metrics import ControllerMetrics


@pytest.fixture
def run(address, capsys):
    async def run(command, *words):
        capsys.readouterr()
        status = await asyncio.to_thread(cli.invoke, ["queue", command, address, *words])
        out, err = capsys.readouterr()
        return status, err or out

    return run


@pytest.fixture
async def filled(scores):
    """Two tasks; one row done, one held, one ready and one without its column."""
    await scores.declare("grade", ["text"], writes=["score"])
    await scores.declare("train", ["score"])
    rows = await scores.put({"text": ["done", "held", "ready " * 40]}, tags=[{"n": 1}, {}, {}])
    rows += await scores.put({"note": np.zeros((1, 3))}, keys=["later"])
    assert all(await scores.complete(await scores.claim("grade", 1, timeout=5), {"score": np.ones(1)}))
    await scores.claim("grade", 1, timeout=5)
    return rows


async def test_ls_tells_of_partitions_and_room(run, filled):
    status, out = await run("ls")
    assert status == 0
    line = next(line.split() for line in out.splitlines() if line.startswith("scores"))
    assert line[:4] == ["scores", "open", "4", "0"]
    assert "grade 1, train 1" in out
    assert "2 units" in out
    assert "of 16 MiB held" in out
    status, out = await run("ls", "--json")
    overview = json.loads(out)
    assert overview["partitions"][0]["tasks"][0]["ready"] == 1
    assert overview["stats"]["units"] == 2
    assert [(unit["unit"], unit["state"]) for unit in overview["units"]] == [(0, "serving"), (1, "serving")]


async def test_a_unit_that_is_not_heard_for_long_is_called_silent(two_units):
    sessions, now = two_units.controller.sessions, two_units.controller.now()
    assert [unit.state for unit in sessions.views(now)] == ["serving", "serving"]
    assert [unit.state for unit in sessions.views(now + 3.5)] == ["silent", "silent"]


async def test_drain_has_a_unit_leave_and_waits_for_it(run, filled, scores, two_units):
    leaving = asyncio.create_task(leave(two_units.units[1]))
    status, out = await run("drain", "1", "--timeout", "20")
    assert (status, out.splitlines()[-1]) == (0, "unit 1 has left; no row was lost")
    assert await leaving
    status, out = await run("ls", "--json")
    units = json.loads(out)["units"]
    assert [(unit["unit"], unit["state"]) for unit in units] == [(0, "serving")]
    assert (await scores.get(filled[:1], ["text"]))["text"] == ["done"]
    status, out = await run("drain", "7")
    assert (status, out.count("\n")) == (1, 1)
    assert "there is no storage unit 7. There are 0" in out


async def leave(unit):
    """Do as the role: leave when the controller says so."""
    await unit.leaving.wait()
    return await unit.leave()


async def test_show_names_the_oldest_row_that_is_waited_for_and_the_column_that_it_lacks(run, filled):
    status, out = await run("show", "scores")
    assert status == 0
    assert "scores (open): 4 rows, 0 wanted" in out
    assert "text text" in out
    grade, train = (line for line in out.splitlines() if line.startswith(("grade", "train")))
    assert f"row {filled[3]}" in grade
    assert grade.rstrip().endswith("text")
    assert f"row {filled[1]}" in train
    assert train.rstrip().endswith("score")
    status, out = await run("show", "scores", "--json")
    task = json.loads(out)["tasks"][0]
    assert (task["name"], task["ready"], task["leased"], task["done"]) == ("grade", 1, 1, 1)
    assert (task["oldest"]["row"], task["oldest"]["lacks"]) == (filled[3], ["text"])


async def test_show_names_the_units_and_where_they_are(run, filled, two_units):
    shown = json.loads((await run("show", "scores", "--json"))[1])["units"]
    assert [unit["unit"] for unit in shown] == [0, 1]
    _, out = await run("show", "scores")
    for index, unit in two_units.units.items():
        words = next(line.split() for line in out.splitlines() if line.rstrip().endswith(unit.server.address))
        assert words[:2] == [str(index), "serving"]
        assert words[-2:] == [str(unit._session.epoch), unit.server.address]


async def test_peek_shows_rows_and_values_and_leases_nothing(run, filled, scores):
    status, out = await run("peek", "scores", "--task", "grade", "--column", "text", "--column", "note")
    assert status == 0
    for row, state in zip(filled, ("done", "leased", "ready", "lacks text"), strict=True):
        assert state in next(line for line in out.splitlines() if line.startswith(str(row)))
    assert "'done'" in out
    assert "n=1" in out
    assert "[0.0, 0.0, 0.0]" in out
    assert "ready ready" in out
    assert "ready " * 40 not in out
    status, out = await run("peek", "scores", "--rows", "1", "--json", "--column", "text")
    (seen,) = json.loads(out)
    assert (seen["row"], seen["tags"], seen["values"]) == (filled[0], {"n": 1}, {"text": "'done'"})
    assert [row.row for row in await scores.claim("grade", 8, timeout=5)] == filled[2:3]


async def test_the_metrics_name_what_is_waited_for(two_units, scores, filled):
    metrics = ControllerMetrics()

    def shown(what, **labels):
        return metrics.registry.get_sample_value(f"asyncflow_controller_{what}", labels)

    waiting = asyncio.create_task(scores.claim("train", 8, timeout=30))
    assert len(await waiting) == 1
    waiting = asyncio.create_task(scores.claim("train", 8, timeout=30))
    await two_units.until(lambda: two_units.controller.stats().parked)
    _show(two_units.controller, metrics)
    assert shown("oldest_unready_seconds", task="scores/grade", lacks="text") >= 0
    assert shown("oldest_unready_seconds", task="scores/train", lacks="score") >= 0
    assert shown("parked_claims", task="scores/train") == 1
    assert shown("ledger_lag_seconds") == 0
    await scores.write(filled, {"text": ["x"] * 4, "score": np.ones(4)})
    await waiting
    _show(two_units.controller, metrics)
    assert shown("oldest_unready_seconds", task="scores/grade", lacks="text") is None
    assert shown("parked_claims", task="scores/train") == 0


async def test_what_is_wrong_is_said_in_one_line(run, address, two_units):
    status, out = await run("show", "nobody")
    assert (status, out.count("\n")) == (2, 1)
    assert "there is no partition 'nobody'" in out
    status, out = await run("peek", "scores", "--task", "nobody")
    assert status == 1
    assert "there is no task 'nobody'" in out
    status = await asyncio.to_thread(cli.invoke, ["queue", "ls", "tcp://127.0.0.1:9", "--timeout", "0.3"])
    assert status == 1
