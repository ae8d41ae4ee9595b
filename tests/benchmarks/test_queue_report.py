"""The tables of the queue's benchmark, from results as its cases write them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "queue"))
import report


def claim(implementation, rows, p50, kind="plain"):
    return {"case": "claim", "kind": kind, "implementation": implementation, "rows": rows, "claim_ms": {"p50": p50}}


def test_medians_become_ratios_beside_their_bars():
    plain = [claim("plain", 1000, p50) for p50 in (0.06, 9.0, 0.08)]
    others = [claim("secured", 1000, 0.4), claim("raw sockets", 1000, 0.04), claim("TransferQueue", 1000, 1.2)]
    table = report.ratios([*plain, *others])
    assert table.rows[0] == ["ratio to raw sockets (figure)", "bar", "plain", "secured", "TransferQueue", "raw sockets"]
    assert table.rows[2] == [
        "claim of 16 rows of 1,000, p50",
        "≤ 3",
        "2.00 (0.08)",
        "**10.00** (0.4)",
        "30.00 (1.2)",
        "0.04 ms",
    ]
    assert (table.met, table.missed) == (1, ["claim of 16 rows of 1,000, p50 (secured): 10, the bar is 3"])
    assert len(table.rows) == 3


def test_groups_are_set_against_the_raw_claim_of_as_many_rows():
    results = [
        *(claim("raw sockets", rows, 0.04) for rows in (1000, 100_000)),
        *(claim("plain", rows, p50, "groups") for rows, p50 in ((1000, 0.08), (100_000, 0.1))),
        claim("secured", 1000, 0.2, "groups"),
        *(claim("plain", rows, p50) for rows, p50 in ((1000, 0.1), (100_000, 0.3))),
    ]
    rows = {row[0]: row[2:] for row in report.own(results).rows[2:]}
    assert rows["claim of two whole groups of 8 of 1,000 rows, p50, to a raw claim of 16"] == ["2.00", "5.00"]
    assert rows["claim of two whole groups of 8: p50 at 100,000 rows to that at 1,000"] == ["1.25", "–"]
    assert rows["claim of 16 rows: p50 at 100,000 rows to that at 1,000"] == ["**3.00**", "–"]


def test_wrong_bytes_losses_and_doubles_are_faults():
    good = {"case": "pipeline", "implementation": "plain", "lost": 0, "doubled": 0}
    bad = [{**good, "lost": 1}, {**good, "doubled": 2}, {**good, "bytes_equal": False}]
    assert report.faults([good, {**good, "bytes_equal": True}]) == []
    assert len(report.faults(bad)) == 3


def test_shared_memory_has_a_bar_of_its_own_where_bytes_move():
    def data(implementation, moved, converted):
        rates = {"put": moved, "get all": moved, "put from samples": converted}
        case = {"case": "data", "rows": 256, "units": 1, "length": None}
        return {**case, "implementation": implementation, "GBps": rates}

    one_of_each = [data("raw sockets", 1.0, 1.0), data("plain", 0.9, 0.7), data("shared memory", 1.4, 1.2)]
    table = report.ratios(
        [{**result, "GBps": {**result["GBps"], "get in 16s": 1, "get to samples": 1}} for result in one_of_each]
    )
    rows = {row[0]: row[1:4] for row in table.rows}
    assert rows["put, 256 rows, 1 unit"] == [
        "≥ 0.8 (secured ≥ 0.45, shared memory ≥ 1.5)",
        "0.90 (0.9)",
        "**1.40** (1.4)",
    ]
    assert rows["put from samples, 256 rows, 1 unit"] == ["≥ 0.8 (secured ≥ 0.45)", "**0.70** (0.7)", "1.20 (1.2)"]


def test_a_million_rows_show_whether_memory_grows_after_half_of_them():
    held = [{"controller": mb, "unit0": 60} for mb in (50, 60, 60, 60, 60, 60, 60, 60, 60, 90)]
    result = {"case": "million", "implementation": "plain", "rows_per_s": 1, "last_to_second": 1.0, "resident_MB": held}
    rows = {row[0]: row[2:] for row in report.own([result]).rows}
    assert rows["a million rows: memory of the controller at the end to half-way"] == ["1.50"]
    assert rows["a million rows: memory of the unit at the end to half-way"] == ["1.00"]
