"""A batch that is too much for one call goes in several: whole, in order, and none of them too much."""

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.rpc.columns import batches, weighed_batches

things = st.lists(st.integers(0, 9), max_size=30)


@given(things, st.integers(1, 8))
def test_batches_hold_everything_in_order_and_are_full_but_for_the_last(given_things, most):
    made = list(batches(iter(given_things), most))
    assert list(chain(*made)) == given_things
    assert all(len(batch) == most for batch in made[:-1])
    assert all(0 < len(batch) <= most for batch in made)


@given(things, st.integers(0, 12), st.none() | st.integers(1, 8))
def test_weighed_batches_are_as_few_as_their_order_allows_and_none_is_too_heavy(given_things, heaviest, most):
    made = list(weighed_batches(given_things, int, heaviest=heaviest, most=most))
    assert list(chain(*made)) == given_things
    for batch in made:
        assert len(batch) == 1 or sum(batch) <= heaviest
        assert 0 < len(batch) <= (most or len(batch))
    for batch, after in pairwise(made):
        assert len(batch) == most or sum(batch) + after[0] > heaviest
