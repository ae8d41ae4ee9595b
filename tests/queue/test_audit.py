"""The audit must be able to find fault: sound ledgers pass, tampered ones do not."""

import msgspec
import pytest
from count_work import bytecodes

from asyncflow.identity import RowPlace
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.audit import Auditor, audit_ledger
from asyncflow.queue.ledger.log import pack
from asyncflow.queue.protocol.calls import AskSlot
from asyncflow.queue.table.snapshot import snapshot as records_of

P = "train"


@pytest.fixture
def events(queue):
    """Two steps of two groups, trained, with one sample filtered and one dropped, and committed."""
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    for step in (1, 2):
        training.open_step(P, step, 2, 2)
        queue.create(2 * step - 2, 2 * step - 1, step=step)
        queue.through(upto="score")
        rows = queue.claim("advantage")
        reason = "filtered:x" if step == 1 else "reward crashed"
        queue.table.claims.drop(rows[0].lease, [rows[0].row], reason)
        queue.complete(rows[1:], "advantage")
        training.slot(AskSlot(P, attempt=0, step=step, slot=0, rank=0, tokens=100, wait_s=0))
        training.step_done(P, 0, step, 0)
        training.commit(P, 0, step)
    queue.table.close(P, 2)
    return list(queue.events())


def audit(events):
    auditor = Auditor()
    for event in events:
        auditor.see(event)
    return auditor.report()


def without(events, kind, number=0):
    place = [index for index, event in enumerate(events) if isinstance(event, kind)][number]
    return [event for index, event in enumerate(events) if index != place]


def replaced(events, old, **changes):
    fields = {name: getattr(old, name) for name in old.__struct_fields__} | changes
    return [type(old)(**fields) if event is old else event for event in events]


def test_a_sound_ledger(events, tmp_path):
    (tmp_path / "000000000001.wal").write_bytes(b"".join(map(pack, events)))
    report = audit_ledger(tmp_path)
    assert report.ok
    assert report.closed
    assert (report.dispatched, report.trained, report.filtered, report.dropped) == (8, 6, 1, 1)
    assert (report.unfinished, report.lost, report.duplicated, report.last_committed_step) == (0, 0, 0, 2)


def test_samples_that_ended_before_a_compaction_cost_no_work_of_their_own():
    """A run of 1,000 steps of 512 prompts has eight million of them, and the driver waits a minute for its audit."""

    def work(size):
        groups = [ev.GroupRecord(serial, 1, 0, 0, "t" * (size - 1) + "f", []) for serial in range(50)]
        auditor = Auditor()

        def read():
            auditor.see(ev.SnapshotGroups(P, groups))
            report = auditor.report()
            assert (report.dispatched, report.trained, report.filtered) == (50 * size, 50 * size - 50, 50)

        counted = bytecodes(read)
        assert set(auditor.trained(P)) == {(serial, sample) for serial in range(50) for sample in range(size - 1)}
        return counted

    assert work(64) < 1.1 * work(2)


def test_an_audit_follows_groups_that_change_their_steps(queue):
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    for step in (1, 2):
        training.open_step(P, step, 1, 2)
        queue.create(step, step=step)
    training.exchange(P, 2, 1, 1)
    queue.through()
    training.slot(AskSlot(P, attempt=0, step=1, slot=0, rank=0, tokens=100, wait_s=0))
    training.step_done(P, 0, 1, 0)
    training.commit(P, 0, 1)
    events = list(queue.events())
    queue.table.close(P, 1)
    closed = list(queue.events())
    assert audit(closed).trained == 2
    assert audit(closed).problems == ["prompt 0 lacks 2 of 2 samples"], "that serial was never put"
    assert "sample (1, 0) of step 1 was never finished" in audit(without(closed, ev.Exchanged)).problems
    assert audit(events).unfinished == 2


@pytest.mark.parametrize("wrong", ["one step", "a version", "a slot", "the end", "nobody"])
def test_an_exchange_of_groups_that_may_not_change_their_steps_is_a_problem(queue, wrong):
    training = queue.table.training
    training.begin(P, 0, 0, 1)
    for step in (1, 2):
        training.open_step(P, step, 1, 2)
        queue.create(step, step=step)
    queue.create(3, step=2)
    queue.through()
    if wrong in ("a slot", "the end"):
        training.slot(AskSlot(P, attempt=0, step=1, slot=0, rank=0, tokens=100, wait_s=0))
    if wrong == "the end":
        training.step_done(P, 0, 1, 0)
        training.commit(P, 0, 1)
    serials = {"one step": (2, 3), "nobody": (2, 9)}.get(wrong, (2, 1))
    events = list(queue.events())
    if wrong == "a version":
        put = next(event for event in events if isinstance(event, ev.RowsPut) and event.serials == [1])
        events = replaced(events, put, newest=7)
    said = [one for one in audit([*events, ev.Exchanged(P, serials)]).problems if "exchanged their steps" in one]
    why = "although they have the same step or different versions, are in a slot, final or unknown"
    assert said == [f"groups {serials} of {P} exchanged their steps, {why}"]


def test_no_ledger(tmp_path):
    with pytest.raises(FileNotFoundError):
        audit_ledger(tmp_path / "nowhere")
    report = audit([])
    assert (report.ok, report.closed, report.last_committed_step, report.dispatched) == (True, False, 0, 0)


def test_a_run_that_was_stopped_is_unfinished_and_not_lost(events):
    stopped = [event for event in events if not isinstance(event, ev.PartitionSet)]
    stopped = stopped[: max(i for i, event in enumerate(stopped) if isinstance(event, ev.Committed))]
    report = audit(stopped)
    assert (report.lost, report.unfinished, report.trained) == (0, 3, 3)
    assert report.ok
    assert not report.closed


def test_a_missing_prompt_is_lost(events):
    first, second = [event for event in events if isinstance(event, ev.RowsPut)]
    report = audit([msgspec.structs.replace(first, serials=first.serials[:1], rows=first.rows[:2]), second])
    assert report.lost == 2
    assert "prompt 1 lacks 2 of 2 samples" in report.problems
    assert not report.ok


def test_a_prompt_that_was_skipped_is_not_lost_and_has_no_samples(queue):
    queue.create(0, 3, skipped=[1, 2])
    queue.table.close(P, 0)
    events = list(queue.events())
    report = audit(events)
    assert (report.ok, report.skipped, report.lost, report.dispatched) == (True, 2, 0, 4)
    assert audit(without(events, ev.Skipped)).lost == 4
    said = audit([*events, ev.Skipped(P, [3])])
    assert "prompt 3 was skipped, and has samples" in said.problems
    assert not said.ok


def test_why_rows_were_given_out_again_is_counted_also_over_a_snapshot(queue):
    queue.create(0)
    for reason, worker in (("it leaves", "w"), ("it failed", "v"), ("it leaves", "w")):
        rows = queue.claim("rollout", worker=worker)
        queue.table.claims.give_back(rows[0].lease, [row.row for row in rows], reason)
    queue.claim("rollout", worker="w")
    queue.table.claims.expire_worker("w")
    expected = {"it leaves": 4, "it failed": 2, "worker lost": 2}
    for events in (list(queue.events()), list(records_of(queue.table.state))):
        report = audit(events)
        assert (report.redeliveries, report.reasons) == (8, expected)
    older = [
        msgspec.structs.replace(event, reasons={}) if isinstance(event, ev.SnapshotPartition) else event
        for event in events
    ]
    assert audit(older).reasons == {"not recorded": 8}


def test_a_missing_sample_is_lost(events):
    last = [event for event in events if isinstance(event, ev.RowsPut)][-1]
    parts = [
        msgspec.structs.replace(last, serials=last.serials[:1], rows=last.rows[:2]),
        msgspec.structs.replace(last, serials=last.serials[1:], size=1, rows=last.rows[2:3]),
    ]
    at = events.index(last)
    tampered = [*events[:at], *parts, *events[at + 1 :]]
    report = audit([event for event in tampered if not isinstance(event, ev.SlotDecided | ev.RowsDropped)])
    assert report.lost >= 1
    assert "prompt 3 lacks 1 of 2 samples" in report.problems


def test_a_sample_that_a_slot_left_out_is_lost(events):
    slot = next(event for event in events if isinstance(event, ev.SlotDecided))
    report = audit(replaced(events, slot, ranks=[slot.ranks[0][1:]]))
    assert (report.lost, report.trained, report.unfinished, report.duplicated) == (1, 5, 0, 0)
    assert report.problems == ["sample (0, 1) of step 1 was never finished"]


def test_a_drop_that_was_not_recorded_is_lost(events):
    report = audit(without(events, ev.RowsDropped))
    assert (report.lost, report.filtered) == (1, 0)


def test_a_commit_that_was_not_recorded_is_lost_when_the_run_is_closed(events):
    report = audit(without(events, ev.Committed, 1))
    assert (report.lost, report.trained) == (3, 3)


def test_a_step_with_too_few_groups_is_lost(events):
    opened = next(event for event in events if isinstance(event, ev.Opened))
    report = audit(replaced(events, opened, groups=3))
    assert report.lost == 2
    assert "was opened with 3 groups, but 2 were trained" in report.problems[0]


def test_a_sample_in_two_slots_is_duplicated(events):
    slot = next(event for event in events if isinstance(event, ev.SlotDecided))
    report = audit(replaced(events, slot, ranks=[slot.ranks[0] + slot.ranks[0][:1]]))
    assert report.duplicated == 1
    assert not report.ok


@pytest.mark.parametrize("first", ["trained", "filtered"])
def test_a_sample_that_ends_twice_is_duplicated(events, first):
    slot = next(event for event in events if isinstance(event, ev.SlotDecided))
    drop = next(event for event in events if isinstance(event, ev.RowsDropped))
    rows = drop.rows if first == "filtered" else slot.ranks[0][:1]
    report = audit([*events, msgspec.structs.replace(drop, rows=rows)])
    assert (report.duplicated, report.ok) == (1, False)
    if first == "filtered":
        assert audit(replaced(events, slot, ranks=[slot.ranks[0] + rows])).duplicated == 1


def test_a_sample_in_two_steps_is_duplicated(events):
    first, second = [event for event in events if isinstance(event, ev.SlotDecided)]
    report = audit(replaced(events, second, ranks=[second.ranks[0] + first.ranks[0][:1]]))
    assert report.duplicated == 1


def test_a_sample_that_is_created_twice_is_duplicated(events):
    put = next(event for event in events if isinstance(event, ev.RowsPut))
    report = audit([*events, msgspec.structs.replace(put, serials=put.serials[:1], rows=put.rows[:2])])
    assert report.duplicated == 2


def test_a_sample_that_was_lost_with_its_unit_may_be_created_again(queue):
    queue.create(0)
    queue.replace_unit("unit-b")
    queue.create(0)
    report = audit(queue.events())
    assert (report.dispatched, report.duplicated, report.unfinished) == (2, 0, 2)


def test_what_an_older_checkpoint_does_not_hold_does_not_count(events):
    report = audit([*events[:-1], ev.Began(P, 1, 1, 1)])
    assert (report.trained, report.unfinished, report.attempts) == (3, 3, 2)
    first = RowPlace(9, 0, 0).row
    again = ev.RowsPut(P, "train", [2], 2, [first, first + 1], 2, 0, 0)
    report = audit([*events[:-1], ev.Began(P, 1, 1, 1), again])
    assert (report.duplicated, report.dropped, report.unfinished) == (0, 1, 3)
    assert audit([*events[:-1], ev.Began(P, 1, 1, 1), again, again]).duplicated == 2


def test_eval_partitions_are_passed_over(queue):
    queue.create(0, purpose="eval", partition="eval")
    queue.create(0)
    report = audit(queue.events())
    assert report.dispatched == 2


def test_a_row_that_a_task_has_twice_is_found(events):
    lease = next(event for event in events if isinstance(event, ev.Leased))
    again = msgspec.structs.replace(lease, lease=lease.lease + (1 << 30))
    done = next(event for event in events if isinstance(event, ev.Completed) and event.lease == lease.lease)
    for place in (events.index(lease) + 1, events.index(done) + 1, len(events)):
        report = audit([*events[:place], again, *events[place:]])
        assert f"row {lease.rows[0]} of {P} was leased to rollout twice, or was lost" in report.problems
        assert not report.ok


def test_a_completion_without_a_lease_is_found(events):
    done = next(event for event in events if isinstance(event, ev.Completed))
    report = audit([*events, done])
    assert f"row {done.rows[0]} of {P} was completed by rollout without its lease" in report.problems


def test_an_open_group_that_is_put_twice_is_found():
    put = ev.RowsPut("p", "open", [1 << 32, (1 << 32) + 1], 1, [7, 8])
    assert audit([put]).ok
    report = audit([put, put])
    assert (report.put, report.remaining) == (2, 2)
    assert f"the group {1 << 32} of p was put twice" in report.problems
