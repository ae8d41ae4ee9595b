from hypothesis import given
from hypothesis import strategies as st

from asyncflow.substrates.local.crew import Seat
from asyncflow.substrates.local.ending import stages

ROLES = ["driver", "controller", "storage", "trainer", "rollout", "reference", "reward", "critic"]


@given(seats=st.sets(st.builds(Seat, st.sampled_from(ROLES), st.integers(0, 3))), within_s=st.floats(0.1, 100))
def test_every_seat_is_in_one_stage_and_all_end_in_time(seats, within_s):
    found = stages(seats, within_s=within_s)
    assert sorted(seat for stage in found for seat in stage.seats) == sorted(seats)
    times = [stage.by_s for stage in found]
    assert times == sorted(set(times))
    assert all(0 < by_s <= within_s for by_s in times)


def test_those_on_whom_others_rely_end_last():
    order = [
        stage.seats[0].role for stage in stages(Seat(role, 0) for role in ["storage", "driver", "trainer", "rollout"])
    ]
    assert order == ["rollout", "trainer", "driver", "storage"]
