"""One leased row on its way through an instance, and the settings under which it is made.

Invariant: what is generated for a row is a function of the row, the settings that all instances share and the weights;
nothing of the instance enters the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from asyncflow.api.names import LOSS_MASK
from asyncflow.data.base import Message, Prompt
from asyncflow.flow.instance import Work
from asyncflow.flow.schedule import VersionWindow
from asyncflow.identity import Version
from asyncflow.queue.protocol.messages import TOKENS_TAG, LeasedRow, Tag
from asyncflow.rewards.wire import Example, RewardResult
from asyncflow.rollout.engines.base import NOTHING, Completion, GenerationRequest
from asyncflow.rollout.sampling import purpose_seed
from asyncflow.rpc.columns import Jagged

INPUTS = ("prompt_ids", "task")
"""Columns that the ``rollout`` task reads: int32 ids, and a packed ``Prompt``."""
RESPONSE = ("response_ids", "logprobs", "versions")
"""Columns of a response: int32 ids, float32 log-probs, int64 packed versions, one entry a token; and ``LOSS_MASK``
where responses have several turns."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Settings that all instances of a job have in common.

    temperature, max_tokens: unless a row's tags name others; stop_ids, stop_texts: end a response; seed: of the
    sampling; group_sizes: samples of a prompt, by purpose; lease_s: of the ``rollout`` tasks; call_s: for one call to
    the queue; load_s: for the weights of rows that were claimed, which are given back afterwards; drain_s: for samples
    that are generated but not yet delivered when the instance leaves; mixes: whether a response may be made by several
    versions (``swapAt: token``); max_turns: of the model in one response; judges: whether responses are scored here,
    and not by a role of their own; probe_gap: most by which the engine's log-probs may differ on average from those
    published with the weights that it has loaded.
    """

    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    stop_texts: tuple[str, ...] = ()
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    lease_s: float = 60.0
    call_s: float = 10.0
    load_s: float = 120.0
    drain_s: float = 10.0
    mixes: bool = False
    max_turns: int = 1
    judges: bool = True
    probe_gap: float = 1e-3

    @property
    def response(self) -> tuple[str, ...]:
        """Columns of a response."""
        return (*RESPONSE, LOSS_MASK) if self.max_turns > 1 else RESPONSE


@dataclass(eq=False, kw_only=True)
class ClaimedGroup:
    """The rows of one prompt that one claim gave; see ``rollout.scoring``.

    examples: what is generated of them; scored: their rewards, None where the group came apart.
    """

    jobs: list[Job] = field(default_factory=list)
    examples: dict[Job, Example] = field(default_factory=dict, repr=False)
    scored: asyncio.Future[dict[Job, RewardResult] | None] | None = field(default=None, repr=False)

    @property
    def apart(self) -> bool:
        """True where a row left before the group was scored."""
        scored = self.scored is not None and self.scored.done() and self.scored.result() is not None
        return not scored and any(job.gone for job in self.jobs)

    def come_apart(self) -> None:
        """Let those that wait go, unless they are scored."""
        if self.scored is not None and not self.scored.done():
            self.scored.set_result(None)


@dataclass(eq=False, kw_only=True)
class Job:
    """A leased row. prompt is None until it is fetched; ``gone`` once it is no longer here; ``task`` makes it; group:
    the rows of its prompt that came with it, itself among them.

    begun: the beginning of the response, as an earlier holder left it; turn: what there is of it while its environment
    is asked; made: the response, once it is generated; kept: how many of its tokens are where the next holder finds
    them.
    """

    row: LeasedRow
    group: ClaimedGroup = field(default_factory=ClaimedGroup, repr=False)
    prompt_ids: tuple[int, ...] = ()
    prompt: Prompt | None = None
    begun: Completion = NOTHING
    turn: Completion | None = None
    made: Completion | None = None
    kept: int = 0
    gone: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.group.jobs.append(self)

    def needs(self, step: int, *, loaded: Version | None) -> bool:
        """Return whether the row may begin under version step ``step`` but not under the one loaded."""
        window = self.work.window
        here = loaded is not None and window.oldest <= loaded.step <= window.newest
        return window.oldest <= step <= window.newest and not here

    @property
    def generated(self) -> bool:
        """True once the response is generated."""
        return self.made is not None

    @property
    def purpose(self) -> Literal["train", "eval"]:
        """Purpose of the row."""
        return "eval" if self.row.meta.purpose == "eval" else "train"

    @property
    def work(self) -> Work:
        """The row as ``flow.instance`` sees it; the job itself is its name."""
        meta = self.row.meta
        return Work(self, self.purpose, VersionWindow(meta.min_version, meta.max_version))

    @property
    def was_begun(self) -> bool:
        """True where an earlier holder has left the beginning of a response, and none has finished it."""
        there = self.row.bytes
        return all(name in there for name in RESPONSE) and "reward" not in there

    @property
    def ended(self) -> Completion | None:
        """Response, or its part up to the end of a turn, that has ended here; None while the engine makes it."""
        return self.turn if self.made is None else self.made

    def request(self, settings: RolloutSettings, *, loaded: Version, continues: bool) -> GenerationRequest:
        """Return what the engine is asked for, which has the weights of ``loaded``. continues: whether it may go on.

        What was begun is continued by the weights that began it, in training rows also by newer ones where responses
        may mix versions, and else made anew.
        """
        meta, versions = self.row.meta, self.begun.versions
        max_tokens = int(meta.tags.get("max_tokens", settings.max_tokens))
        mixes = settings.mixes and self.purpose == "train"
        fits = (versions <= loaded.packed).all() if mixes else (versions == loaded.packed).all()
        return GenerationRequest(
            key=meta.key,
            prompt_ids=self.prompt_ids,
            max_tokens=max_tokens,
            temperature=float(meta.tags.get("temperature", settings.temperature)),
            stop_ids=settings.stop_ids,
            stop_texts=settings.stop_texts,
            seed=purpose_seed(settings.seed, meta.purpose),
            purpose=meta.purpose,
            continues=self.begun if continues and fits and len(versions) < max_tokens else NOTHING,
            episode=settings.max_turns > 1,
        )

    def example(self, transcript: list[Message]) -> Example:
        """Return what reward function and environment are asked about what has ended: the last turn is the response."""
        assert self.prompt is not None
        assert self.ended is not None
        return Example.of(self.prompt, transcript, length=len(self.ended))


@dataclass(frozen=True, kw_only=True)
class SampleOutcome:
    """A sample that is finished: what goes into the row's columns and tags.

    reward: None where it is scored elsewhere, and nothing has kept it from having a reward so far.
    """

    job: Job
    completion: Completion
    reward: RewardResult | None

    @property
    def tags(self) -> dict[str, Tag]:
        """The tags, so that counting and advantages need no fetch.

        Those of the reward; tokens: of the response; response_tokens: those that the model chose; turns: of the model,
        where there may be several; version_min, version_max: steps of its oldest and newest token.
        """
        versions = self.completion.versions
        steps = [Version.unpack(version).step for version in np.unique(versions).tolist()]
        masked = self.completion.loss_mask is not None
        return {
            **(self.reward.tags if self.reward is not None else {}),
            "finish": self.completion.finish,
            TOKENS_TAG: len(versions),
            "response_tokens": int(self.completion.chosen.sum()),
            **({"turns": sum(chosen for chosen, _ in self.completion.segments())} if masked else {}),
            "version_min": min(steps),
            "version_max": max(steps),
        }


def worth_saving(there: Mapping[Job, Completion], *, before: Collection[Job]) -> list[Job]:
    """Return the jobs whose responses are to be saved, as far as they are ``there``.

    before: those that were under way at the look before; what is younger, and was begun here, may soon be delivered.
    """
    return [job for job, so_far in there.items() if len(so_far) > job.kept and (job.kept or job in before)]


def response_columns(made: Sequence[Completion], *, names: Collection[str]) -> dict[str, Jagged]:
    """Return the columns of responses, finished or not. names: ``RolloutSettings.response``."""
    found = {
        "response_ids": Jagged.from_rows([completion.ids for completion in made], np.int32),
        "logprobs": Jagged.from_rows([completion.logprobs for completion in made], np.float32),
        "versions": Jagged.from_rows([completion.versions for completion in made], np.int64),
    }
    if LOSS_MASK in names:
        found[LOSS_MASK] = Jagged.from_rows([completion.chosen for completion in made], np.bool_)
    return found


def begun_of(columns: Mapping[str, Jagged], index: int) -> Completion:
    """Return the response, unfinished, that row ``index`` of a response's columns holds."""
    ids, logprobs, versions = (columns[name].row(index) for name in RESPONSE)
    mask = columns[LOSS_MASK].row(index) if LOSS_MASK in columns else None
    return Completion(ids=ids, logprobs=logprobs, versions=versions, finish="aborted", loss_mask=mask)


def columns(outcomes: Sequence[SampleOutcome], *, settings: RolloutSettings) -> dict[str, Jagged]:
    """Return the columns of a response, by outcome; and of one that is judged here reward float32[1] and details
    (uint8, JSON or nothing).
    """
    found = response_columns([outcome.completion for outcome in outcomes], names=settings.response)
    if settings.judges:
        judged = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        found["reward"] = Jagged.from_rows([[reward.value] for reward in judged], np.float32)
        found["details"] = Jagged.from_rows([np.frombuffer(reward.details, np.uint8) for reward in judged], np.uint8)
    return found
