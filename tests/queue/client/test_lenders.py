"""When a unit is asked for whole parcels."""

import numpy as np
import pytest

from asyncflow.net.frames import LARGE, Jagged
from asyncflow.queue.client import lenders
from asyncflow.queue.client.lenders import Lenders


@pytest.fixture
def lent(monkeypatch):
    """Give a switch: whether what comes is lent."""
    switch = [True]
    monkeypatch.setattr(lenders, "mark_of", lambda _: object() if switch[0] else None)
    return switch


def column(nbytes):
    return {"x": Jagged.from_rows([np.zeros(nbytes // 8, np.int64)], "int64")}


def test_a_unit_is_asked_once_it_has_lent_and_no_more_when_it_copied_a_parcel(lent):
    known = Lenders()
    assert 3 not in known
    assert known.heard(3, column(LARGE), whole=False)
    assert 3 in known
    assert 4 not in known
    lent[0] = False
    assert not known.heard(3, column(LARGE), whole=True)
    lent[0] = True
    for _ in range(lenders._PAUSE):
        assert 3 not in known
        known.heard(3, column(LARGE), whole=False)
    assert 3 in known


def test_small_columns_say_nothing(lent):
    known = Lenders()
    assert not known.heard(3, column(64), whole=False)
    assert 3 not in known
    known.heard(3, column(LARGE), whole=False)
    lent[0] = False
    known.heard(3, column(64), whole=False)
    assert 3 in known
