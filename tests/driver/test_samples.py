"""Which samples a run keeps, and that their texts come out of a real queue into files."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_world import answer_all, claim_all, queue_of

from asyncflow.api.durability import SamplesSpec
from asyncflow.api.load import load_job
from asyncflow.data.base import Prompt
from asyncflow.driver.evaluation import EvaluatedRow
from asyncflow.driver.groups import DecidedGroup
from asyncflow.driver.sample_files import SAMPLES, Format, SampleText, read_step, sample_files, write_samples
from asyncflow.driver.samples import Choice, Criteria, SampleCollector, rank_of
from asyncflow.driver.tasks import EVAL, TRAIN
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, Refused, StaleHandle
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta, Samples
from asyncflow.rpc.columns import Jagged

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"
SIZE = 4
GROUPS = 6
KEPT = SamplesSpec(per_step=5, extremes=2, per_evaluation=3)

TAGS = {"finish": "length", "style": 0.5, "ratio": float("inf")}
TASK = Prompt(question="p", answer=[1, "b"])

rewards = st.one_of(st.just(float("nan")), st.sampled_from([0.0, 1.0]), st.floats(-5, 5))
keys = st.tuples(st.integers(0, 40), st.integers(0, 3))


@settings(max_examples=60)
@given(
    st.lists(st.dictionaries(keys, rewards, max_size=12), max_size=6),
    st.integers(0, 6),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_a_choice_made_bit_by_bit_is_the_choice_among_all(
    parts: list[dict[tuple[int, int], float]], drawn: int, extremes: int, seed: int
) -> None:
    choice = Choice(drawn=drawn, extremes=extremes)
    known: dict[tuple[int, int], Criteria] = {}
    every: dict[tuple[int, int], Criteria] = {}
    for part in parts:
        new = {key: Criteria(rank_of(key, seed=seed), reward) for key, reward in part.items() if key not in every}
        every |= new
        known |= new
        known = {key: known[key] for key in choice.of(known)}
    assert set(known) == choice.of(every)
    assert len(known) <= drawn + 2 * extremes
    scored = sorted(one.reward for one in every.values() if one.reward == one.reward)
    kept = sorted(one.reward for one in known.values() if one.reward == one.reward)
    assert kept[:extremes] == scored[:extremes]
    assert kept[::-1][:extremes] == scored[::-1][:extremes]


def collector_of(queue: QueueClient, folder: Path, spec: SamplesSpec = KEPT, seed: int = 1) -> SampleCollector:
    return SampleCollector(
        spec, queue=queue, folder=folder, seed=seed, decode=lambda ids: "".join(map(chr, ids)), column="advantage"
    )


async def made_groups(queue: QueueClient, *, step: int = 1, groups: int = GROUPS) -> list[DecidedGroup]:
    """Have groups generated whose n-th sample has the response ``n``, and give advantages to them."""
    prompts = {
        "prompt_ids": Jagged.from_rows([[ord("p")]] * groups * SIZE, np.int32),
        "task": Jagged.from_rows([np.frombuffer(TASK.packed(), np.uint8)] * groups * SIZE, np.uint8),
    }
    await queue.open_step(partition=TRAIN, step=step, groups=groups, group_size=SIZE, timeout=10)
    serials = list(range(groups * (step - 1), groups * step))
    await queue.put(TRAIN, prompts, group_size=SIZE, samples=Samples(serials=serials, step=step), timeout=10)
    rows = await claim_all(queue, partition=TRAIN, rows=groups * SIZE)
    tags: list[dict[str, Any]] = [
        {"reward": float(row.meta.serial + row.meta.sample / 10), "version_min": 2, "version_max": 3} | TAGS
        for row in rows
    ]
    dtypes = {"logprobs": np.float32, "versions": np.int64, "reward": np.float32, "response_ids": np.int32}
    cells = {name: Jagged.from_rows([[0]] * len(rows), dtype) for name, dtype in dtypes.items()}
    cells["details"] = Jagged.from_rows([np.frombuffer(b'{"why": ["x"]}', np.uint8)] * len(rows), np.uint8)
    assert all(await queue.complete(rows, cells, tags=tags, timeout=10))
    finished: list[LeasedRow] = []
    while len(finished) < len(rows):
        finished += (await queue.claim(partition=TRAIN, task="advantage", max_rows=1 << 20, timeout=10)).rows
    by_serial = {serial: [row for row in finished if row.meta.serial == serial] for serial in serials}
    return [
        DecidedGroup(group, np.arange(SIZE, dtype=np.float32), others=[], reasons={}) for group in by_serial.values()
    ]


def names(samples: Sequence[SampleText]) -> set[tuple[int, int]]:
    return {(sample.serial, sample.sample) for sample in samples}


async def test_samples_are_drawn_by_their_names_whatever_comes_when_and_whoever_goes_on(tmp_path: Path) -> None:
    spec = load_job(EXAMPLE, [f"algorithm.groupSize={SIZE}", f"algorithm.promptsPerStep={GROUPS}"]).spec
    async with queue_of(spec, tmp_path) as (queue, _):
        groups = await made_groups(queue)
        once = collector_of(queue, tmp_path / "once")
        for group in reversed(groups):
            once.decided(1, group)
        await once.read()
        once.trained(1)
        await once.write()
        first = collector_of(queue, tmp_path / "twice")
        for group in groups[:3]:
            first.decided(1, group)
            await first.read()
        await first.write()
        second = collector_of(queue, tmp_path / "twice")
        for group in groups[3:]:
            second.decided(1, group)
        await second.read()
        second.trained(1)
        await second.write()
        assert second._open == {}
    kept = read_step(tmp_path / "once", purpose="train", step=1)
    assert kept == read_step(tmp_path / "twice", purpose="train", step=1)
    every = [(serial, sample) for serial in range(GROUPS) for sample in range(SIZE)]
    drawn = sorted(every, key=lambda key: rank_of(key, seed=1))[:5]
    assert names([sample for sample in kept if sample.drawn]) == set(drawn)
    assert {(0, 0), (0, 1), (GROUPS - 1, SIZE - 2), (GROUPS - 1, SIZE - 1)} <= names(kept)
    assert len(kept) <= 5 + 2 * 2
    best = max(kept, key=lambda sample: sample.reward or 0.0)
    assert (best.prompt, best.response, best.reward, best.advantage) == ("p", "\0", 5.3, 3.0)
    assert (best.version_min, best.version_max, best.finish, best.answer) == (2, 3, "length", '[1,"b"]')
    assert (best.prompt_tokens, best.response_tokens) == (1, 1)
    assert best.details == {"style": 0.5, "ratio": "inf", "why": ["x"]}


async def test_a_sample_that_is_made_again_takes_its_own_place(tmp_path: Path) -> None:
    spec = load_job(EXAMPLE, [f"algorithm.groupSize={SIZE}", f"algorithm.promptsPerStep={GROUPS}"]).spec
    async with queue_of(spec, tmp_path) as (queue, _):
        groups = await made_groups(queue)
        collector = collector_of(queue, tmp_path)
        for advantage in (1.0, 2.0):
            for group in groups:
                collector.decided(1, group._replace(advantages=np.full(SIZE, advantage, np.float32)))
            await collector.read()
            collector.trained(1)
            await collector.write()
            kept = read_step(tmp_path, purpose="train", step=1)
            assert {sample.advantage for sample in kept} == {advantage}
            assert len(names(kept)) == len(kept)


async def test_a_row_that_is_gone_costs_its_own_text_only(tmp_path: Path) -> None:
    spec = load_job(EXAMPLE, [f"algorithm.groupSize={SIZE}", f"algorithm.promptsPerStep={GROUPS}"]).spec
    async with queue_of(spec, tmp_path) as (queue, _):
        groups = await made_groups(queue)
        gone = [row for row in groups[0].rows if row.meta.sample < 2]
        await queue.drop(gone, reason="test", timeout=10)
        collector = collector_of(queue, tmp_path, SamplesSpec(per_step=64))
        for group in groups:
            collector.decided(1, group)
        await collector.read()
        await collector.write(everything=True)
    kept = read_step(tmp_path, purpose="train", step=1)
    every = {(serial, sample) for serial in range(GROUPS) for sample in range(SIZE)}
    assert names(kept) == every - {(0, 0), (0, 1)}


async def test_ids_that_cannot_be_decoded_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = load_job(EXAMPLE, [f"algorithm.groupSize={SIZE}", "algorithm.promptsPerStep=2"]).spec

    def decode(_ids: Sequence[int]) -> str:
        raise OverflowError("out of range")

    async with queue_of(spec, tmp_path) as (queue, _):
        collector = SampleCollector(KEPT, queue=queue, folder=tmp_path, seed=1, decode=decode, column="advantage")
        for group in await made_groups(queue, groups=2):
            collector.decided(1, group)
        await collector.read()
        await collector.write(everything=True)
    assert "cannot be decoded" in caplog.text
    assert sample_files(tmp_path) == []


@pytest.mark.parametrize("error", [PeerLost("gone"), DeadlineExceeded("late"), Refused("damaged"), StaleHandle("gone")])
async def test_samples_of_an_evaluation_that_cannot_be_read_are_missing(tmp_path: Path, error: AsyncFlowError) -> None:
    collector = collector_of(SimpleNamespace(fetch=AsyncMock(side_effect=error)), tmp_path)  # type: ignore[arg-type]
    meta = RowMeta(partition=EVAL, serial=7, sample=0, step=4, purpose="eval")
    row = LeasedRow(row=1, meta=meta, attempt=0, lease="", until=1.0, unit=0, bytes={})
    await collector.evaluating([EvaluatedRow(row, 0, "")])
    collector.evaluated(4)
    await collector.write()
    assert collector._open == {}
    assert sample_files(tmp_path) == []


async def test_texts_that_cannot_be_written_are_kept_until_they_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = load_job(EXAMPLE, [f"algorithm.groupSize={SIZE}", "algorithm.promptsPerStep=2"]).spec
    async with queue_of(spec, tmp_path / "queue") as (queue, _):
        (tmp_path / "run").write_text("no folder")
        collector = collector_of(queue, tmp_path / "run")
        for group in await made_groups(queue, groups=2):
            collector.decided(1, group)
        await collector.read()
        collector.trained(1)
        for _ in range(3):
            await collector.write()
        assert caplog.text.count("samples cannot be written") == 1
        (tmp_path / "run").unlink()
        await collector.write()
    assert len(read_step(tmp_path / "run", purpose="train", step=1)) >= KEPT.per_step


async def test_the_loop_reads_and_writes_and_only_every_nth_step_is_kept(tmp_path: Path) -> None:
    spec = load_job(EXAMPLE, [f"algorithm.groupSize={SIZE}", "algorithm.promptsPerStep=2", "algorithm.steps=4"]).spec
    async with queue_of(spec, tmp_path) as (queue, _):
        collector = collector_of(queue, tmp_path, SamplesSpec(per_step=2, extremes=0, every=3))
        work = asyncio.create_task(collector.run())
        for step in (1, 2, 3, 4):
            for group in await made_groups(queue, step=step, groups=2):
                collector.decided(step, group)
            async with asyncio.timeout(10):
                while not sample_files(tmp_path):
                    await asyncio.sleep(0.01)
            collector.trained(step)
        async with asyncio.timeout(10):
            while collector._open:
                await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work])
    assert [(file.purpose, file.step) for file in sample_files(tmp_path)] == [("train", 1), ("train", 3)]
    assert all(len(read_step(tmp_path, purpose="train", step=step)) == 2 for step in (1, 3))


async def test_nothing_is_kept_where_none_are_wanted(tmp_path: Path) -> None:
    spec = load_job(EXAMPLE, [f"algorithm.groupSize={SIZE}", "algorithm.promptsPerStep=2"]).spec
    async with queue_of(spec, tmp_path / "queue") as (queue, _):
        collector = collector_of(queue, tmp_path, SamplesSpec(per_step=0, extremes=0, per_evaluation=0))
        for group in await made_groups(queue, groups=2):
            collector.decided(1, group)
            await collector.evaluating([EvaluatedRow(row, 0, "") for row in group.rows])
        await collector.read()
        await collector.write(everything=True)
    assert not (tmp_path / SAMPLES).exists()


async def test_each_evaluation_keeps_the_same_prompts(tmp_path: Path) -> None:
    spec = load_job(EXAMPLE).spec
    size = 8
    async with queue_of(spec, tmp_path) as (queue, _):
        collector = collector_of(queue, tmp_path)
        for step in (0, 4):
            cells = {
                name: Jagged.from_rows([[65]] * size, kind)
                for name, kind in (("prompt_ids", np.int32), ("task", np.uint8))
            }
            samples = Samples(serials=[step * 100 + index for index in range(size)], step=step, purpose="eval")
            await queue.put(EVAL, cells, group_size=1, samples=samples, timeout=10)
            rows = await claim_all(queue, partition=EVAL, rows=size)
            tags: list[dict[str, Any]] = [
                {"reward": 1.0} | ({"failure": "raised", "detail": "boom"} if step else {}) for _ in rows
            ]
            assert all(await answer_all(queue, rows, tags))
            judged = (await queue.claim(partition=EVAL, task="score", max_rows=99, min_rows=size, timeout=10)).rows
            for row in judged:
                await collector.evaluating([EvaluatedRow(row, row.meta.serial % 100, "hard")])
            await queue.drop(judged, reason="evaluated", timeout=10)
            collector.evaluated(step)
            await collector.write()
        assert collector._open == {}
    first, second = (read_step(tmp_path, purpose="eval", step=step) for step in (0, 4))
    assert names(first) == names(second)
    assert len(first) == 3
    assert {(one.set, one.reward, one.failure, one.advantage) for one in first} == {("hard", 1.0, "", None)}
    assert {(one.reward, one.failure, one.details["detail"]) for one in second} == {(None, "raised", "boom")}


texts = st.text(max_size=20)
samples = st.builds(
    SampleText,
    purpose=st.just("train"),
    step=st.just(7),
    serial=st.integers(0, 1 << 40),
    sample=st.integers(0, 64),
    set=st.just(""),
    drawn=st.booleans(),
    prompt=texts,
    response=texts,
    answer=texts,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    failure=texts,
    advantage=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    prompt_tokens=st.integers(0, 9),
    response_tokens=st.integers(0, 9),
    version_min=st.integers(0, 9),
    version_max=st.integers(0, 9),
    finish=st.sampled_from(["stop", "length"]),
    details=st.dictionaries(texts, st.one_of(st.booleans(), st.integers(-9, 9), st.floats(-5, 5), texts), max_size=3),
)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@settings(max_examples=25)
@given(given_=st.lists(samples, max_size=4, unique_by=lambda sample: (sample.serial, sample.sample)))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, form: Format, given_: list[SampleText]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write_samples(folder, given_, purpose="train", step=7, form="jsonl" if form == "parquet" else "parquet")
    write_samples(folder, given_, purpose="train", step=7, form=form)
    assert [file.path.suffix for file in sample_files(folder)] == [f".{form}"]
    in_order = sorted(given_, key=lambda sample: (sample.serial, sample.sample))
    assert read_step(folder, purpose="train", step=7) == in_order


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, form: str) -> None:
    (tmp_path / SAMPLES).mkdir()
    (tmp_path / SAMPLES / f"step-000003.{form}").write_bytes(b"\x00nonsense")
    with pytest.raises(AsyncFlowError, match="step-000003"):
        read_step(tmp_path, purpose="train", step=3)
