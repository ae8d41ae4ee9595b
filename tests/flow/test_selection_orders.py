"""Which rows come first, by the names of selections."""

import heapq
import random

import pytest

from asyncflow.flow.selection import ReadyItem, selection_of

ROWS = [
    ReadyItem(step=step, serial=serial, sample=sample, version=version, tokens=tokens)
    for step, serial, sample, version, tokens in ((2, 4, 0, 0, 9), (1, 3, 1, 1, 5), (1, 3, 0, 2, 7), (2, 5, 0, 0, 20))
]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("fifo", [5, 7, 9, 20]), ("key", [7, 5, 9, 20]), ("oldest", [9, 20, 5, 7]), ("longest", [7, 5, 20, 9])],
)
def test_selections_of_the_project(name: str, tokens: list[int]) -> None:
    rank = selection_of(name, where="here").rank
    assert [row.tokens for row in sorted(ROWS, key=rank)] == tokens


def test_replicas_that_take_the_longest_first_end_at_about_the_same_time() -> None:
    """List scheduling by longest processing time: at most 4/3 - 1/(3m) of the best (Graham, 1969)."""
    dice, replicas = random.Random(4), 4
    worst = {"fifo": 0.0, "longest": 0.0}
    for _ in range(50):
        rows = [ReadyItem(1, n, 0, 0, min(512, int(dice.lognormvariate(4, 1)) + 1)) for n in range(24)]
        best = max(sum(row.tokens for row in rows) / replicas, max(row.tokens for row in rows))
        for name in worst:
            loads = [0] * replicas
            for row in sorted(rows, key=selection_of(name, where="here").rank):
                heapq.heapreplace(loads, loads[0] + row.tokens)
            worst[name] = max(worst[name], max(loads) / best)
    assert worst["longest"] <= 4 / 3 - 1 / (3 * replicas) < worst["fifo"]
