"""Texts of samples that a run keeps: which, and how they come out of the queue into files.

Of each step some samples are drawn by a hash of (seed, prompt, number in the group), and those with the highest and the
lowest rewards are kept beside them. The choice is made as groups are decided, of what is known so far; a sample that is
chosen is fetched at once, in the background, and one that others push out is forgotten. So each step costs a few small
reads, and no step waits for them: where a checkpoint commits a step before its last text was read, that one is missing.
Samples of an evaluation are read before they are dropped; there the hash is of the prompt's place, so that every
evaluation shows the same prompts.

Invariants: which samples are drawn is a function of the seed and of the samples' names, whatever came when; a sample
that is made again takes its own place; nothing that goes wrong here ends a run or changes what is trained; a driver
that takes over goes on from the files, and lacks at most what the one before had read since its last write.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from asyncflow.api.durability import SamplesSpec
from asyncflow.data.base import Prompt
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.evaluation import ROUND, EvaluatedRow
from asyncflow.driver.groups import DecidedGroup, failure_of
from asyncflow.driver.sample_files import Purpose, SampleText, read_step, write_samples
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, Refused, StaleHandle
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import TOKENS_TAG, LeasedRow, Tag
from asyncflow.rpc.columns import Jagged

log = logging.getLogger(__name__)

WRITE_S = 0.25
"""Seconds between two writes of a step that is not trained yet."""
FETCH_S = 10.0
_COLUMNS = ("prompt_ids", "response_ids", "task")
_DETAILS = "details"
"""Column with what a reward function told of a sample, JSON or nothing."""
_OWN_FIELDS = frozenset(
    ("reward", "failure", "finish", TOKENS_TAG, "response_tokens", "version_min", "version_max", ROUND)
)
"""Tags that a ``SampleText`` has fields for, or that mean nothing to a reader."""

Key: TypeAlias = tuple[int, int]
"""A prompt, by its serial or its place among the held-out ones, and the sample's number in the group."""
Kept: TypeAlias = tuple[Purpose, int]
"""What has a file: a step, or the evaluation of its weights."""


class Grounds(NamedTuple):
    """Grounds of a choice. rank: the hash of the name."""

    rank: int
    reward: float


def rank_of(key: Key, *, seed: int) -> int:
    """Return the 64-bit hash of (seed, key) by which samples are drawn."""
    words = f"{seed}/{key[0]}/{key[1]}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "big")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The rule of choice. drawn: samples with the least ranks; extremes: with the highest rewards, and the lowest.

    ``of`` may be applied to what it returned for a part, together with the rest: the result is that for all at once.
    """

    drawn: int
    extremes: int

    def of(self, candidates: Mapping[Key, Grounds]) -> set[Key]:
        """Return the chosen keys."""
        by_reward = {key: one.reward for key, one in candidates.items() if one.reward == one.reward}
        rank = {key: one.rank for key, one in candidates.items()}
        best = nsmallest(self.extremes, by_reward, key=lambda key: (-by_reward[key], rank[key]))
        worst = nsmallest(self.extremes, by_reward, key=lambda key: (by_reward[key], rank[key]))
        return {*self.draw(candidates), *best, *worst}

    def draw(self, candidates: Mapping[Key, Grounds]) -> set[Key]:
        """Return the keys that are drawn, whatever their rewards."""
        return set(nsmallest(self.drawn, candidates, key=lambda key: candidates[key].rank))


class _Wanted(NamedTuple):
    """A chosen sample whose text is to be read."""

    row: LeasedRow
    advantage: float | None
    set: str = ""


@dataclass(kw_only=True)
class _Reservoir:
    """The samples of one step or evaluation: what is chosen so far, which texts are there, and which are wanted."""

    choice: Choice
    candidates: dict[Key, Grounds] = field(default_factory=dict)
    texts: dict[Key, SampleText] = field(default_factory=dict)
    wanted: dict[Key, _Wanted] = field(default_factory=dict)
    changed: bool = False
    written: float = 0.0

    def offer(self, offered: Mapping[Key, tuple[Grounds, _Wanted]]) -> None:
        """Choose anew, now that these samples are there, too; one with the name of another takes its place."""
        self.candidates |= {key: candidate for key, (candidate, _) in offered.items()}
        chosen = self.choice.of(self.candidates)
        for key in self.candidates.keys() - chosen:
            del self.candidates[key]
            self.wanted.pop(key, None)
            self.changed |= self.texts.pop(key, None) is not None
        self.wanted |= {key: wanted for key, (_, wanted) in offered.items() if key in chosen}

    def take(self, key: Key, wanted: _Wanted, text: SampleText | None) -> None:
        """Put in a text that was read, None where it is gone, if it is still wanted."""
        if self.wanted.get(key) is not wanted:
            return
        del self.wanted[key]
        if text is not None:
            self.texts[key] = text
            self.changed = True

    def sorted_texts(self) -> list[SampleText]:
        """Return the texts, each of which says whether it was drawn."""
        drawn = self.choice.draw(self.candidates)
        return [msgspec.structs.replace(text, drawn=key in drawn) for key, text in self.texts.items()]


class SampleCollector:
    """Keeps samples of one run in ``folder``.

    seed: of the draw; decode: returns the text of token ids.
    """

    def __init__(
        self,
        spec: SamplesSpec,
        *,
        queue: QueueClient,
        folder: Path,
        seed: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._spec = spec
        self._queue = queue
        self._folder = folder
        self._seed = seed
        self._decode = decode
        self._choices: dict[Purpose, Choice] = {
            "train": Choice(drawn=spec.per_step, extremes=spec.extremes),
            "eval": Choice(drawn=spec.per_evaluation, extremes=0),
        }
        self._open: dict[Kept, _Reservoir] = {}
        self._over = 0
        self._judged: set[int] = set()
        self._more = asyncio.Event()
        self._failing = False

    def decided(self, step: int, group: DecidedGroup) -> None:
        """Choose among the samples of a group of ``step``."""
        if self._choices["train"] == Choice(drawn=0, extremes=0) or (step != 1 and step % self._spec.every):
            return
        offered = {}
        for row, advantage in zip(group.rows, group.advantages, strict=True):
            key = (row.meta.serial, row.meta.sample)
            offered[key] = self._candidate(key, row), _Wanted(row, float(advantage))
        self._reservoir("train", step).offer(offered)
        self._more.set()

    def trained(self, step: int) -> None:
        """Finish the file of a step that was trained, and those before it."""
        self._over = step
        self._more.set()

    async def run(self) -> None:
        """Read what is wanted, and write it, for as long as the job lasts. Raises as the queue does."""
        while True:
            await self.read()
            await self.write()
            due = any(reservoir.changed for reservoir in self._open.values())
            try:
                async with asyncio.timeout(WRITE_S if due else None):
                    await self._more.wait()
            except TimeoutError:
                continue

    async def read(self) -> None:
        """Read the texts that are wanted of steps."""
        self._more.clear()
        for (purpose, step), reservoir in list(self._open.items()):
            if purpose == "train" and reservoir.wanted:
                await self._fill(purpose, step, reservoir)

    async def write(self, *, everything: bool = False) -> None:
        """Write what has changed and is over, of other steps now and then; forget what is over.

        everything: all that has changed is due, as at the end of the run.
        """
        now = time.monotonic()
        for (purpose, step), reservoir in list(self._open.items()):
            training = purpose == "train"
            over = step <= self._over if training else step in self._judged
            due = over or everything or (training and now - reservoir.written >= WRITE_S)
            if reservoir.changed and due:
                reservoir.changed, reservoir.written = False, now
                await self._write(purpose, step, reservoir)
            if over and not reservoir.wanted and not reservoir.changed:
                self._open.pop((purpose, step), None)
                if not training:
                    self._judged.discard(step)

    async def evaluating(self, rows: Sequence[EvaluatedRow]) -> None:
        """Keep samples of an evaluation, which are dropped next; what cannot be read in time is missing."""
        if not self._choices["eval"].drawn:
            return
        by_step: dict[int, dict[Key, tuple[Grounds, _Wanted]]] = {}
        for row, place, name in rows:
            key = (place, row.meta.sample)
            by_step.setdefault(row.meta.step, {})[key] = self._candidate(key, row), _Wanted(row, None, name)
        for step, offered in by_step.items():
            reservoir = self._reservoir("eval", step)
            reservoir.offer(offered)
            try:
                await self._fill("eval", step, reservoir)
            except (PeerLost, DeadlineExceeded) as error:
                log.info("samples of the evaluation of θ_%d are missing: %s", step, error)
            reservoir.wanted.clear()

    def evaluated(self, step: int) -> None:
        """Finish the file of an evaluation."""
        self._judged.add(step)
        self._more.set()

    def _reservoir(self, purpose: Purpose, step: int) -> _Reservoir:
        """Return that of a step or an evaluation, begun from what an earlier driver, or attempt, has written."""
        if (purpose, step) not in self._open:
            reservoir = self._open[purpose, step] = _Reservoir(choice=self._choices[purpose])
            for text in self._written(purpose, step):
                key = (text.serial, text.sample)
                reservoir.texts[key] = text
                reservoir.candidates[key] = Grounds(rank_of(key, seed=self._seed), _reward(text.reward))
        return self._open[purpose, step]

    def _written(self, purpose: Purpose, step: int) -> list[SampleText]:
        if purpose == "eval":
            return []
        try:
            return read_step(self._folder, purpose=purpose, step=step)
        except AsyncFlowError as error:
            log.warning("the samples of step %d begin anew: %s", step, error)
            return []

    def _candidate(self, key: Key, row: LeasedRow) -> Grounds:
        reward = None if failure_of(row) else row.meta.tags.get("reward")
        return Grounds(rank_of(key, seed=self._seed), _reward(None if reward is None else float(reward)))

    async def _fill(self, purpose: Purpose, step: int, reservoir: _Reservoir) -> None:
        wanted = dict(reservoir.wanted)
        for key, text in (await self._texts(purpose, step, wanted)).items():
            reservoir.take(key, wanted[key], text)

    async def _texts(self, purpose: Purpose, step: int, wanted: Mapping[Key, _Wanted]) -> dict[Key, SampleText | None]:
        """Return the texts, None for a row that is gone."""
        rows = [each.row for each in wanted.values()]
        columns = [*_COLUMNS, _DETAILS] if all(_DETAILS in row.bytes for row in rows) else _COLUMNS
        try:
            cells = await self._queue.fetch(rows, columns, timeout=min(FETCH_S, CALL_TIMEOUT_S))
        except StaleHandle:
            if len(wanted) == 1:
                return dict.fromkeys(wanted)
            halves = list(wanted.items())
            parts = [dict(halves[: len(halves) // 2]), dict(halves[len(halves) // 2 :])]
            return {key: text for part in parts for key, text in (await self._texts(purpose, step, part)).items()}
        except Refused as error:
            log.warning("%d samples of step %d are missing: %s", len(wanted), step, error)
            return dict.fromkeys(wanted)
        try:
            return await asyncio.to_thread(self._decoded, purpose, step, wanted, cells)
        except Exception:  # of the tokenizer: ids that it does not know how to say end no run
            log.exception("%d samples of step %d are missing: they cannot be decoded", len(wanted), step)
            return dict.fromkeys(wanted)

    def _decoded(
        self, purpose: Purpose, step: int, wanted: Mapping[Key, _Wanted], cells: Mapping[str, Jagged]
    ) -> dict[Key, SampleText | None]:
        texts: dict[Key, SampleText | None] = {}
        for index, (key, (row, advantage, name)) in enumerate(wanted.items()):
            prompt, response, task = (cells[column].row(index) for column in _COLUMNS)
            tags, failure = row.meta.tags, failure_of(row)
            told = cells[_DETAILS].row(index).tobytes() if _DETAILS in cells else b""
            texts[key] = SampleText(
                purpose=purpose,
                step=step,
                serial=key[0],
                sample=key[1],
                set=name,
                drawn=False,
                prompt=self._decode(prompt.tolist()),
                response=self._decode(response.tolist()),
                answer=_answer(task.tobytes()),
                reward=None if failure or "reward" not in tags else float(tags["reward"]),
                failure=failure,
                advantage=advantage,
                prompt_tokens=len(prompt),
                response_tokens=len(response),
                version_min=int(tags.get("version_min", 0)),
                version_max=int(tags.get("version_max", 0)),
                finish=str(tags.get("finish", "")),
                details={tag: _sayable(value) for tag, value in tags.items() if tag not in _OWN_FIELDS}
                | _details(told),
            )
        return texts

    async def _write(self, purpose: Purpose, step: int, reservoir: _Reservoir) -> None:
        texts = reservoir.sorted_texts()

        def write() -> None:
            write_samples(self._folder, texts, purpose=purpose, step=step, form=self._spec.format)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            reservoir.changed = True
            if not self._failing:
                log.warning("samples cannot be written, they are kept until they can: %s", error)
            self._failing = True
        except Exception:  # of a library that makes the file: no text is worth a run
            log.exception("samples of step %d cannot be put into a file", step)
        else:
            self._failing = False


def _reward(value: float | None) -> float:
    return float("nan") if value is None else value


def _sayable(value: Tag) -> Tag:
    """Return a tag as JSON can say it, which knows no infinite numbers."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _details(told: bytes) -> dict[str, Any]:
    """Return what a reward function told, which may be nothing."""
    try:
        return msgspec.json.decode(told, type=dict[str, Any]) if told else {}
    except msgspec.MsgspecError:
        return {}


def _answer(task: bytes) -> str:
    """Return the answer of a packed prompt as JSON, "" where there is none."""
    try:
        answer = Prompt.unpack(task).answer
    except msgspec.DecodeError:
        return ""
    return "" if answer is None else msgspec.json.encode(answer).decode()
