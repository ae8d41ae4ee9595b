"""Which claims that were met have their rows sent ahead: of those of the unit that is being answered."""

import pytest

from asyncflow.identity import RowPlace, home
from asyncflow.queue.protocol.calls import Ahead
from asyncflow.queue.protocol.lot import Lot
from asyncflow.queue.protocol.runs import expand
from asyncflow.queue.protocol.unit_calls import FetchRows, SendAhead
from asyncflow.queue.table.ahead import SentAhead
from asyncflow.queue.table.claims import Claim, Grant

HOME = home(3, 1)


def grant(rows, *, ahead=True, units=()):
    """Give a claim that was met with ``rows``: (epoch, unit, counter)."""
    numbers = [RowPlace(*row).row for row in rows]
    lot = Lot(
        partition="p", purpose="open", lease="1", until=1.0, rows=numbers, serials=[0] * len(rows), units=list(units)
    )
    return Grant(Claim("p", "t", "w", "k", ahead=Ahead(5, 7, ["x", "y"]) if ahead else None), lot)


def test_rows_of_that_unit_are_sent_to_who_takes_them():
    ahead = SentAhead(HOME)
    assert ahead.take(grant([(3, 1, 8)]))
    many = grant([(3, 1, number) for number in range(100)])
    assert ahead.take(many)
    assert ahead.orders[0] == SendAhead(5, 7, FetchRows([RowPlace(3, 1, 8).row], ["x", "y"]))
    assert list(expand(ahead.orders[1].request.rows)) == many.lot.rows


@pytest.mark.parametrize(
    "met",
    [
        grant([(3, 1, 8)], ahead=False),
        grant([(3, 0, 8)]),
        grant([(2, 1, 8)]),
        grant([(3, 1, 8), (3, 0, 9)]),
        grant([(3, 1, 8), (2, 1, 9), (3, 1, 10)]),
        grant([(3, 1, 8)], units=[1]),
    ],
    ids=["who asks", "of another unit", "of its predecessor", "of two units", "of two epochs", "that moved"],
)
def test_other_rows_are_fetched(met):
    ahead = SentAhead(HOME)
    assert not ahead.take(met)
    assert ahead.orders == []
