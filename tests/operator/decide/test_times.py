"""Times."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from asyncflow_operator.decide.times import Alarm, from_rfc3339, to_rfc3339


@given(st.floats(0, 4_000_000_000))
def test_a_time_is_read_back_less_than_a_second_early(at: float) -> None:
    back = from_rfc3339(to_rfc3339(at))
    assert back is not None
    assert 0 <= at - back < 1


@pytest.mark.parametrize("text", [None, "", "soon", "2026-13-01T00:00:00Z"])
def test_a_text_that_is_no_time_is_none(text: str | None) -> None:
    assert from_rfc3339(text) is None


def test_an_alarm_keeps_the_earliest_and_never_rings_at_once() -> None:
    alarm = Alarm(100.0)
    assert alarm.again_in_s is None
    assert not alarm.until(100.0)
    assert alarm.until(None)
    assert alarm.again_in_s is None
    assert alarm.until(150.0)
    assert alarm.until(120.0)
    assert alarm.again_in_s == 20.0
    assert alarm.until(100.001)
    assert alarm.again_in_s == 0.1
