"""The life of a sample, out of the events of ledgers."""

from __future__ import annotations

from asyncflow.driver.groups import FILTERED_ZERO_VARIANCE
from asyncflow.identity import NEWEST, RowPlace, SampleKey
from asyncflow.queue.ledger import events as ev
from asyncflow.replay.life import SampleHistory, life_of

TRAIN = "train"
ROWS = [RowPlace(1, 0, counter).row for counter in range(4)]
AGAIN = [RowPlace(2, 1, counter).row for counter in range(4)]
KEY = SampleKey(8, 1)
"""The last of two groups of two."""


def put(rows: list[int] = ROWS) -> ev.RowsPut:
    return ev.RowsPut(TRAIN, "train", [7, 8], 2, rows, step=3, oldest=1, newest=NEWEST)


def leased(lease: int, task: str, worker: str) -> ev.Leased:
    return ev.Leased(lease, TRAIN, task, worker, f"ticket-{lease}", ROWS[2:])


def slot(step: int, number: int) -> ev.SlotDecided:
    return ev.SlotDecided(TRAIN, step, number, [8], [[], ROWS[2:]], True, 1, 2, 8)


def told(*events: ev.Event) -> SampleHistory:
    return life_of([events], KEY, partition=TRAIN)


def words(life: SampleHistory) -> list[str]:
    return [entry.what for entry in life.entries]


def test_a_sample_is_followed_from_its_prompt_to_its_checkpoint() -> None:
    life = told(
        *(ev.Dated(100.0), put(), ev.Dated(101.0), leased(1, "rollout", "rollout-0")),
        *(ev.Dated(105.0), ev.Returned(1, ROWS[2:], "expired"), leased(2, "rollout", "rollout-1")),
        *(ev.Dated(108.0), ev.Completed(2, ROWS[2:]), slot(3, 4), ev.Committed(TRAIN, 5)),
    )
    assert words(life) == [
        "put for step 3, to be made by θ1 or newer",
        "task rollout: leased by rollout-0, given back: expired",
        "task rollout: leased for the 2nd time by rollout-1, done",
        "taken into slot 4 of step 3, by rank 1",
        "trained for ever: the checkpoint of step 5 holds step 3",
    ]
    assert [(entry.at, entry.until) for entry in life.entries[:3]] == [(100, None), (101, 105), (105, 108)]
    assert (life.outcome, life.step) == ("trained", 3)


def test_a_lease_that_goes_on_is_open() -> None:
    life = told(put(), leased(1, "rollout", "rollout-0"), ev.Completed(1, ROWS[:2]))
    assert [entry.open for entry in life.entries] == [False, True]
    assert life.outcome == ""


def test_other_samples_and_partitions_are_left_out() -> None:
    life = told(
        *(put(), ev.Leased(1, TRAIN, "rollout", "rollout-0", "t", ROWS[:2]), ev.Completed(1, ROWS[:2])),
        ev.RowsPut("eval", "eval", [8], 2, AGAIN[:2]),
        *(ev.SlotDecided("eval", 3, 0, [8], [AGAIN[:2]], True, 1, 2, 8), ev.Committed(TRAIN, 3)),
    )
    assert len(life.entries) == 1
    assert life.outcome == ""
    assert not told(put()).outcome
    assert not life_of([[put()]], SampleKey(9, 0), partition=TRAIN).entries


def test_a_step_that_a_trainer_begins_before_is_undone_and_made_again() -> None:
    life = told(put(), slot(3, 0), ev.Began(TRAIN, 1, 2, 1), slot(3, 1), ev.Began(TRAIN, 2, 3, 1))
    assert words(life)[2:] == [
        "step 3 is undone: attempt 1 of the trainer began with θ2",
        "taken into slot 1 of step 3, by rank 1",
        "trained for ever: the checkpoint of step 3 holds step 3",
    ]


def test_what_is_filtered_stays_filtered() -> None:
    life = told(put(), ev.RowsDropped(TRAIN, ROWS[2:], "filtered:zero-variance"), ev.Began(TRAIN, 1, 0, 1))
    assert words(life)[1:] == ["filtered: zero-variance"]
    assert life.outcome == "filtered"


def test_why_a_sample_was_dropped_is_told_whole() -> None:
    for reason, said in (
        (FILTERED_ZERO_VARIANCE, "filtered: zero variance"),
        ("reward measure: timeout", "dropped: reward measure: timeout"),
    ):
        assert words(told(put(), ev.RowsDropped(TRAIN, ROWS[2:], reason)))[1:] == [said]


def test_bytes_that_were_lost_are_put_again() -> None:
    life = told(put(), ev.UnitLost(1, 0), put(AGAIN), ev.UnitLost(1, 0))
    assert words(life)[1:] == [
        "storage unit 0 was lost, and its bytes with it",
        "put again, because its bytes were lost, for step 3, to be made by θ1 or newer",
    ]


def test_a_late_group_gives_its_place_to_an_early_one() -> None:
    assert words(told(put(), ev.Exchanged(TRAIN, (7, 8))))[1:] == [
        "was late, and gave its place to prompt 7 in another step"
    ]


def test_a_compaction_leaves_the_outcome() -> None:
    over = ev.GroupRecord(8, 3, 1, 1, "tf", [])
    life = told(ev.SnapshotGroups(TRAIN, [over]))
    assert (life.outcome, life.step) == ("filtered", 3)
    row = ev.RowRecord(ROWS[3], 0, False, 0, [("rollout", 0, 5, "rollout-1")])
    life = told(ev.SnapshotGroups(TRAIN, [ev.GroupRecord(8, 3, 1, 1, "", [row, row])]), slot(3, 0))
    assert words(life)[0] == "there for step 3 when the ledger was compacted; done: rollout by rollout-1"
    assert len(life.entries) == 2


def test_of_other_controllers_their_own_tasks_are_told() -> None:
    first = [ev.Dated(1.0), put(), ev.Dated(9.0), slot(3, 0)]
    second = [ev.Dated(1.0), put(), ev.Dated(4.0), leased(1, "grade", "task-grade-0"), ev.Completed(1, ROWS[2:])]
    life = life_of([first, second], KEY, partition=TRAIN)
    assert [entry.at for entry in life.entries] == [1, 4, 9]
    assert words(life)[1] == "task grade: leased by task-grade-0, done"
