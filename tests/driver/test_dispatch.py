"""Tests of what the dispatcher puts: prompts with their tokens, and what becomes of those that are too long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.api.load import load_job
from asyncflow.data.base import Prompt
from asyncflow.data.prompter import Prompter, PromptFormat
from asyncflow.data.put import PutPrompts, PutSource
from asyncflow.driver.dispatch import Dispatcher, PromptColumns, require_put, restore
from asyncflow.driver.tasks import TRAIN, tasks_of
from asyncflow.errors import ManifestError, PeerLost, Refused
from asyncflow.flow.admission import InFlight, admission_of
from asyncflow.flow.assignment import PromptAssignment
from asyncflow.flow.schedule import Schedule
from asyncflow.queue.protocol.messages import PartitionSnapshot, RowMeta, Samples, StepState

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"
LIMIT = 16
PER_STEP, STEPS = 4, 3


class Puts:
    """A queue that keeps what is put."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, int, int]] = []
        self.skipped: dict[int, list[int]] = {}
        self._opened: set[int] = set()

    async def open_step(self, *, step: int, groups: int, **_: object) -> None:
        assert groups == PER_STEP
        self._opened.add(step)

    async def put(self, *_: object, samples: Samples, group_size: int, **__: object) -> None:
        assert samples.step in self._opened
        tokens = samples.tokens[::group_size]
        self.skipped.setdefault(samples.serials[0], []).extend(samples.skipped)
        assert samples.tokens == [count for count in tokens for _ in range(group_size)]
        self.groups += [(serial, samples.step, count) for serial, count in zip(samples.serials, tokens, strict=True)]

    @property
    def steps(self) -> dict[int, int]:
        return {serial: step for serial, step, _ in self.groups}

    def snapshot(self) -> PartitionSnapshot:
        """Return what a queue would tell of these rows to the next driver."""
        serials: dict[int, list[int]] = {}
        for serial, step in self.steps.items():
            serials.setdefault(step, []).append(serial)
        skipped = {serial for first, left_out in self.skipped.items() if first in self.steps for serial in left_out}
        known = self.steps.keys() | skipped
        next_serial = max(known, default=-1) + 1
        return PartitionSnapshot(
            next_serial=next_serial,
            missing=[serial for serial in range(next_serial) if serial not in known],
            skipped=len(skipped),
            steps={
                step: StepState(serials=mine, done={}, undone={"advantage": len(mine)}, filtered=0, excluded=0)
                for step, mine in serials.items()
            },
            attempt=0,
            last_committed_step=0,
            last_staged_step=0,
            closed=None,
        )


class Stopped(Exception):
    """Nothing more may be dispatched."""


def dispatcher(puts: Puts, lengths: Sequence[int], *settings: str) -> Dispatcher:
    sizes = [f"algorithm.promptsPerStep={PER_STEP}", f"algorithm.steps={STEPS}", "algorithm.warmupSteps=0"]
    spec = load_job(EXAMPLE, [*sizes, *settings]).spec
    source = SimpleNamespace(
        prompt=lambda serial: Prompt(question="q" * lengths[serial % len(lengths)]), size=None, available=None
    )
    letters = SimpleNamespace(encode=lambda text, **_: list(range(len(text))))
    assignment = PromptAssignment(prompts_per_step=PER_STEP, steps=STEPS)

    async def changed() -> None:
        raise Stopped

    return Dispatcher(
        queue=puts,  # type: ignore[arg-type]
        prompts=PromptColumns.of(spec, prompter=Prompter(source, letters, PromptFormat()), what="prompt"),  # type: ignore[arg-type]
        assignment=assignment,
        schedule=Schedule.of(spec),
        policies=admission_of(spec),
        group_size=spec.algorithm.group_size,
        flow=lambda: InFlight(published=STEPS, dispatched=assignment.dispatched, running=0),
        changed=changed,
        on_first=lambda: None,
        on_skip=lambda _: None,
    )


def run(made: Dispatcher) -> None:
    with pytest.raises(Stopped):
        asyncio.run(made.run())


def test_a_row_says_how_many_tokens_its_prompt_has() -> None:
    puts = Puts()
    run(dispatcher(puts, [3, 9, 16]))
    assert [tokens for _, _, tokens in puts.groups] == [3, 9, 16] * 4


@pytest.mark.parametrize("packing", ["separate", "shared-prompt"])
def test_the_trainer_gets_groups_together_where_they_share_their_prompt(packing: str) -> None:
    tasks = tasks_of(load_job(EXAMPLE, [f"trainer.backend.packing={packing}"]).spec)
    (gang,) = [task for task in tasks if task.kind == "gang"]
    assert gang.shared_tokens is (packing == "shared-prompt")


LONG = [5, LIMIT + 1, LIMIT, 40, 40, 7]
FITTING = [serial for serial in range(60) if LONG[serial % len(LONG)] <= LIMIT]


def test_a_prompt_that_is_too_long_is_skipped_and_the_next_takes_its_place() -> None:
    puts = Puts()
    made, counted = dispatcher(puts, LONG), list[int]()
    made.on_skip = counted.append
    run(made)
    told = [serial for left_out in puts.skipped.values() for serial in left_out]
    assert len(told) == len(set(told)) == sum(counted) == made.skipped
    assert list(puts.steps) == FITTING[: PER_STEP * STEPS]
    assert list(puts.steps.values()) == [1] * 4 + [2] * 4 + [3] * 4
    assert made.skipped == FITTING[PER_STEP * STEPS - 1] + 1 - PER_STEP * STEPS


def test_a_ledger_without_the_prompts_that_were_put_was_lost_even_before_the_first_step() -> None:
    puts = Puts()
    made, again = dispatcher(puts, LONG), dispatcher(puts, LONG)
    run(made)
    restore(again.assignment, puts.snapshot())
    again.count_skipped(puts.snapshot().skipped)
    assert made.acknowledged == again.acknowledged == PER_STEP * STEPS
    require_put(puts.snapshot(), prompts=made.acknowledged)
    with pytest.raises(Refused, match="12 prompts were put, and it has 0: it was lost"):
        require_put(Puts().snapshot(), prompts=made.acknowledged)


@pytest.mark.parametrize("killed_after", range(0, 12, 3))
def test_the_next_driver_gives_the_same_prompts_to_the_same_steps_and_counts_the_same(killed_after: int) -> None:
    whole, puts = Puts(), Puts()
    run(dispatcher(whole, LONG))
    puts.groups, puts.skipped = whole.groups[:killed_after], whole.skipped
    assert set(puts.snapshot().missing) <= set(whole.steps), "what was skipped is not looked at again"
    again = dispatcher(puts, LONG)
    restore(again.assignment, puts.snapshot())
    again.count_skipped(puts.snapshot().skipped)
    run(again)
    assert puts.steps == whole.steps
    assert again.skipped == FITTING[PER_STEP * STEPS - 1] + 1 - PER_STEP * STEPS


@pytest.mark.parametrize("lost", range(STEPS))
def test_what_was_issued_before_a_put_failed_is_put_when_the_queue_is_back(lost: int) -> None:
    whole, puts = Puts(), Puts()
    run(dispatcher(whole, LONG))
    made, put, calls = dispatcher(puts, LONG), puts.put, count()

    async def failing(*args: Any, **named: Any) -> None:
        if next(calls) == lost:
            raise PeerLost("the queue is gone")
        await put(*args, **named)

    puts.put = failing  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        asyncio.run(made.run())
    run(made)
    assert puts.steps == whole.steps
    assert sorted(chain(*puts.skipped.values())) == sorted(chain(*whole.skipped.values()))
    assert made.skipped == len(list(chain(*whole.skipped.values())))


def test_prompts_whose_bytes_were_lost_are_put_again_the_lowest_steps_first_for_their_own_steps() -> None:
    puts, asked = Puts(), list[int]()

    async def wanted(*, known: int, **_: object) -> SimpleNamespace:
        asked.append(known)
        if known:
            raise Stopped
        lost = [(2, 5, 0), (2, 4, 1), (1, 9, 1), (2, 4, 0)]
        keys = [RowMeta(partition=TRAIN, serial=serial, sample=sample, step=step) for step, serial, sample in lost]
        return SimpleNamespace(revision=7, keys=keys)

    puts.wanted = wanted  # type: ignore[attr-defined]
    with pytest.raises(Stopped):
        asyncio.run(dispatcher(puts, range(1, 12)).replace_lost())
    assert puts.groups == [(9, 1, 10), (4, 2, 5), (5, 2, 6)]
    assert asked == [0, 7]


def test_a_task_that_is_too_large_is_skipped_too() -> None:
    puts = Puts()
    made = dispatcher(puts, [1, 14], "data.maxTaskBytes=256", "sampling.maxPromptTokens=16")
    made.prompts.prompter.source.prompt = (  # type: ignore[method-assign]
        lambda serial: Prompt(question="q", answer="a" * (300 if serial == 2 else 1))
    )
    run(made)
    assert 2 not in puts.steps
    assert made.skipped == 1


def test_it_is_refused_where_the_manifest_says_so() -> None:
    with pytest.raises(ManifestError, match="prompt 1 has 17 tokens, more than 16") as refused:
        asyncio.run(dispatcher(Puts(), LONG, "data.overlong=refuse").run())
    assert refused.value.where == "spec.sampling.maxPromptTokens"


def test_data_in_which_nothing_fits_end_the_job() -> None:
    with pytest.raises(ManifestError, match="prompts in a row"):
        asyncio.run(dispatcher(Puts(), [17]).run())


@pytest.mark.parametrize(
    ("settings", "flow", "there", "waits"),
    [
        ([], None, None, ["version"]),
        (["schedule={mode: sync}"], InFlight(published=0, dispatched=PER_STEP, running=0), None, ["version"]),
        ([], InFlight(published=0, dispatched=2 * PER_STEP, running=0), None, ["admission"]),
        ([], InFlight(published=STEPS, dispatched=0, running=0), 2, ["calls", "calls"]),
        ([], InFlight(published=STEPS, dispatched=0, running=0), None, ["calls", "dispatched"]),
    ],
)
def test_a_driver_that_puts_nothing_says_what_it_waits_for(
    settings: list[str], flow: InFlight | None, there: int | None, waits: list[str]
) -> None:
    said: list[str] = []
    made = dispatcher(Puts(), [3], *settings)
    made.flow = lambda: flow
    made.prompts.prompter.source.available = there  # type: ignore[misc]
    made.spans = SimpleNamespace(enter=lambda _, waits: said.append(waits), background=lambda *_, **__: nullcontext())  # type: ignore[assignment]
    run(made)
    assert said == waits
    assert made.lacks_prompts == (there is not None)


def test_prompts_that_are_put_are_checked_before_any_of_them_is_taken(tmp_path: Path) -> None:
    skips, refuses = (dispatcher(Puts(), [3], f"data.overlong={how}").prompts for how in ("skip", "refuse"))
    some = [Prompt(question="q" * length) for length in (3, LIMIT + 1, 5)]
    with pytest.raises(Refused, match="the driver makes the prompts of this job"):
        skips.take(PutPrompts(prompts=some))
    for columns in (skips, refuses):
        columns.prompter.source = source = PutSource()
        source.keep(tmp_path / f"{columns.skips}.jsonl")
        assert columns.take(PutPrompts(prompts=some[:1])) == 1
        assert columns.take(PutPrompts(first=1, prompts=some[2:], check=True)) == 1, "nothing is put"
    with pytest.raises(ManifestError, match="prompt 2 has 17 tokens"):
        refuses.take(PutPrompts(first=1, prompts=[some[2], some[1]]))
    assert source.available == 1
    assert skips.take(PutPrompts(first=1, prompts=some[1:])) == 3, "one that is too long keeps its serial"


def test_a_group_that_is_early_goes_to_the_lowest_step_that_waits_and_may_have_it() -> None:
    assignment = PromptAssignment(prompts_per_step=2, steps=4)
    for _ in range(8):
        assignment.issue()
    alike = (0, 0, 1, 1, 1).__getitem__
    assert assignment.late(7, alike=alike) is None, "nothing is out yet"
    assignment.mark_put(range(8))
    assignment.finish(7)
    assert assignment.late(7, alike=alike) == (2, 3), "other versions begin D_1"
    assignment.exchange(7, 3)
    assignment.finish(2)
    assert assignment.complete(2)
    assert not assignment.complete(4)
    assignment.finish(6)
    assert assignment.late(6, alike=alike) == (3, 5)
    assignment.exchange(6, 5)
    assert assignment.late(3, alike=alike) == (3, 4), "what was late may be early itself"
    for serial in (4, 3, 5):
        assignment.finish(serial)
    assert all(map(assignment.complete, (2, 3, 4)))
    assert assignment.running == 2
    assignment.finish(1)
    assert assignment.late(1, alike=alike) is None, "its own step waits, and no lower one"
