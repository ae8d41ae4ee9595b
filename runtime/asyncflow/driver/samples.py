"""Selection of samples whose texts a run keeps, and their way from the queue into files.

In each step some samples are drawn by a hash of (seed, prompt, number in the group); the samples with the highest and
the lowest rewards are kept too. Whenever a group is decided, the choice is made among the samples so far. A newly
chosen sample is fetched immediately, in the background; a sample that better candidates replace is discarded. So each
step costs a few small reads, and no step waits for them: if a checkpoint commits a step before its last text was read,
that text is missing. Samples of an evaluation are read before they are dropped. Their hash uses the index of the prompt
in the sets instead of the serial, so every evaluation shows the same prompts.

Invariants: the draw depends on the seed and the keys of the samples only, not on the order in which they arrive; a
sample that is generated again replaces its earlier text; an error here neither ends a run nor changes the training; a
driver that takes over continues from the files and loses at most the texts since the last write.
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

from asyncflow.algorithms.base import OUTCOME
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
"""Column with the details that a reward function returned, as JSON, or empty."""
_OWN_FIELDS = frozenset(
    ("reward", "failure", "finish", TOKENS_TAG, "response_tokens", "version_min", "version_max", ROUND)
)
"""Tags that have their own fields in ``SampleText``, or that are of no use to a reader."""

Key: TypeAlias = tuple[int, int]
"""The serial of a prompt, or its index among the held-out prompts, and the sample's number in the group."""
FileKey: TypeAlias = tuple[Purpose, int]
"""The key of a file: a step, or the evaluation of its weights."""


class Criteria(NamedTuple):
    """Criteria of a choice. rank: hash of the key; reward: NaN for none."""

    rank: int
    reward: float


def rank_of(key: Key, *, seed: int) -> int:
    """Return the 64-bit hash of (seed, key) by which samples are drawn."""
    text = f"{seed}/{key[0]}/{key[1]}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The rule of choice. drawn: number of samples with the lowest ranks; extremes: number of samples with the highest
    rewards, and as many with the lowest.

    ``of`` is incremental: the choice among an earlier choice and further candidates is the choice among all candidates.
    """

    drawn: int
    extremes: int

    def of(self, candidates: Mapping[Key, Criteria]) -> set[Key]:
        """Return the chosen keys."""
        by_reward = {key: one.reward for key, one in candidates.items() if one.reward == one.reward}
        rank = {key: one.rank for key, one in candidates.items()}
        best = nsmallest(self.extremes, by_reward, key=lambda key: (-by_reward[key], rank[key]))
        worst = nsmallest(self.extremes, by_reward, key=lambda key: (by_reward[key], rank[key]))
        return {*self.draw(candidates), *best, *worst}

    def draw(self, candidates: Mapping[Key, Criteria]) -> set[Key]:
        """Return the drawn keys, which do not depend on rewards."""
        return set(nsmallest(self.drawn, candidates, key=lambda key: candidates[key].rank))


class _Wanted(NamedTuple):
    """A chosen sample whose text must be read."""

    row: LeasedRow
    advantage: float | None
    set: str = ""


@dataclass(kw_only=True)
class _Reservoir:
    """The samples of one step or evaluation: the chosen candidates, the texts read so far, and those still to read."""

    choice: Choice
    candidates: dict[Key, Criteria] = field(default_factory=dict)
    texts: dict[Key, SampleText] = field(default_factory=dict)
    wanted: dict[Key, _Wanted] = field(default_factory=dict)
    changed: bool = False
    written: float = 0.0

    def offer(self, offered: Mapping[Key, tuple[Criteria, _Wanted]]) -> None:
        """Repeat the choice with further samples; a sample with the key of another one replaces it."""
        self.candidates |= {key: candidate for key, (candidate, _) in offered.items()}
        chosen = self.choice.of(self.candidates)
        for key in self.candidates.keys() - chosen:
            del self.candidates[key]
            self.wanted.pop(key, None)
            self.changed |= self.texts.pop(key, None) is not None
        self.wanted |= {key: wanted for key, (_, wanted) in offered.items() if key in chosen}

    def take(self, key: Key, wanted: _Wanted, text: SampleText | None) -> None:
        """Store a text that was read, None if its row no longer exists, unless the sample was replaced meanwhile."""
        if self.wanted.get(key) is not wanted:
            return
        del self.wanted[key]
        if text is not None:
            self.texts[key] = text
            self.changed = True

    def sorted_texts(self) -> list[SampleText]:
        """Return the texts, with the field ``drawn`` set."""
        drawn = self.choice.draw(self.candidates)
        return [msgspec.structs.replace(text, drawn=key in drawn) for key, text in self.texts.items()]


class SampleCollector:
    """Keeps samples of one run in ``folder``.

    seed: seed of the draw; decode: returns the text of token ids; column: the column that the driver writes,
    see ``Algorithm.writes``.
    """

    def __init__(
        self,
        spec: SamplesSpec,
        *,
        queue: QueueClient,
        folder: Path,
        seed: int,
        decode: Callable[[Sequence[int]], str],
        column: str,
    ) -> None:
        self._spec = spec
        self._queue = queue
        self._folder = folder
        self._seed = seed
        self._decode = decode
        self._has_advantages = column != OUTCOME
        self._choices: dict[Purpose, Choice] = {
            "train": Choice(drawn=spec.per_step, extremes=spec.extremes),
            "eval": Choice(drawn=spec.per_evaluation, extremes=0),
        }
        self._open: dict[FileKey, _Reservoir] = {}
        self._trained_to = 0
        self._evaluated_steps: set[int] = set()
        self._more = asyncio.Event()
        self._failing = False

    def decided(self, step: int, group: DecidedGroup) -> None:
        """Choose among the samples of a group of ``step``."""
        if self._choices["train"] == Choice(drawn=0, extremes=0) or (step != 1 and step % self._spec.every):
            return
        offered = {}
        for row, advantage in zip(group.rows, group.advantages, strict=True):
            key = (row.meta.serial, row.meta.sample)
            offered[key] = self._candidate(key, row), _Wanted(row, float(advantage) if self._has_advantages else None)
        self._reservoir("train", step).offer(offered)
        self._more.set()

    def trained(self, step: int) -> None:
        """Finish the files of a trained step and of all steps before it."""
        self._trained_to = step
        self._more.set()

    async def run(self) -> None:
        """Read the wanted texts and write them; runs until the job ends. Raises the errors of the queue."""
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
        """Read the wanted texts of all steps."""
        self._more.clear()
        for (purpose, step), reservoir in list(self._open.items()):
            if purpose == "train" and reservoir.wanted:
                await self._fill(purpose, step, reservoir)

    async def write(self, *, everything: bool = False) -> None:
        """Write the changed files of finished steps and evaluations, and periodically those of unfinished steps.

        Finished steps without wanted texts are then forgotten. everything: write all changed files, as at the end of a
        run.
        """
        now = time.monotonic()
        for (purpose, step), reservoir in list(self._open.items()):
            training = purpose == "train"
            finished = step <= self._trained_to if training else step in self._evaluated_steps
            due = finished or everything or (training and now - reservoir.written >= WRITE_S)
            if reservoir.changed and due:
                reservoir.changed, reservoir.written = False, now
                await self._write(purpose, step, reservoir)
            if finished and not reservoir.wanted and not reservoir.changed:
                self._open.pop((purpose, step), None)
                if not training:
                    self._evaluated_steps.discard(step)

    async def evaluating(self, rows: Sequence[EvaluatedRow]) -> None:
        """Keep samples of an evaluation, whose rows are dropped next; texts that cannot be read in time are missing."""
        if not self._choices["eval"].drawn:
            return
        by_step: dict[int, dict[Key, tuple[Criteria, _Wanted]]] = {}
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
        self._evaluated_steps.add(step)
        self._more.set()

    def _reservoir(self, purpose: Purpose, step: int) -> _Reservoir:
        """Return the reservoir of a step or an evaluation; a new one of a step starts from the file of the step, if
        any.
        """
        if (purpose, step) not in self._open:
            reservoir = self._open[purpose, step] = _Reservoir(choice=self._choices[purpose])
            for text in self._written(purpose, step):
                key = (text.serial, text.sample)
                reservoir.texts[key] = text
                reservoir.candidates[key] = Criteria(rank_of(key, seed=self._seed), _reward(text.reward))
        return self._open[purpose, step]

    def _written(self, purpose: Purpose, step: int) -> list[SampleText]:
        if purpose == "eval":
            return []
        try:
            return read_step(self._folder, purpose=purpose, step=step)
        except AsyncFlowError as error:
            log.warning("the earlier samples of step %d cannot be read and are replaced: %s", step, error)
            return []

    def _candidate(self, key: Key, row: LeasedRow) -> Criteria:
        reward = None if failure_of(row) else row.meta.tags.get("reward")
        return Criteria(rank_of(key, seed=self._seed), _reward(None if reward is None else float(reward)))

    async def _fill(self, purpose: Purpose, step: int, reservoir: _Reservoir) -> None:
        wanted = dict(reservoir.wanted)
        for key, text in (await self._texts(purpose, step, wanted)).items():
            reservoir.take(key, wanted[key], text)

    async def _texts(self, purpose: Purpose, step: int, wanted: Mapping[Key, _Wanted]) -> dict[Key, SampleText | None]:
        """Return the texts, None for a row that no longer exists or cannot be read."""
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
        except Exception:  # from the tokenizer: ids that it cannot decode must not end the run
            log.exception("%d samples of step %d are missing: they cannot be decoded", len(wanted), step)
            return dict.fromkeys(wanted)

    def _decoded(
        self, purpose: Purpose, step: int, wanted: Mapping[Key, _Wanted], cells: Mapping[str, Jagged]
    ) -> dict[Key, SampleText | None]:
        texts: dict[Key, SampleText | None] = {}
        for index, (key, (row, advantage, name)) in enumerate(wanted.items()):
            prompt, response, task = (cells[column].row(index) for column in _COLUMNS)
            tags, failure = row.meta.tags, failure_of(row)
            details = cells[_DETAILS].row(index).tobytes() if _DETAILS in cells else b""
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
                details={tag: _json_value(value) for tag, value in tags.items() if tag not in _OWN_FIELDS}
                | _details(details),
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
                log.warning("samples cannot be written; the write will be retried: %s", error)
            self._failing = True
        except Exception:  # from a library that makes the file: missing texts must not end the run
            log.exception("samples of step %d cannot be put into a file", step)
        else:
            self._failing = False


def _reward(value: float | None) -> float:
    return float("nan") if value is None else value


def _json_value(value: Tag) -> Tag:
    """Return a tag as a JSON value: numbers that JSON does not allow (infinity, NaN) become strings."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _details(encoded: bytes) -> dict[str, Any]:
    """Return the details that a reward function returned, empty if there are none."""
    try:
        return msgspec.json.decode(encoded, type=dict[str, Any]) if encoded else {}
    except msgspec.MsgspecError:
        return {}


def _answer(task: bytes) -> str:
    """Return the answer of a packed prompt as JSON, "" if there is none."""
    try:
        answer = Prompt.unpack(task).answer
    except msgspec.DecodeError:
        return ""
    return "" if answer is None else msgspec.json.encode(answer).decode()
