"""The prompt assignment: every serial in one step, every step filled again after filtering."""

import pickle

from count_work import bytecodes
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.flow.assignment import LedgerStep, PromptAssignment


def issue_all(assignment: PromptAssignment) -> list[tuple[int, int]]:
    issued = []
    while (pair := assignment.issue()) is not None:
        issued.append(pair)
    return issued


def test_serials_follow_the_data_and_fill_the_steps_in_order() -> None:
    assert issue_all(PromptAssignment(prompts_per_step=2, steps=3)) == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3)]


def test_a_filtered_group_is_replaced_in_its_own_step() -> None:
    assignment = PromptAssignment(prompts_per_step=2, steps=2)
    issue_all(assignment)
    assignment.exclude(0)
    assert assignment.issue() == (4, 1)
    assert assignment.issue() is None
    assert not assignment.waits_for_prompt(5), "every step has its prompts, so that none is wanted"
    assert assignment.dispatched == 4


def test_a_prompt_that_is_not_there_is_not_issued() -> None:
    assignment = PromptAssignment(prompts_per_step=2, steps=2)
    assert [assignment.issue(available=1), assignment.issue(available=1)] == [(0, 1), None]
    assert not assignment.full
    assert (assignment.lacks(1), assignment.lacks(2)) == (1, 2)
    assignment.exclude(0)
    assert assignment.lacks(1) == 2
    assert [assignment.issue(available=3), assignment.issue(available=3), assignment.issue(available=3)] == [
        (1, 1),
        (2, 1),
        None,
    ]
    assignment = PromptAssignment(prompts_per_step=2, steps=1)
    assignment.restore({}, committed=0, next_serial=3, missing=[1])
    assert [assignment.issue(available=3), assignment.issue(available=3)] == [(1, 1), None]


def test_excluding_twice_counts_once() -> None:
    assignment = PromptAssignment(prompts_per_step=1, steps=1)
    issue_all(assignment)
    assignment.exclude(0)
    assignment.exclude(0)
    assert issue_all(assignment) == [(1, 1)]


@given(per_step=st.integers(1, 4), steps=st.integers(1, 5), choices=st.lists(st.integers(0, 30), max_size=60))
def test_a_restarted_book_goes_on_where_the_old_one_stopped(per_step: int, steps: int, choices: list[int]) -> None:
    assignment = PromptAssignment(prompts_per_step=per_step, steps=steps)
    notes: list[tuple[int, int]] = []
    excluded: list[int] = []
    for choice in choices:
        if choice % 3 == 0 and notes:
            serial = notes[choice % len(notes)][0]
            excluded.append(serial)
            assignment.exclude(serial)
        elif (pair := assignment.issue()) is not None:
            notes.append(pair)
    again = PromptAssignment(prompts_per_step=per_step, steps=steps)
    for serial, step in notes:
        again.note(serial=serial, step=step)
    for serial in excluded:
        again.exclude(serial)
    assert issue_all(again) == issue_all(assignment)
    assert again.dispatched == per_step * steps


def test_prompts_in_flight_are_those_that_nothing_was_decided_about_and_a_restart_forgets_none() -> None:
    recorded = {1: LedgerStep([0, 1, 2, 3], undecided=2, excluded=1), 2: LedgerStep([5, 6], undecided=2, excluded=0)}
    assignment = PromptAssignment(prompts_per_step=4, steps=2)
    assignment.restore(recorded, committed=0, next_serial=7, missing=[4])
    assert assignment.running == 4
    for serial in (2, 3, 5, 5):
        assignment.finish(serial)
    assert assignment.running == 1
    assert assignment.issue() == (4, 1)
    assert assignment.running == 2
    assignment.skip(4)
    assert assignment.running == 1
    assignment.finish(6)
    assert assignment.running == 0


def test_unfinished_are_the_steps_that_were_begun_and_the_one_that_gets_the_next_prompt() -> None:
    assignment = PromptAssignment(prompts_per_step=2, steps=2)
    seen = [assignment.unfinished(trained_step=0)]
    while assignment.issue() is not None:
        seen.append(assignment.unfinished(trained_step=0))
    assert seen == [{1}, {1}, {1, 2}, {1, 2}, {1, 2}]
    assert [assignment.unfinished(trained_step=step) for step in (1, 2)] == [{2}, set()]
    later = PromptAssignment(prompts_per_step=1, steps=2000)
    later.restore({}, committed=1999, next_serial=1999, missing=())
    assert (later.unfinished(trained_step=1999), later.dispatched, later.running) == ({2000}, 1999, 0)
    assert bytecodes(lambda: later.unfinished(trained_step=1999)) < 500, "trained steps cost no work"


def test_steps_that_are_trained_stay_full_whether_the_ledger_tells_of_them_or_not() -> None:
    recorded = {2: LedgerStep([4, 5, 6, 7, 8], undecided=1, excluded=1), 3: LedgerStep([9], undecided=1, excluded=0)}
    assignment = PromptAssignment(prompts_per_step=4, steps=3)
    assignment.restore(recorded, committed=2, next_serial=10, missing=[])
    assert assignment.dispatched == 4 + 4 + 1
    assert assignment.issue() == (10, 3)


def test_samples_of_one_step_go_on_as_they_come_and_those_of_several_once_all_are_complete() -> None:
    assignment = PromptAssignment(prompts_per_step=1, steps=2)
    together = [assignment.complete_together([1, 2])]
    issue_all(assignment)
    assert assignment.complete_together([1])
    for serial in (0, 1):
        together.append(assignment.complete_together([1, 2]))
        assignment.finish(serial)
    assert [*together, assignment.complete_together([1, 2])] == [False, False, False, True]


@given(st.lists(st.sampled_from(["issue", "finish", "filter", "skip"]), max_size=60))
def test_prompts_in_flight_are_those_issued_and_not_finished(what: list[str]) -> None:
    assignment = PromptAssignment(prompts_per_step=3, steps=4)
    flying: list[int] = []
    for each in what:
        if each == "issue" and (pair := assignment.issue()) is not None:
            flying.append(pair[0])
        elif each != "issue" and flying:
            serial = flying.pop(0)
            if each == "skip":
                assignment.skip(serial)
            else:
                assignment.finish(serial)
            if each == "filter":
                assignment.exclude(serial)
        assert assignment.running == len(flying)


@given(st.permutations(range(12)), st.integers(0, 3))
def test_whatever_is_finished_first_fills_the_lowest_step_that_may_have_it(order: list[int], apart: int) -> None:
    """Steps up to ``apart`` are begun by other versions than those after it."""
    assignment = PromptAssignment(prompts_per_step=3, steps=4)
    step_of = dict(issue_all(assignment))
    assignment.mark_put(step_of)
    unfinished = set(step_of)
    for serial in order:
        assignment.finish(serial)
        unfinished.remove(serial)
        own = step_of[serial]
        alike = {step for step in range(1, 5) if (step > apart) == (own > apart)}
        lower = {step_of[each] for each in unfinished} & alike & set(range(own))
        place = assignment.late(serial, alike=lambda step: step > apart)
        assert (place is None) == (not lower)
        if place is not None:
            step, late = place
            assert step == step_of[late] == min(lower)
            assert late in unfinished
            assignment.exchange(serial, late)
            step_of[serial], step_of[late] = step, own
        assert assignment.running == len(unfinished)
        open_steps = {step_of[each] for each in unfinished}
        assert [assignment.complete(step) for step in range(1, 5)] == [step not in open_steps for step in range(1, 5)]


@given(st.lists(st.sampled_from(["issue", "finish", "filter", "commit"]), max_size=60))
def test_a_committed_step_is_forgotten_without_any_other_effect(what: list[str]) -> None:
    remembers, forgets = (PromptAssignment(prompts_per_step=2, steps=6) for _ in range(2))
    open_serials: list[int] = []
    decided: list[int] = []
    committed = 0
    for each in what:
        if each == "issue" and (pair := remembers.issue()) is not None:
            assert forgets.issue() == pair
            open_serials.append(pair[0])
        elif each in ("finish", "filter") and open_serials:
            serial = open_serials.pop(0)
            assert remembers.finish(serial)
            assert forgets.finish(serial)
            if each == "filter":
                assert remembers.exclude(serial)
                assert forgets.exclude(serial)
            decided.append(serial)
        elif each == "commit" and remembers.complete(committed + 1):
            committed += 1
            forgets.forget(committed=committed)
        for serial in decided:
            assert not forgets.finish(serial)
        assert forgets.unfinished(trained_step=committed) == remembers.unfinished(trained_step=committed)
        for count in ("dispatched", "running", "issued", "full"):
            assert getattr(forgets, count) == getattr(remembers, count)


def test_the_memory_of_an_assignment_does_not_grow_with_the_steps() -> None:
    assignment = PromptAssignment(prompts_per_step=100, steps=1_000)
    for step in range(1, 1_001):
        issued = [assignment.issue() for _ in range(100)]
        assignment.mark_put([pair[0] for pair in issued if pair is not None])
        for pair in issued:
            assert pair is not None
            assignment.finish(pair[0])
        assignment.forget(committed=step)
    assert len(pickle.dumps(assignment)) < 100_000, "100,000 prompts were issued"
