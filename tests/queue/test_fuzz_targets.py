"""The targets of ``make fuzz``, without atheris: each takes what it is given to begin with, and parts of it."""

import pytest

import fuzz

SEEDS = [(target, number) for target, seeds in fuzz.seeds().items() for number in range(len(seeds))]


def test_every_target_has_something_to_begin_with():
    assert fuzz.seeds().keys() == fuzz.TARGETS.keys()
    assert all(fuzz.seeds().values())


@pytest.mark.parametrize(("target", "number"), SEEDS)
def test_a_target_takes_what_it_begins_with(target, number):
    seed = fuzz.seeds()[target][number]
    for data in (seed, seed[: len(seed) // 2], seed + b"\xff", bytes(reversed(seed)), b""):
        fuzz.TARGETS[target](data)
