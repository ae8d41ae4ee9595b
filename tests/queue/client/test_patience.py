"""How long a part of a put stays with one unit."""

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.queue.client.patience import patience

seconds = st.floats(0.001, 1e5)
sizes = st.integers(0, 1 << 30)


@given(seconds, sizes, st.booleans())
def test_the_caller_outlasts_the_unit_and_neither_the_deadline(left_s, nbytes, others):
    given_to_it = patience(left_s, nbytes=nbytes, others=others)
    assert 0 < given_to_it.room_s < given_to_it.answer_s <= left_s


@given(seconds, sizes)
def test_others_make_it_shorter_and_bytes_longer(left_s, nbytes):
    alone, among = (patience(left_s, nbytes=nbytes, others=others) for others in (False, True))
    assert among.answer_s <= alone.answer_s
    assert patience(left_s, nbytes=2 * nbytes, others=True).answer_s >= among.answer_s


def test_a_small_part_leaves_a_unit_that_does_not_answer_long_before_the_deadline():
    assert patience(60.0, nbytes=1000, others=True).answer_s < 5
