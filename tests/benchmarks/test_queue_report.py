"""The table of the queue's benchmark, from results as the benchmarks write them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "queue"))
from bars import OURS, SHARED
from report import against_raw, faults, own_cases


def control(peer, rows, p50):
    return {"bench": "control", "peer": peer, "rows": rows, "claim_ms": {"p50": p50}}


def claims(bench, rows, p50, *, keys=False):
    return {"bench": bench, "peer": "asyncflow", "keys": keys, "rows": rows, "claim_ms": {"p50": p50}}


def test_medians_become_ratios_beside_their_bars():
    ours = [control("adapter:AsyncFlow", 1000, p50) for p50 in (0.06, 9.0, 0.08)]
    keyed = [control("adapter:AsyncFlowKeys", 1000, 0.4)]
    table = against_raw([*ours, *keyed, control("rawzmq", 1000, 0.04), control("tq", 1000, 1.2)], OURS)
    assert table.rows[2] == ["claim of 16 rows of 1,000, p50", "≤ 2.5", "2.00", "**10.00**", "30.00", "0.04 ms"]
    assert (table.met, table.missed) == (1, ["claim of 16 rows of 1,000, p50 (keys): 10, the bar is 2.5"])
    assert len(table.rows) == 3


def test_own_cases_are_set_against_the_raw_claim_of_the_same_size():
    results = [
        control("rawzmq", 1000, 0.04),
        control("rawzmq", 100_000, 0.05),
        claims("groups", 1000, 0.08),
        claims("groups", 100_000, 0.1),
        claims("groups", 1000, 0.2, keys=True),
        control("adapter:AsyncFlow", 1000, 0.1),
        control("adapter:AsyncFlow", 100_000, 0.3),
    ]
    rows = {row[0]: row[2:] for row in own_cases(results).rows[2:]}
    assert rows["claim of two whole groups of 8 of 1,000 rows, p50, to a raw claim of 16"] == ["2.00", "**5.00**"]
    assert rows["whole groups: p50 at 100,000 rows to that at 1,000"] == ["1.25", "–"]
    assert rows["claim of 16 rows: p50 at 100,000 rows to that at 1,000"] == ["**3.00**", "–"]


def test_wrong_bytes_losses_and_doubles_are_faults():
    good = {"bench": "pipeline", "peer": "a", "lost": 0, "dup": 0}
    bad = [{**good, "lost": 1}, {**good, "dup": 2}, {"bench": "check", "peer": "a", "bytes_equal": False}]
    assert faults([good, {"bench": "check", "peer": "a", "bytes_equal": True}]) == []
    assert len(faults(bad)) == 3


def test_shared_memory_has_a_bar_of_its_own_where_bytes_move():
    def data(peer, moved, converted):
        figures = {"put_GBps": moved, "get_GBps": moved, "get_chunk16_GBps": moved}
        others = {"prepare_put_GBps": converted, "get_unpack_GBps": converted}
        return {"bench": "dataplane", "peer": peer, "rows": 256, "units": 1, "dense": 0, **figures, **others}

    results = [data("rawzmq", 1.0, 1.0), data(OURS["plain"], 0.9, 0.9), data(SHARED["shared memory"], 1.4, 1.2)]
    table = against_raw(results, {"plain": OURS["plain"], **SHARED})
    rows = {row[0]: row[1:5] for row in table.rows}
    assert rows["put, 256 rows, 1 unit"] == ["≥ 0.8 (keys ≥ 0.5, shared ≥ 1.5)", "0.90", "**1.40**", "–"]
    assert rows["get to samples, 256 rows, 1 unit"] == ["≥ 0.8 (keys ≥ 0.5)", "0.90", "1.20", "–"]
    assert len(table.missed) == 3
