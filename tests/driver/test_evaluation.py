"""Evaluations on a real queue: counted once, and started again when their weights are of another history."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_world import answer_all, claim_all, queue_of

from asyncflow.api.job import RLJobSpec
from asyncflow.api.load import load_job
from asyncflow.data.prompter import Prompter
from asyncflow.data.sources import open_held_out, open_training
from asyncflow.driver.driver import ChangeSignal
from asyncflow.driver.evaluation import EvaluatedRow, Evaluation, EvaluationResult, SetResult, best_of, pass_at
from asyncflow.driver.groups import RewardTally
from asyncflow.driver.tasks import EVAL
from asyncflow.errors import ManifestError
from asyncflow.queue.client import QueueClient
from asyncflow.queue.controller.controller import Controller
from asyncflow.queue.protocol.messages import LeasedRow
from asyncflow.rpc.membership import Best

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"


class Letters:
    """Encodes by character."""

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) for letter in text]


def prompters(wanted: RLJobSpec, folder: Path) -> dict[str, Prompter]:
    train = open_training(wanted.data, Letters(), folder=folder, cache=folder)  # type: ignore[arg-type]
    return open_held_out(
        wanted.data,
        Letters(),  # type: ignore[arg-type]
        train=train.source,
        folder=folder,
        cache=folder,
    )


class Bench:
    """An evaluation at work on a queue; the test plays the rollouts."""

    def __init__(
        self, queue: QueueClient, wanted: RLJobSpec, prompts: dict[str, Prompter], controller: Controller
    ) -> None:
        self.queue = queue
        self.controller = controller
        self.changes = ChangeSignal(every_s=0.1)
        self.dues: list[int] = []
        self.results: list[EvaluationResult] = []
        self.rewards = RewardTally(needed=6, keep=lambda totals: None)
        self.kept: list[EvaluatedRow] = []
        self._wanted, self._prompts = wanted, prompts
        self.evaluation = self.of_the_first_round()

    def of_the_first_round(self) -> Evaluation:
        made = Evaluation.of(
            self._wanted,
            queue=self.queue,
            rewards=self.rewards,
            prompters=self._prompts,
            steps=[0, 2],
            due=lambda: [step for step in self.dues if step not in [result.step for result in self.results]],
            changed=self.changes.changed,
            keep=self._keep,
            finished=self.results.append,
        )
        assert made is not None
        return made

    async def _keep(self, rows: Sequence[EvaluatedRow]) -> None:
        self.kept += rows

    def due(self, step: int) -> None:
        self.dues.append(step)
        self.changes.notify()

    def restart(self) -> None:
        self.evaluation.restart()
        self.changes.notify()

    async def claim(self, rows: int) -> list[LeasedRow]:
        return await claim_all(self.queue, partition=EVAL, rows=rows)

    async def answer(self, rows: list[LeasedRow], *, right: bool | float, **tags: str) -> list[bool]:
        return await answer_all(self.queue, rows, [{"reward": float(right), **tags}] * len(rows))

    async def counted(self, rows: int) -> None:
        async with asyncio.timeout(10):
            while len(self.kept) < rows:
                await asyncio.sleep(0.01)

    async def recorded(self, count: int) -> list[EvaluationResult]:
        async with asyncio.timeout(10):
            while len(self.results) < count:
                await asyncio.sleep(0.01)
        return self.results


@asynccontextmanager
async def bench(folder: Path, *settings: str, size: int | None = 3) -> AsyncIterator[Bench]:
    words = [f"data.eval.size={size}"] if size else []
    wanted = load_job(EXAMPLE, [*words, *settings]).spec
    async with queue_of(wanted, folder) as (queue, controller):
        made = Bench(queue, wanted, prompters(wanted, folder), controller)
        work = (made.evaluation.put_due, made.evaluation.count, made.evaluation.replace_lost)
        loops = [asyncio.create_task(loop()) for loop in work]
        try:
            yield made
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)


async def test_an_evaluation_is_recorded_when_all_its_samples_are_in(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.due(2)
        rows = await at.claim(6)
        assert {(row.meta.min_version, row.meta.max_version) for row in rows} == {(2, 2)}
        greedy = [row for row in rows if row.meta.tags["temperature"] == 0.0]
        others = [row for row in rows if row not in greedy]
        assert len(greedy) == len(others) == 3
        assert {row.meta.tags["temperature"] for row in others} == {1.0}, "that of training, unless said otherwise"
        assert all(await at.answer(greedy, right=True))
        assert all(await at.answer(others, right=False))
        assert await at.recorded(1) == [
            EvaluationResult(step=2, prompts=3, accuracy=0.0, greedy=1.0, reward=0.0, greedy_reward=1.0)
        ]
        assert (await at.queue.stats(timeout=10)).live == 0, "what was counted is dropped"
        assert sorted((row.place, row.row.meta.sample) for row in at.kept) == [(i, j) for i in range(3) for j in (0, 1)]


async def test_a_sample_without_a_reward_is_not_right_and_is_counted_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.due(2)
        rows = await at.claim(6)
        assert all(await at.answer(rows[:5], right=True))
        assert all(await at.answer(rows[5:], right=False, failure="raised", detail="KeyError: 'x'"))
        (result,) = await at.recorded(1)
        assert result.accuracy + (result.greedy or 0.0) < 2
        assert at.rewards.outcomes() == {"scored": 5, "raised": 1}
        assert at.rewards.first_failure == "raised: KeyError: 'x'"
        assert not at.rewards.paused, "an evaluation pauses nothing"


async def test_what_another_history_has_answered_does_not_count(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.due(2)
        old = await at.claim(6)
        assert all(await at.answer(old[:5], right=True))
        await at.counted(5)
        at.restart()
        new = sorted(await at.claim(6), key=lambda row: row.meta.key != old[5].meta.key)
        assert await at.answer(old[5:], right=True) == [False]
        assert all(await at.answer(new[:1], right=False))
        await at.counted(6)
        assert all(await at.answer(new[1:], right=False))
        assert await at.recorded(1) == [
            EvaluationResult(step=2, prompts=3, accuracy=0.0, greedy=0.0, reward=0.0, greedy_reward=0.0)
        ]


async def test_what_comes_late_of_an_earlier_round_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.evaluation._round = at.evaluation._cleared = 1
        await at.of_the_first_round()._put_prompts(2, [1])
        at.due(2)
        await at.answer(await at.claim(6), right=True)
        await at.answer(await at.claim(6), right=False)
        assert await at.recorded(1) == [
            EvaluationResult(step=2, prompts=3, accuracy=0.0, greedy=0.0, reward=0.0, greedy_reward=0.0)
        ]


async def test_samples_that_are_lost_after_they_were_counted_count_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        drop, lost = at.queue.drop, asyncio.Event()

        async def too_late(rows: list[LeasedRow], *, reason: str, timeout: float) -> list[bool]:
            if not lost.is_set():
                at.controller.table.lose_rows(row.row for row in rows)
                at.controller.settle()
                lost.set()
            return await drop(rows, reason=reason, timeout=timeout)

        at.queue.drop = too_late  # type: ignore[method-assign]
        at.due(2)
        rows = await at.claim(6)
        mine = [row for row in rows if row.meta.serial == rows[0].meta.serial]
        assert all(await at.answer(mine, right=True))
        await lost.wait()
        again = await at.claim(2)
        assert sorted(row.meta.key for row in again) == sorted(row.meta.key for row in mine)
        assert all(await at.answer(again, right=True))
        assert not at.results
        assert all(await at.answer([row for row in rows if row not in mine], right=False))
        (result,) = await at.recorded(1)
        assert (result.prompts, result.accuracy, result.greedy) == (3, 1 / 3, 1 / 3)


async def test_one_that_was_recorded_can_be_made_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as at:
        at.due(2)
        await at.answer(await at.claim(6), right=True)
        at_first = list(await at.recorded(1))
        at.results.clear()
        at.restart()
        await at.answer(await at.claim(6), right=False)
        assert [result.accuracy for result in [*at_first, *await at.recorded(1)]] == [1.0, 0.0]


async def test_the_mean_reward_is_kept_beside_the_share_that_is_right(tmp_path: Path) -> None:
    async with bench(tmp_path, "evaluation.samples=2") as at:
        at.due(2)
        rows = await at.claim(9)
        for row in rows:
            assert await at.answer([row], right=[0.25, 1.5, 0.5][row.meta.sample]) == [True]
        (result,) = await at.recorded(1)
        assert (result.accuracy, result.greedy) == (0.5, 0)
        assert (result.reward, result.greedy_reward) == (0.875, 0.5)


async def test_held_out_prompts_that_are_too_long_are_left_out_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [{"prompt": "q" * length, "answer": ""} for length in (17, 5, 16, 18)]
    (tmp_path / "eval.jsonl").write_text("\n".join(map(json.dumps, lines)))
    async with bench(tmp_path, f"data.eval.source=jsonl://{tmp_path / 'eval.jsonl'}", size=4) as at:
        at.due(2)
        rows = await at.claim(4)
        assert all(await at.answer(rows, right=True))
        (result,) = await at.recorded(1)
        assert (result.prompts, result.accuracy) == (2, 1)
        refusing = {name: replace(columns, skips=False) for name, columns in at.evaluation.sets.items()}
        with pytest.raises(ManifestError, match="held-out prompt 0 has 17 tokens, more than 16"):
            await replace(at.of_the_first_round(), sets=refusing).put_due()
    (said,) = (words for words in caplog.messages if "left out" in words)
    assert said.startswith("2 of 4 prompts are left out of all evaluations, the first: ")


async def test_sets_are_evaluated_together_and_have_results_of_their_own(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n}?", "answer": str(n)} for n in range(2)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sets = f"data.evalSets=[{{name: sums, source: 'jsonl://{tmp_path}/sums.jsonl', size: 2}}]"
    async with bench(
        tmp_path, "evaluation={samples: 4, passAt: [1, 2, 4], passReward: 0.5, temperature: 0.3}", sets
    ) as at:
        at.due(2)
        rows = await at.claim(25)
        assert {row.meta.serial for row in rows} == set(range(5, 10)), "the second evaluation of five prompts"
        assert {row.meta.tags["temperature"] for row in rows} == {0.0, 0.3}
        for row in rows:
            prompt, sample = row.meta.serial - 5, row.meta.sample
            reward = 0.5 if (prompt, sample) in [(0, 0), (1, 1), (1, 2), (3, 0), (4, 4)] else 0.25
            assert await at.answer([row], right=reward) == [True]
        (result,) = await at.recorded(1)
    assert (result.prompts, result.accuracy, result.greedy) == (3, 3 / 12, 0)
    assert result.pass_at == pytest.approx({"1": 3 / 12, "2": (1 / 2 + 5 / 6) / 3, "4": 2 / 3})
    assert result.sets == {
        "sums": SetResult(
            prompts=2,
            accuracy=1 / 8,
            greedy=0.5,
            reward=0.28125,
            greedy_reward=0.375,
            pass_at={"1": 1 / 8, "2": 1 / 4, "4": 1 / 2},
        )
    }
    assert result.words.startswith("3 prompts, accuracy 0.25, greedy 0, reward 0.3125, pass@1 0.25, pass@2 0.4444")
    assert "; sums: 2 prompts, accuracy 0.125, greedy 0.5" in result.words


async def test_the_first_named_set_is_the_main_one_where_none_is_unnamed(tmp_path: Path) -> None:
    one = '{name: one, source: "tiny://reverse-digits", size: 2}'
    settings = ["data.eval=null", f"data.evalSets=[{one}]", "evaluation={samples: 1, greedy: false}"]
    async with bench(tmp_path, *settings, size=None) as at:
        at.due(2)
        assert all(await at.answer(await at.claim(2), right=True))
        (result,) = await at.recorded(1)
    assert (result.prompts, result.accuracy, result.greedy) == (2, 1.0, None)
    assert result.sets["one"].accuracy == 1.0


async def test_a_set_of_which_all_prompts_are_too_long_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "q" * 17, "answer": ""}))
    sets = f"data.evalSets=[{{name: long, source: 'jsonl://{tmp_path}/long.jsonl', size: 1}}]"
    async with bench(tmp_path, sets) as at:
        with pytest.raises(ManifestError, match="held-out prompt of long 0 has 17 tokens"):
            await at.of_the_first_round().put_due()


@given(st.data(), st.integers(1, 6))
def test_pass_at_k_is_the_chance_over_all_choices_of_k_samples(data: st.DataObject, samples: int) -> None:
    k = data.draw(st.integers(1, samples))
    passed = data.draw(st.lists(st.integers(0, samples), min_size=1, max_size=4))

    def chance(right: int) -> float:
        chosen = itertools.combinations([True] * right + [False] * (samples - right), k)
        return fmean(any(some) for some in chosen)

    assert pass_at(k, passed=passed, samples=samples) == pytest.approx(fmean(map(chance, passed)), abs=1e-12)


def test_pass_at_k_of_a_thousand_samples_is_a_number() -> None:
    assert pass_at(512, passed=[0, 1, 1024], samples=1024) == pytest.approx(1.5 / 3)


def test_the_best_is_the_earliest_of_the_highest() -> None:
    greedy = {0: 0.5, 2: None, 4: 0.75, 6: 0.75}
    results = {
        step: EvaluationResult(step=step, prompts=1, accuracy=step / 10, greedy=value, reward=-step)
        for step, value in greedy.items()
    }
    assert best_of(results, by="accuracy") == Best(step=6, by="accuracy", value=0.6)
    assert best_of(results, by="greedy") == Best(step=4, by="greedy", value=0.75)
    assert best_of(results, by="reward") == Best(step=0, by="reward", value=0.0)
    assert best_of({}, by="accuracy") is None
    assert best_of({2: results[2]}, by="greedy") is None
