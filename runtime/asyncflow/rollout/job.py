"""One leased row on its way through an instance, and the settings for its generation.

Invariant: the response to a row is a function of the row, the settings that all instances share, and the weights. A
request contains nothing that depends on the instance.
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
from asyncflow.identity import Version, steps_of
from asyncflow.queue.protocol.messages import TOKENS_TAG, LeasedRow, Tag
from asyncflow.rewards.wire import Example, RewardResult
from asyncflow.rollout.engines.base import NOTHING, Completion, GenerationRequest
from asyncflow.rollout.sampling import purpose_seed
from asyncflow.rpc.columns import Jagged

INPUTS = ("prompt_ids", "task")
"""Columns that the ``rollout`` task reads: int32 ids, and a packed ``Prompt``."""
RESPONSE = ("response_ids", "logprobs", "versions")
"""Columns of a response: int32 ids, float32 log-probs, int64 packed versions, one entry per token; also ``LOSS_MASK``
if responses have several turns.
"""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Settings that all instances of a job share.

    temperature, max_tokens: defaults, which a row's tags may override; stop_ids, stop_texts: end a response.
    seed: of the sampling; group_sizes: number of samples of a prompt, by purpose.
    lease_s: duration of a lease of the ``rollout`` task; call_s: timeout of one call to the queue.
    load_s, lost_s: time to wait for the weights of claimed rows, and for a process that holds them if none does; the
    rows are given back afterwards.
    drain_s: time to deliver generated samples when the instance leaves.
    mixes: whether several versions may make one response (``swapAt: token``); max_turns: of the model in one response.
    scores_here: whether responses are scored here, and not by a separate role.
    probe_gap: largest allowed mean difference of the engine's log-probs from those published with the loaded weights.
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
    lost_s: float = 5.0
    drain_s: float = 10.0
    mixes: bool = False
    max_turns: int = 1
    scores_here: bool = True
    probe_gap: float = 1e-3

    @property
    def response(self) -> tuple[str, ...]:
        """Columns of a response."""
        return (*RESPONSE, LOSS_MASK) if self.max_turns > 1 else RESPONSE


@dataclass(eq=False, kw_only=True)
class ClaimedGroup:
    """The rows of one prompt from one claim; see ``rollout.scoring``.

    examples: the generated samples, as input of the reward function; scored: their rewards, None if it is broken up.
    """

    jobs: list[Job] = field(default_factory=list)
    examples: dict[Job, Example] = field(default_factory=dict, repr=False)
    scored: asyncio.Future[dict[Job, RewardResult] | None] | None = field(default=None, repr=False)

    @property
    def broken(self) -> bool:
        """True if a row left before the group was scored."""
        scored = self.scored is not None and self.scored.done() and self.scored.result() is not None
        return not scored and any(job.gone for job in self.jobs)

    def break_up(self) -> None:
        """Release the samples that wait for the group's rewards, unless it is scored."""
        if self.scored is not None and not self.scored.done():
            self.scored.set_result(None)


@dataclass(eq=False, kw_only=True)
class Job:
    """A leased row.

    prompt: None until it is fetched; gone: whether the row is no longer held here; task: generates the response.
    group: the rows of its prompt from the same claim, including this one.
    partial: start of the response by an earlier holder; turn: partial response while its environment answers.
    response: the response, once it is generated; saved_tokens: number of its tokens that the next holder would find.
    """

    row: LeasedRow
    group: ClaimedGroup = field(default_factory=ClaimedGroup, repr=False)
    prompt_ids: tuple[int, ...] = ()
    prompt: Prompt | None = None
    partial: Completion = NOTHING
    turn: Completion | None = None
    response: Completion | None = None
    saved_tokens: int = 0
    gone: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.group.jobs.append(self)

    def needs(self, step: int, *, loaded: Version | None) -> bool:
        """Return whether the row may be made under the version of ``step`` but not under the loaded one."""
        window = self.work.window
        loaded_fits = loaded is not None and window.oldest <= loaded.step <= window.newest
        return window.oldest <= step <= window.newest and not loaded_fits

    @property
    def generated(self) -> bool:
        """True once the response is generated."""
        return self.response is not None

    @property
    def awaits_group(self) -> bool:
        """True while the response waits for others of its group, with which it is scored, to be generated."""
        return self in self.group.examples and len(self.group.examples) < len(self.group.jobs)

    @property
    def purpose(self) -> Literal["train", "eval"]:
        """Purpose of the row."""
        return "eval" if self.row.meta.purpose == "eval" else "train"

    @property
    def work(self) -> Work:
        """The row as input of ``flow.instance``; the job itself is its id."""
        meta = self.row.meta
        return Work(self, self.purpose, VersionWindow(meta.min_version, meta.max_version))

    @property
    def has_partial(self) -> bool:
        """True if an earlier holder has left the start of a response, and no holder has finished it."""
        lengths = self.row.bytes
        return all(name in lengths for name in RESPONSE) and "reward" not in lengths

    @property
    def ended(self) -> Completion | None:
        """The response, or its part up to the end of a turn, once it has ended here; None while it is generated."""
        return self.turn if self.response is None else self.response

    def request(self, settings: RolloutSettings, *, loaded: Version, continues: bool) -> GenerationRequest:
        """Return the request for the engine, which has loaded ``loaded`` and, if ``continues``, may continue responses.

        A partial response is continued if the loaded version made all of it. In training rows, a newer version may also
        continue it if responses may mix versions. Otherwise the response is made from scratch.
        """
        meta, versions = self.row.meta, self.partial.versions
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
            continues=self.partial if continues and fits and len(versions) < max_tokens else NOTHING,
            episode=settings.max_turns > 1,
        )

    def example(self, transcript: list[Message]) -> Example:
        """Return the input for the reward function or the environment; its response is the last turn that has ended."""
        assert self.prompt is not None
        assert self.ended is not None
        return Example.of(self.prompt, transcript, length=len(self.ended))


@dataclass(frozen=True, kw_only=True)
class SampleOutcome:
    """A finished sample, from which the row's columns and tags are made.

    reward: None if it is scored elsewhere and has not failed so far.
    """

    job: Job
    completion: Completion
    reward: RewardResult | None

    @property
    def tags(self) -> dict[str, Tag]:
        """The tags of the row, so that counting and advantages need no fetch.

        Tags of the reward; finish; tokens: of the response; response_tokens: those that the model chose; turns: of the
        model, if there may be several; version_min, version_max: steps of the versions of its oldest and newest token.
        """
        versions = self.completion.versions
        steps = steps_of(versions)
        masked = self.completion.loss_mask is not None
        return {
            **(self.reward.tags if self.reward is not None else {}),
            "finish": self.completion.finish,
            TOKENS_TAG: len(versions),
            "response_tokens": int(self.completion.chosen.sum()),
            **({"turns": sum(chosen for chosen, _ in self.completion.segments())} if masked else {}),
            "version_min": int(steps.min()),
            "version_max": int(steps.max()),
        }


def worth_saving(partial: Mapping[Job, Completion], *, before: Collection[Job]) -> list[Job]:
    """Return the jobs whose partial responses are to be saved.

    before: jobs that were running at the previous check. A younger one that started here may soon be delivered.
    """
    return [
        job for job, part in partial.items() if len(part) > job.saved_tokens and (job.saved_tokens or job in before)
    ]


def response_columns(made: Sequence[Completion], *, names: Collection[str]) -> dict[str, Jagged]:
    """Return the columns of responses, complete or partial. names: ``RolloutSettings.response``."""
    found = {
        "response_ids": Jagged.from_rows([completion.ids for completion in made], np.int32),
        "logprobs": Jagged.from_rows([completion.logprobs for completion in made], np.float32),
        "versions": Jagged.from_rows([completion.versions for completion in made], np.int64),
    }
    if LOSS_MASK in names:
        found[LOSS_MASK] = Jagged.from_rows([completion.chosen for completion in made], np.bool_)
    return found


def partial_of(columns: Mapping[str, Jagged], index: int) -> Completion:
    """Return the partial response in row ``index`` of a response's columns."""
    ids, logprobs, versions = (columns[name].row(index) for name in RESPONSE)
    mask = columns[LOSS_MASK].row(index) if LOSS_MASK in columns else None
    return Completion(ids=ids, logprobs=logprobs, versions=versions, finish="aborted", loss_mask=mask)


def columns(outcomes: Sequence[SampleOutcome], *, settings: RolloutSettings) -> dict[str, Jagged]:
    """Return the columns of outcomes: the response and, if scored here, reward float32[1] and details (uint8: JSON)."""
    found = response_columns([outcome.completion for outcome in outcomes], names=settings.response)
    if settings.scores_here:
        judged = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        found["reward"] = Jagged.from_rows([[reward.value] for reward in judged], np.float32)
        found["details"] = Jagged.from_rows([np.frombuffer(reward.details, np.uint8) for reward in judged], np.uint8)
    return found
