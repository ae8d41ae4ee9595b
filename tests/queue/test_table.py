"""The pure table: readiness, claims, leases, fencing, windows of versions."""

import functools

import msgspec
import pytest

from asyncflow.errors import Fenced, Refused
from asyncflow.identity import RowPlace
from asyncflow.queue.protocol.calls import Begin, ClaimRows
from asyncflow.queue.protocol.messages import Samples, TaskSpec
from asyncflow.queue.protocol.unit_calls import Cells, NewRows
from asyncflow.queue.table.report import snapshot
from asyncflow.queue.table.rows import put, reset
from asyncflow.queue.table.snapshot import snapshot as records_of
from asyncflow.queue.table.state import RowState

P = "train"


def keys(rows):
    return [(row.meta.serial, row.meta.sample) for row in rows]


def test_a_row_is_ready_when_all_columns_are_there_and_for_each_task_once(queue):
    assert queue.create(0, 1) == [True] * 4
    rows = queue.claim("rollout", rows=2)
    assert keys(rows) == [(0, 0), (0, 1)]
    assert queue.claim("score") == []
    assert queue.complete(rows[:1], "response") == [True]
    assert keys(queue.claim("score")) == [(0, 0)]
    assert queue.claim("score") == []
    assert keys(queue.claim("rollout")) == [(1, 0), (1, 1)]


def test_creation_is_idempotent_and_whole(queue):
    assert queue.create(0) == [True, True]
    assert queue.create(0) == [False, False]
    half = NewRows(P, b"a client", 0, 2, [1 << 44], queue.cells(1, "prompt"), [], Samples(serials=[5], step=1))
    with pytest.raises(Refused, match="1 rows do not make 1 groups of 2"):
        put(queue.table.state, half)
    assert queue.table.state.partitions[P].used.next() == 1


def test_an_attempt_that_was_taken_over_from_changes_nothing(queue):
    queue.creator = 1
    queue.create(0)
    queue.table.take_over(P, 2)
    queue.table.take_over(P, 2)
    for change in (lambda: queue.create(1), lambda: queue.table.clear(P, 1), lambda: queue.table.take_over(P, 1)):
        before = list(queue.events())
        with pytest.raises(Fenced, match="creator attempt 1 is over, 2 has started"):
            change()
        assert queue.events() == before
    queue.creator = 2
    assert queue.create(1, step=2) == [True, True]
    queue.creator = 3
    assert queue.create(2) == [True, True]


@pytest.mark.parametrize("meanwhile", ["restart", "compaction", "clearing"])
def test_a_take_over_lasts(queue, meanwhile):
    queue.table.take_over(P, 2)
    queue.creator = 2
    queue.create(0)
    if meanwhile == "clearing":
        queue.table.clear(P, 2)
    if meanwhile == "compaction":
        queue.events()
        queue.log[:] = records_of(queue.table.state)
    queue.restart()
    queue.creator = 1
    with pytest.raises(Fenced):
        queue.create(1)


def test_serials_that_were_skipped_are_known(queue):
    queue.create(0, 3)
    assert snapshot(queue.table.state.partitions[P]).missing == [1, 2]
    queue.create(2)
    finished = queue.claim("rollout", rows=2)
    queue.table.claims.drop(finished[0].lease, [row.row for row in finished], "why")
    assert snapshot(queue.table.state.partitions[P]).missing == [1]


def test_serials_that_are_left_out_with_a_put_are_skipped_for_ever(queue):
    queue.create(0, 3, skipped=[1, 5])
    queue.create(0, 3, skipped=[1, 5])
    for restart in (queue.restart, lambda: queue.log.__setitem__(slice(None), records_of(queue.table.state))):
        queue.events()
        restart()
        queue.restart()
        found = snapshot(queue.table.state.partitions[P])
        assert (found.next_serial, found.missing, found.skipped) == (6, [2, 4], 2)
    assert queue.create(1, skipped=[0, -1, 1 << 62]) == [False, False]
    assert snapshot(queue.table.state.partitions[P]).skipped == 2, "no serial that has rows, and none that is far"
    with pytest.raises(Refused, match="were put and skipped"):
        queue.create(7, skipped=[7])


def test_huge_numbers_of_a_caller_take_neither_memory_nor_time(queue):
    far = 1 << 62
    assert queue.create(far, purpose="eval", partition="eval") == [True, True]
    assert snapshot(queue.table.state.partitions["eval"]).missing == []
    cells = queue.cells(1, "prompt")
    with pytest.raises(Refused, match="do not make 1 groups"):
        put(queue.table.state, NewRows(P, b"a client", 0, far, [1 << 44], cells, [], Samples(serials=[0], step=1)))
    assert queue.create(far) == [False, False]
    with pytest.raises(Refused, match="never all in slots"):
        queue.table.training.begin(P, 0, far, 1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(Begin(P, 0, 0, far)), type=Begin)


def test_groups_are_whole_also_when_a_part_of_one_is_delivered_again(queue):
    queue.create(0, size=3)
    rows = queue.claim("rollout")
    queue.complete(rows[:2], "response")
    assert queue.claim("rollout") == []
    assert queue.table.claims.expire(10.0) == 1
    again = queue.claim("rollout")
    assert keys(again) == [(0, 2)]
    assert again[0].attempt == 1
    scored = queue.claim("score")
    queue.complete(scored, "reward")
    assert queue.claim("advantage") == []
    queue.complete(again, "response")
    queue.complete(queue.claim("score"), "reward")
    assert len(queue.claim("advantage")) == 3


def test_a_group_task_gives_at_least_one_group_and_no_more_than_asked(queue):
    queue.create(0, 1, 2, size=3)
    assert len(queue.claim("rollout", rows=2)) == 3
    assert len(queue.claim("rollout", rows=6, groups=1)) == 3
    assert len(queue.claim("rollout", rows=6)) == 3


def test_expired_and_returned_rows_are_fenced(queue):
    queue.create(0)
    late = queue.claim("rollout")
    queue.table.claims.expire(9.9)
    assert queue.claim("rollout") == []
    queue.table.claims.expire(10.0)
    new = queue.claim("rollout", worker="other")
    assert queue.complete(late, "response") == [False, False]
    assert queue.table.claims.fenced == 2
    assert queue.complete(new, "response") == [True, True]
    assert queue.table.claims.fenced == 2
    assert queue.table.claims.redeliveries == 2


def test_a_completion_that_comes_twice_is_admitted_twice_and_changes_nothing(queue):
    queue.create(0)
    rows = queue.claim("rollout")
    assert queue.complete(rows, "response", [{"reward": 1.0}] * 2) == [True, True]
    assert queue.complete(rows, "response", [{"reward": 2.0}] * 2) == [True, True]
    assert [row.meta.tags for row in queue.claim("score")] == [{"reward": 1.0}] * 2


def test_renewal_and_death(queue):
    queue.create(0, 1)
    rows = queue.claim("rollout", rows=2)
    assert queue.table.claims.renew([rows[0].lease, "nonsense"], 8.0) == [rows[0].lease]
    assert queue.table.claims.expire(17.9) == 0
    waiting = queue.park("score", worker="dead")
    other = queue.claim("rollout", worker="dead")
    queue.table.claims.expire_worker("dead")
    assert queue.complete(other, "response") == [False, False]
    assert (P, "score") not in queue.table.claims.parked()
    assert waiting not in queue.table.claims._parked.get((P, "score"), {})
    assert (queue.table.claims.expiries, queue.table.claims.timeouts) == (1, 0)
    assert queue.table.claims.expire(18.0) == 2
    assert (queue.table.claims.expiries, queue.table.claims.timeouts) == (2, 1)


def test_what_was_given_back_unfinished_goes_to_the_next_holder_and_makes_nothing_ready(queue):
    queue.create(0)
    rows = queue.claim("rollout")
    ids = [row.row for row in rows]
    assert queue.table.give_back(rows[0].lease, ids, "drain", queue.cells(2, "response")) == [True, True]
    assert queue.claim("score") == []
    again = queue.claim("rollout")
    assert [row.bytes for row in again] == [{"prompt": 8, "response": 8}] * 2
    assert [row.attempt for row in again] == [1, 1]
    assert queue.complete(again, "response") == [True, True]
    assert len(queue.claim("score")) == 2


def test_what_a_holder_saves_stays_with_it_until_its_lease_ends_and_goes_to_the_next(queue):
    queue.create(0)
    rows = queue.claim("rollout")
    ids = [row.row for row in rows]
    save = functools.partial(queue.table.give_back, rows[0].lease, ids, None, queue.cells(2, "response"))
    before = len(queue.table.state.outbox)
    assert save() == save() == [True, True]
    assert len(queue.table.state.outbox) == before, "the ledger has nothing of it"
    assert queue.claim("rollout") == queue.claim("score") == []
    queue.table.claims.expire(1e9)
    again = queue.claim("rollout")
    assert [(row.attempt, row.bytes) for row in again] == [(1, {"prompt": 8, "response": 8})] * 2
    assert save() == [False, False], "it comes too late"
    assert queue.complete(again, "response") == [True, True]
    assert len(queue.claim("score")) == 2


def test_a_claim_gets_only_rows_that_its_versions_may_begin(queue):
    queue.create(0, oldest=2, newest=2)
    queue.create(1, oldest=1, newest=1)
    assert queue.claim("rollout", version=0) == []
    assert keys(queue.claim("rollout", version=1, accept=(2,)))[0] == (1, 0)
    assert queue.table.claims.grant(ClaimRows(P, "rollout", "w", "now", 100, version=1), 0.0) == []
    loading = ClaimRows(P, "rollout", "w", "now", 100, version=1, accept=[2])
    assert keys(queue.table.claims.grant(loading, 0.0))[0] == (0, 0)


def test_claims_that_fit_are_served_before_those_that_would_have_to_load(queue):
    loads = queue.park("rollout", version=1, accept=(2,))
    fits = queue.park("rollout", version=2)
    queue.create(0, oldest=2, newest=2)
    assert [claim for claim, _ in queue.table.claims.serve(0.0)] == [fits]
    queue.create(1, oldest=2, newest=2)
    assert [claim for claim, _ in queue.table.claims.serve(0.0)] == [loads]


def test_a_claim_that_is_asked_again_gets_its_lease_again(queue):
    queue.create(0, 1)
    first = queue.claim("rollout", rows=2, ticket="t")
    again = queue.claim("rollout", rows=2, ticket="t", now=3.0)
    assert keys(again) == keys(first)
    assert again[0].lease == first[0].lease
    assert again[0].until == 7.0
    queue.complete(first, "response")
    assert keys(queue.claim("rollout", rows=2, ticket="t")) == [(1, 0), (1, 1)]


def test_a_claim_that_is_asked_again_after_a_restart_waits_for_what_its_rows_are(queue):
    queue.create(0)
    first = queue.claim("rollout", ticket="t")
    queue.restart(told=False)
    assert queue.claim("rollout", ticket="t") == []
    queue.tell()
    assert queue.claim("rollout", ticket="t") == first


def test_a_lease_has_a_name_that_none_had_before_a_restart(queue):
    queue.create(0, 1)
    (old, *_) = queue.claim("rollout", rows=2)
    queue.restart()
    (new, *_) = queue.claim("rollout", rows=2)
    assert new.lease != old.lease


def test_what_waits_for_a_task_that_is_then_declared_as_that_of_a_gang_gets_no_rows(make_queue, tasks):
    queue = make_queue(tasks[:-1])
    queue.park("train")
    queue.table.declare(tasks)
    queue.create(0)
    queue.through()
    assert queue.table.claims.serve(0.0) == []
    with pytest.raises(Refused, match="is the task of a gang"):
        queue.park("train")


def test_an_abandoned_claim_loses_nothing(queue):
    queue.create(0)
    queue.claim("rollout", worker="w", ticket="t")
    queue.table.claims.abandon("w", "t")
    assert len(queue.claim("rollout")) == 2


def test_dropped_rows_are_final_and_leave_the_group(queue):
    queue.create(0, size=3)
    queue.through(upto="score")
    rows = queue.claim("advantage")
    assert queue.table.claims.drop(rows[0].lease, [rows[0].row], "filtered:zero") == [True]
    assert queue.table.claims.drop(rows[1].lease, [rows[1].row], "broken") == [True]
    assert queue.table.claims.drop(rows[1].lease, [rows[1].row], "broken") == [False]
    assert queue.counts == {RowState.LIVE: 1, RowState.FILTERED: 1, RowState.DROPPED: 1}
    assert [row.row for row in queue.table.state.to_free] == [rows[0].row, rows[1].row]
    assert queue.create(0, size=3) == [False] * 3


def test_a_column_has_one_dtype_and_a_task_all_its_columns(queue):
    queue.create(0, 1)
    rows = queue.claim("rollout", rows=2)
    with pytest.raises(Refused, match="response"):
        queue.complete(rows, "other")
    assert queue.complete(rows, "response") == [True, True]
    more = queue.claim("rollout")
    wrong = queue.cells(2, "response", dtype="float32")
    with pytest.raises(Refused, match="int32, not float32"):
        queue.table.complete(more[0].lease, [row.row for row in more], wrong, [])
    assert queue.complete(more, "response") == [True, True]


def test_a_new_incarnation_of_a_unit_makes_its_rows_wanted(queue):
    queue.create(0, 1)
    before = queue.claim("rollout", rows=2)
    known = queue.table.wanted(P).revision
    assert queue.table.join_unit(0, "unit-a") == queue.epoch
    queue.epoch = queue.table.join_unit(0, "unit-b")
    wanted = queue.table.wanted(P)
    assert wanted.revision != known
    assert [tuple(meta.key) for meta in wanted.keys] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert queue.complete(before, "response") == [False, False]
    assert queue.claim("rollout") == []
    assert queue.create(1, step=2) == [False] * 2
    assert queue.create(0, 1) == [True] * 4
    assert queue.table.wanted(P).keys == []
    assert len(queue.claim("rollout")) == 4


def test_rows_of_a_step_are_lost_with_their_group_and_open_ones_alone(queue):
    queue.create(0, 1)
    first, *_ = queue.table.state.rows
    assert queue.table.lose_rows([first, first, 1 << 60]) == 2
    assert [tuple(meta.key) for meta in queue.table.wanted(P).keys] == [(0, 0), (0, 1)]
    assert [row.sample for row in queue.table.state.to_free] == [1], "the bytes of the other are gone"
    cells = Cells(dtypes={"x": "int64"}, sizes={"x": [8, 8]})
    numbers = [RowPlace(queue.epoch, 0, 100 + index).row for index in range(2)]
    put(queue.table.state, NewRows("open", b"a client", 0, 2, numbers, cells, []))
    assert queue.table.lose_rows(numbers[:1]) == 1
    assert numbers[1] in queue.table.state.rows


def test_rows_of_a_job_are_not_cleared_one_by_one(queue):
    queue.create(0)
    rows = list(queue.table.state.rows)
    with pytest.raises(Refused, match="is for train, not open"):
        queue.table.clear_rows(P, rows)
    assert list(queue.table.state.rows) == rows


def test_two_gangs_cannot_train_one_partition(queue):
    with pytest.raises(Refused, match="has the gang train"):
        queue.table.declare([TaskSpec(partition=P, name="critic", needs=["advantage"], kind="gang")])


def test_clearing_a_partition_keeps_its_tasks_and_releases_its_rows(queue):
    queue.create(0)
    rows = queue.claim("rollout")
    known = queue.table.wanted(P).revision
    queue.table.clear(P)
    assert queue.table.wanted(P).revision > known
    assert sorted(row.row for row in queue.table.state.to_free) == sorted(row.row for row in rows)
    assert queue.complete(rows, "response") == [False, False]
    assert queue.create(0) == [True, True]
    assert len(queue.claim("rollout")) == 2


def test_a_reset_of_all_tasks_passes_over_that_of_a_gang_which_cannot_be_reset(queue):
    queue.create(0)
    queue.through(upto="score")
    partition = queue.table.state.partition(P)
    assert reset(queue.table.state, partition, None) == 4
    before = len(queue.events())
    assert reset(queue.table.state, partition, None) == 0
    with pytest.raises(Refused, match="the task of a gang is not reset"):
        reset(queue.table.state, partition, "train")
    assert len(queue.events()) == before
    assert [row.attempt for row in queue.claim("rollout")] == [1, 1]


def test_a_claim_does_not_look_at_all_rows(make_queue):
    queue = make_queue([TaskSpec(partition=P, name="rollout", needs=["prompt"])])
    queue.create(*range(20_000), size=1)
    index = queue.table.state.partitions[P].queues["rollout"].index
    looked = []

    class Places(dict):
        def get(self, item):
            looked.append(item)
            return super().get(item)

    index._places = Places(index._places)
    assert len(queue.claim("rollout", rows=16)) == 16
    assert 16 <= len(looked) < 64


def test_a_task_of_a_job_writes_no_column_of_another(queue):
    queue.create(0)
    rows = queue.claim("rollout")
    cells, numbers = queue.cells(len(rows), "response", "reward"), [row.row for row in rows]
    for outcome in (
        lambda: queue.table.complete(rows[0].lease, numbers, cells, None),
        lambda: queue.table.give_back(rows[0].lease, numbers, "it leaves", cells),
        lambda: queue.table.give_back(rows[0].lease, numbers, None, cells),
    ):
        with pytest.raises(Refused, match=r"may not write \['reward'\]: "):
            outcome()
    assert queue.complete(rows, "response") == [True, True]
