"""The prompt book: every serial in one step, every step filled again after filtering."""

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.driver.book import PromptBook


def issue_all(book: PromptBook) -> list[tuple[int, int]]:
    issued = []
    while (pair := book.issue()) is not None:
        issued.append(pair)
    return issued


def test_serials_follow_the_data_and_fill_the_steps_in_order() -> None:
    assert issue_all(PromptBook(prompts_per_step=2, steps=3)) == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3)]


def test_a_filtered_group_is_replaced_in_its_own_step() -> None:
    book = PromptBook(prompts_per_step=2, steps=2)
    issue_all(book)
    book.exclude(0)
    assert book.issue() == (4, 1)
    assert book.issue() is None
    assert book.dispatched == 4


def test_excluding_twice_counts_once() -> None:
    book = PromptBook(prompts_per_step=1, steps=1)
    issue_all(book)
    book.exclude(0)
    book.exclude(0)
    assert issue_all(book) == [(1, 1)]


@given(per_step=st.integers(1, 4), steps=st.integers(1, 5), choices=st.lists(st.integers(0, 30), max_size=60))
def test_a_restarted_book_goes_on_where_the_old_one_stopped(per_step: int, steps: int, choices: list[int]) -> None:
    book = PromptBook(prompts_per_step=per_step, steps=steps)
    notes: list[tuple[int, int]] = []
    excluded: list[int] = []
    for choice in choices:
        if choice % 3 == 0 and notes:
            serial = notes[choice % len(notes)][0]
            excluded.append(serial)
            book.exclude(serial)
        elif (pair := book.issue()) is not None:
            notes.append(pair)
    again = PromptBook(prompts_per_step=per_step, steps=steps)
    for serial, step in notes:
        again.note(serial=serial, step=step)
    for serial in excluded:
        again.exclude(serial)
    assert issue_all(again) == issue_all(book)
    assert again.dispatched == per_step * steps
