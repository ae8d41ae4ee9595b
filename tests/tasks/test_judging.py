"""The reward as a task: what is written of each row, in whatever order and company it comes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from asyncflow.api.names import LOSS_MASK
from asyncflow.data.base import ENVIRONMENT, MODEL, Message, Prompt
from asyncflow.environments.transcripts import Transcriber, stop_ids_of
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta, Tag
from asyncflow.rewards.wire import Example, RewardResult
from asyncflow.rpc.columns import Jagged
from asyncflow.tasks.judging import REWARD_COLUMNS, Judge
from asyncflow.tasks.rows import TaggedValues, columns_of

END, OTHER_END = 1, 2


class Lengths:
    """Rewards that are the number of tokens, or a failure for a response of one token; ``by_group`` as told."""

    def __init__(self, *, by_group: bool = False) -> None:
        self.by_group = by_group
        self.asked: list[list[Example]] = []

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def score(self, examples: Sequence[Example]) -> list[RewardResult]:
        self.asked.append(list(examples))
        return [self._of(example) for example in examples]

    def _of(self, example: Example) -> RewardResult:
        if example.length == 1:
            return RewardResult(value=0.0, failure="raised", detail="KeyError: 1")
        details = json.dumps({"said": example.response}).encode()
        return RewardResult(value=example.length, components={"long": 2.0 * example.length}, details=details)


def tokenizer() -> Tokenizer:
    core = tokenizers.Tokenizer(WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    core.add_special_tokens(["w2"])
    core.pre_tokenizer = WhitespaceSplit()
    return Tokenizer(core, eos_ids=[END], pad_id=END)


def judge(rewards: Lengths) -> Judge:
    spoken = tokenizer()
    transcriber = Transcriber(tokenizer=spoken, stop_ids=stop_ids_of(spoken, ["w2", "no token"]))
    return Judge(rewards, transcriber=transcriber, sizes={"train": 3, "eval": 2})


def row(serial: int, sample: int, *, purpose: str = "train", tags: dict[str, Tag] | None = None) -> LeasedRow:
    meta = RowMeta(partition=purpose, serial=serial, sample=sample, step=1, purpose=purpose, tags=tags or {})
    return LeasedRow(row=10 * serial + sample, meta=meta, attempt=0, lease="a", until=1.0, unit=0, bytes={})


def columns(responses: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] = ()) -> dict[str, Jagged]:
    packed = Prompt(question="q", answer="a", meta={"size": 3}).packed()
    found = {
        "task": Jagged.from_rows([np.frombuffer(packed, np.uint8)] * len(responses), np.uint8),
        "response_ids": Jagged.from_rows(responses, np.int32),
    }
    return found | ({LOSS_MASK: Jagged.from_rows(masks, np.bool_)} if masks else {})


def failures(outcomes: Sequence[TaggedValues]) -> list[Tag]:
    return [outcome.tags.get("failure", "") for outcome in outcomes]


async def test_a_response_is_scored_as_a_rollout_would_have_it_scored() -> None:
    rewards = Lengths()
    rows = [row(0, 0), row(1, 2), row(1, 0)]
    scored = await judge(rewards).compute(rows, columns([[5, 6, END], [7, 8], [9]]))
    assert [example.response for (asked,) in [rewards.asked] for example in asked] == ["w5 w6", "w7 w8", "w9"]
    first = rewards.asked[0][0]
    assert (first.prompt, first.answer, first.meta, first.length) == ("q", "a", {"size": 3}, 3)
    assert [outcome.values["reward"].tolist() for outcome in scored] == [[3.0], [2.0], [0.0]]
    assert scored[0].tags == {"reward": 3.0, "reward/long": 6.0}
    assert scored[2].tags == {"reward": 0.0, "failure": "raised", "detail": "KeyError: 1"}
    written = columns_of(scored, REWARD_COLUMNS)
    assert json.loads(written["details"].row(1).tobytes()) == {"said": "w7 w8"}
    assert written["details"].lengths[2] == 0


async def test_turns_and_observations_are_read_from_the_loss_mask() -> None:
    rewards = Lengths()
    mask = [True, True, False, False, True, True]
    await judge(rewards).compute([row(0, 0)], columns([[5, OTHER_END, 6, 7, 8, END]], [mask]))
    (example,) = rewards.asked[0]
    said = [Message(MODEL, "w5"), Message(ENVIRONMENT, "w6 w7"), Message(MODEL, "w8")]
    assert (example.transcript, example.response, example.length) == (said, "w8", 6)


async def test_a_row_that_failed_before_keeps_its_reason() -> None:
    rewards = Lengths(by_group=True)
    failed = row(4, 1, tags={"failure": "timeout", "detail": "the environment: too long"})
    scored = await judge(rewards).compute([row(4, 0), failed, row(4, 2)], columns([[5, 6], [7, 8], [5, 6, 7]]))
    assert len(rewards.asked[0]) == 3, "the others of its prompt are compared with it all the same"
    assert scored[1].tags == {"reward": 0.0}, "the tag failure stays as it is"
    assert scored[1].values["details"].size == 0
    assert [outcome.tags["reward"] for outcome in scored] == [2.0, 0.0, 3.0]


async def test_functions_over_groups_are_given_whole_ones_in_the_order_of_their_samples() -> None:
    rewards = Lengths(by_group=True)
    rows = [row(2, 1), row(1, 2), row(2, 0), row(1, 0), row(1, 1), row(3, 0, purpose="eval")]
    rows.append(row(3, 1, purpose="eval"))
    scored = await judge(rewards).compute(rows, columns([[5] * length for length in (2, 3, 4, 5, 6, 7, 8)]))
    assert sorted([example.length for example in asked] for asked in rewards.asked) == [[5, 6, 3], [7, 8]]
    assert failures(scored) == ["incomplete", "", "incomplete", "", "", "", ""]
    assert scored[0].tags["detail"] == "the function needs all samples of a prompt, but only 2 of 3 are available"
    assert [outcome.tags["reward"] for outcome in scored] == [0.0, 3.0, 0.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize("by_group", [False, True])
async def test_whatever_fails_is_an_outcome_of_its_row(by_group: bool) -> None:
    scored = await judge(Lengths(by_group=by_group)).compute(
        [row(0, sample) for sample in range(3)], columns([[5], [6, 7], [8]])
    )
    assert failures(scored) == ["raised", "", "raised"]
