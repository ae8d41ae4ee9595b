"""Reports of a controller about its table, and of several controllers together."""

import pytest
from count_work import bytecodes
from msgspec.structs import replace

from asyncflow.queue.protocol.calls import AskSlot
from asyncflow.queue.protocol.messages import PartitionSnapshot, QueueStats, StepState, UnitView, Unready
from asyncflow.queue.table.report import (
    merge_snapshots,
    merge_stats,
    merge_views,
    progress,
    snapshot,
    stats,
    view,
    waits,
)

P = "train"
UNITS = [UnitView(unit=n, state="serving", rows=9, bytes=100 + n, limit=1000 + n) for n in (0, 1)]


@pytest.fixture
def table(queue):
    """A step of three groups: one is scored except for a row that was filtered, one is leased, one is ready."""
    queue.create(0, 1, 2)
    queue.create(0, partition="eval", purpose="eval")
    queue.complete(queue.claim("rollout", rows=2), "response")
    rows = queue.claim("score")
    queue.table.claims.drop(rows[0].lease, [rows[0].row], "filtered:same")
    queue.complete(rows[1:], "reward")
    queue.claim("rollout", rows=2)
    queue.park("score")
    return queue.table


def test_counts_are_of_all_partitions_and_units(table):
    assert stats(table, UNITS, synced=2, ledger_bytes=77) == QueueStats(
        ready={f"{P}/rollout": 2, f"{P}/score": 0, f"{P}/advantage": 1, f"{P}/train": 0},
        leased={f"{P}/rollout": 2, f"{P}/score": 0, f"{P}/advantage": 0},
        parked={f"{P}/score": 1},
        live=7,
        staged=0,
        committed=0,
        filtered=1,
        dropped=0,
        wanted=0,
        bytes=201,
        limit=2001,
        units=2,
        lease_expiries=0,
        redeliveries=0,
        fenced=0,
        ledger_bytes=77,
    )


def test_rows_that_a_step_has_taken_and_those_that_are_to_be_made_again_are_counted_apart(queue):
    training = queue.table.training
    for step, serials in ((1, (0,)), (2, (1, 2))):
        training.open_step(P, step, len(serials), 2)
        queue.create(*serials, step=step)
    training.begin(P, 0, 0, 1)
    queue.through()
    for step in (1, 2):
        training.slot(AskSlot(P, attempt=0, step=step, slot=0, rank=0, tokens=4, wait_s=0))
        training.step_done(P, 0, step, 0)
    training.commit(P, 0, 1)
    queue.create(3, step=3)
    rows = queue.claim("rollout")
    queue.table.claims.drop(rows[0].lease, [rows[0].row], "too long")
    queue.replace_unit("unit-b")
    told = stats(queue.table, [], synced=0, ledger_bytes=0)
    assert (told.live, told.staged, told.committed, told.dropped, told.wanted) == (5, 4, 2, 1, 1)
    shown = view(queue.table, P, 0.0)
    assert (shown.rows, shown.wanted, shown.purpose) == (5, 1, "train")
    said = snapshot(queue.table.state.partitions[P])
    assert (said.last_staged_step, said.last_committed_step) == (2, 1)
    assert {step: state.serials for step, state in said.steps.items()} == {2: [1, 2], 3: [3]}


def test_a_partition_that_nobody_made_is_shown_empty(queue):
    shown = view(queue.table, "nobody", 0.0)
    assert (shown.name, shown.purpose, shown.rows, shown.tasks) == ("nobody", "", 0, [])


def test_of_each_task_is_said_how_far_it_is_and_for_which_row_it_waits_longest(table):
    shown = view(table, P, 5.0)
    assert (shown.rows, shown.wanted, shown.cleared, shown.expected) == (5, 0, 0, None)
    assert [(task.name, task.ready, task.leased, task.done, task.parked) for task in shown.tasks] == [
        ("advantage", 1, 0, 0, 0),
        ("rollout", 2, 2, 1, 0),
        ("score", 0, 0, 1, 1),
        ("train", 0, 0, 0, 0),
    ]
    scored, leased = (next(row for row in table.state.rows.values() if row.key == key) for key in ((0, 1), (1, 0)))
    oldest = {
        "advantage": Unready(row=leased.row, serial=1, sample=0, seconds=5.0, lacks=["reward"]),
        "score": Unready(row=leased.row, serial=1, sample=0, seconds=5.0, lacks=["response"]),
        "train": Unready(row=scored.row, serial=0, sample=1, seconds=5.0, lacks=["advantage"]),
    }
    assert {task.name: task.oldest for task in shown.tasks} == {"rollout": None} | oldest
    assert {task: row for partition, task, row in waits(table, 5.0) if partition == P} == oldest
    partition = table.state.partitions[P]
    told = [progress(partition, columns=(), task=task) for task in ("rollout", "score")]
    assert [(each.rows, each.done, each.leased) for each in told] == [(6, 1, 2), (6, 1, 0)]
    assert progress(partition, columns=("prompt", "reward"), task="").done == 1


def test_a_step_is_said_to_have_what_was_put_done_and_filtered_of_it(table, queue):
    partition = table.state.partitions[P]
    done = {"rollout": 1, "score": 1, "advantage": 0}
    undone = {"rollout": 2, "score": 2, "advantage": 3}
    first = StepState(serials=[0, 1, 2], done=done, undone=undone, filtered=1, excluded=0)
    assert snapshot(partition).steps == {1: first}
    rows = queue.claim("rollout", rows=2)
    table.claims.drop(rows[0].lease, [row.row for row in rows], "filtered:same")
    queue.create(3, step=2)
    queue.create(4, step=3)
    rows = [queue.claim("rollout", rows=2) for _ in range(2)][1]
    table.claims.drop(rows[0].lease, [row.row for row in rows], "filtered:same")
    second = StepState(serials=[3], done=dict.fromkeys(done, 0), undone=dict.fromkeys(done, 1), filtered=0, excluded=0)
    undone = {task: count - 1 for task, count in undone.items()}
    first = replace(first, undone=undone, filtered=3, excluded=1)
    third = StepState(serials=[4], done=second.done, undone=second.done, filtered=2, excluded=1)
    assert snapshot(partition).steps == {1: first, 2: second, 3: third}
    assert snapshot(partition, step=2).steps == {2: second}


def test_nothing_is_done_of_a_row_that_must_be_made_again(queue):
    queue.create(0, 1)
    queue.through()
    everything = dict.fromkeys(("rollout", "score", "advantage"), 4)
    partition = queue.table.state.partitions[P]
    assert snapshot(partition).steps[1].done == everything
    queue.replace_unit("unit-b")
    lost = snapshot(partition).steps[1]
    assert (lost.done, lost.undone) == (dict.fromkeys(everything, 0), dict.fromkeys(everything, 2))
    queue.create_wanted()
    queue.through(upto="rollout")
    assert snapshot(partition).steps[1].done == dict.fromkeys(everything, 0) | {"rollout": 4}


def test_the_report_of_a_step_costs_no_work_for_the_steps_before_it(queue):
    def work(step):
        """Train the steps up to ``step``, and return the work of the next one's report."""
        partition = queue.table.state.partitions[P]
        for number in range(len(partition.finished) + 1, step + 1):
            queue.create(2 * number, 2 * number + 1, step=number)
            rows = queue.claim("rollout")
            queue.table.claims.drop(rows[0].lease, [row.row for row in rows], "dropped")
        assert len({id(finished) for ended in partition.finished.values() for finished in ended.values()}) == 1
        return bytecodes(lambda: snapshot(partition, step=step + 1))

    few, many = work(10), work(30)
    assert many < 1.1 * few


def test_what_controllers_say_is_put_together_and_nothing_is_counted_twice(table):
    own = replace(
        stats(table, UNITS, synced=2, ledger_bytes=70),
        lease_expiries=1,
        redeliveries=2,
        fenced=3,
        parked={f"{P}/score": 1},
    )
    theirs = replace(own, ready={f"{P}/judge": 5}, leased={f"{P}/judge": 6}, parked={f"{P}/judge": 7}, ledger_bytes=700)
    assert merge_stats(own, [theirs], [2]) == replace(
        own,
        ready=own.ready | {f"{P}/judge": 5},
        leased=own.leased | {f"{P}/judge": 6},
        parked=own.parked | {f"{P}/judge": 7},
        lease_expiries=2,
        redeliveries=4,
        fenced=6,
        ledger_bytes=770,
        silent=[2],
    )
    shown = view(table, P, 5.0)
    first, *others = shown.tasks
    merged = merge_views(replace(shown, tasks=others), [replace(shown, rows=0, tasks=[first])], {2: ["judge"]})
    assert merged == replace(shown, silent={2: ["judge"]})


def test_the_work_of_tasks_elsewhere_counts_for_the_steps_that_the_first_controller_knows(table):
    def said(**done: int) -> PartitionSnapshot:
        state = StepState(serials=[0], done=done, undone=dict.fromkeys(done, 9), filtered=0, excluded=0)
        return replace(own, steps={1: state, 7: state})

    own = snapshot(table.state.partitions[P])
    merged = merge_snapshots(own, [said(judge=4), said(grade=5)])
    more = {"judge": 9, "grade": 9}
    first = own.steps[1]
    wanted = replace(first, done=first.done | {"judge": 4, "grade": 5}, undone=first.undone | more)
    assert merged == replace(own, steps={1: wanted}), "step 7 is over here, and not yet there"
