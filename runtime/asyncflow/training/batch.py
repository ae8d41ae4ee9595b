"""One rank's part of a slot: whole samples with all data that a gradient needs.

Invariant: log-probs, versions and loss mask of a sample have one entry per response token; any other batch is refused
with an error that names the sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncflow.algorithms.base import OUTCOME
from asyncflow.api.graph import REF_LOGPROBS
from asyncflow.api.names import LOSS_MASK
from asyncflow.errors import ProtocolError
from asyncflow.identity import SampleKey
from asyncflow.rpc.columns import Jagged

COLUMNS = ("prompt_ids", "response_ids", "logprobs", "versions", "reward")
"""Columns that a trainer fetches for each row, in addition to the driver's column ``advantage`` or ``outcome``."""


_KNOWN = (*COLUMNS, "advantage", OUTCOME, LOSS_MASK, REF_LOGPROBS)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """n samples with their columns.

    prompts, responses: token ids.
    logprobs: the engine's log-probs, float.
    versions: packed version of each response token, int64.
    advantages: one per sample, [n].
    token_advantages: one per response token; used in place of ``advantages`` if present.
    outcomes: rewards from which a backend computes advantages, [n], for a batch without the two fields above.
    loss_mask: whether each response token counts in the loss; None if all count.
    rewards: rewards, [n], for reports only.
    old, values, returns: log-probs of the old policy, values of the critic and estimated returns of the response
        tokens, if a backend has computed them before the updates of a step; otherwise None.
    reference: log-probs under θ_0, if a separate role has computed them; otherwise None.
    extra: columns of users' tasks, by name.
    """

    keys: Sequence[SampleKey]
    prompts: Jagged
    responses: Jagged
    logprobs: Jagged
    versions: Jagged
    advantages: NDArray[np.float32] | None = None
    token_advantages: Jagged | None = None
    outcomes: NDArray[np.float32] | None = None
    loss_mask: Jagged | None = None
    rewards: NDArray[np.float32] | None = None
    old: Jagged | None = None
    values: Jagged | None = None
    returns: Jagged | None = None
    reference: Jagged | None = None
    extra: Mapping[str, Jagged] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> MicroBatch:
        """Return the batch of a rank that has no samples in a slot."""
        ids = Jagged.from_rows([], "int32")
        return cls(
            keys=(),
            prompts=ids,
            responses=ids,
            logprobs=Jagged.from_rows([], "float32"),
            versions=Jagged.from_rows([], "int64"),
            advantages=np.zeros(0, np.float32),
            outcomes=np.zeros(0, np.float32),
        )

    @classmethod
    def of(cls, keys: Sequence[SampleKey], columns: Mapping[str, Jagged]) -> MicroBatch:
        """Build a batch from fetched columns, in the order of ``keys``.

        Each cell of ``advantage`` has one entry, or one entry per response token, or one per turn of the model. Raises
        ProtocolError if the columns contradict each other, or if a reward is not finite.
        """
        responses, advantage = columns["response_ids"], columns.get("advantage")
        expected = dict.fromkeys(("logprobs", "versions", LOSS_MASK, REF_LOGPROBS), responses)
        if by_token := advantage is not None and bool((advantage.lengths != 1).any()):
            columns = {**columns, "advantage": _by_token(advantage, responses, columns.get(LOSS_MASK))}
            expected["advantage"] = responses
        for name, column in columns.items():
            if len(column) != len(keys):
                raise ProtocolError(f"column {name} has {len(column)} rows for {len(keys)} samples", where="trainer")
            lengths = expected[name].lengths if name in expected else None
            if lengths is None and name in ("advantage", "reward", OUTCOME):
                lengths = np.ones(len(keys), dtype=np.int64)
            if lengths is None:
                continue
            mismatched = np.flatnonzero(column.lengths != lengths)
            if len(mismatched):
                raise ProtocolError(
                    f"sample {tuple(keys[mismatched[0]])}: {name} has "
                    f"{len(column.row(int(mismatched[0])))} entries, not {lengths[mismatched[0]]}",
                    where="trainer",
                )
        rewards = _numbers(columns.get("reward"))
        if rewards is not None and len(invalid := np.flatnonzero(~np.isfinite(rewards))):
            raise ProtocolError(f"sample {tuple(keys[invalid[0]])}: reward is {rewards[invalid[0]]}", where="trainer")
        return cls(
            keys=keys,
            prompts=columns["prompt_ids"],
            responses=responses,
            logprobs=columns["logprobs"],
            versions=columns["versions"],
            advantages=None if by_token else _numbers(columns.get("advantage")),
            token_advantages=columns["advantage"] if by_token else None,
            outcomes=_numbers(columns.get(OUTCOME)),
            loss_mask=columns.get(LOSS_MASK),
            rewards=rewards,
            reference=columns.get(REF_LOGPROBS),
            extra={name: column for name, column in columns.items() if name not in _KNOWN},
        )

    @classmethod
    def joined(cls, batches: Sequence[MicroBatch]) -> MicroBatch:
        """Return the samples of all ``batches`` as one batch, sorted by key."""
        filled = [batch for batch in batches if len(batch)]
        if not filled:
            return cls.empty()
        if any(batch.token_advantages is not None for batch in filled):
            filled = [replace(batch.with_advantages(batch.credit()), advantages=None) for batch in filled]
        whole = cls(
            keys=[key for batch in filled for key in batch.keys],
            **{name: _joined([getattr(batch, name) for batch in filled]) for name in _PARTS},
            extra={name: _joined([batch.extra[name] for batch in filled]) for name in filled[0].extra},
        )
        return whole.take(sorted(range(len(whole)), key=whole.keys.__getitem__))

    def __len__(self) -> int:
        return len(self.keys)

    def counted(self) -> NDArray[np.bool_]:
        """Return whether each response token counts in the loss, bool[N]."""
        if self.loss_mask is None:
            return np.ones(len(self.responses.values), np.bool_)
        return np.asarray(self.loss_mask.values, dtype=np.bool_)

    def loss_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each response that count in the loss, [n]."""
        counted = np.r_[0, np.cumsum(self.counted(), dtype=np.int64)]
        return np.diff(counted[self.responses.offsets])

    def credit(self) -> NDArray[np.float32]:
        """Return the advantage of each response token, [N]: its own, or its sample's.

        Raises ProtocolError if the batch has neither.
        """
        if self.token_advantages is not None:
            return np.asarray(self.token_advantages.values, dtype=np.float32)
        return np.repeat(self.by_sample(), self.responses.lengths)

    def with_advantages(self, advantages: NDArray[np.float32]) -> MicroBatch:
        """Return the samples with ``advantages`` [N] as the advantages of the response tokens."""
        return replace(self, token_advantages=Jagged(advantages, self.responses.offsets))

    def required_outcomes(self) -> NDArray[np.float32]:
        """Return the outcomes, [n]. Raises ProtocolError if there are none."""
        if self.outcomes is None:
            raise ProtocolError("the samples have no outcomes", where="trainer")
        return self.outcomes

    def by_sample(self) -> NDArray[np.float32]:
        """Return the advantages, [n]. Raises ProtocolError if the samples have no advantages of their own."""
        if self.advantages is None:
            raise ProtocolError("the samples have no advantages", where="trainer")
        return self.advantages

    def largest_advantages(self) -> NDArray[np.float32]:
        """Return the largest |advantage| among the counted tokens of each sample, [n]; inf if unknown."""
        if self.token_advantages is None:
            return np.full(len(self), np.inf, np.float32) if self.advantages is None else np.abs(self.advantages)
        found = np.zeros(len(self), np.float32)
        of_token = np.repeat(np.arange(len(self)), self.responses.lengths)
        np.maximum.at(found, of_token, np.abs(self.token_advantages.values) * self.counted())
        return found

    def pairs(self) -> NDArray[np.int64]:
        """Return the pair number of each sample, [n]: samples of a group with the same |advantage| are a pair."""
        named = np.column_stack([[key.serial for key in self.keys], np.abs(self.by_sample())]).reshape(-1, 2)
        numbers: NDArray[np.int64] = np.unique(named, axis=0, return_inverse=True)[1].reshape(-1)
        return numbers

    def sole_versions(self) -> NDArray[np.int64]:
        """Return the packed version that generated all tokens of each sample, [n]; -1 if there were several or none."""
        starts, lengths = self.versions.offsets[:-1], self.responses.lengths
        versions = np.full(len(self), -1, dtype=np.int64)
        nonempty = lengths > 0
        versions[nonempty] = self.versions.values[starts[nonempty]]
        other = np.r_[0, np.cumsum(self.versions.values != np.repeat(versions, lengths))]
        versions[np.diff(other[self.versions.offsets]) > 0] = -1
        return versions

    def take(self, indices: Sequence[int]) -> MicroBatch:
        """Return only the samples at ``indices``."""
        keys = [self.keys[index] for index in indices]
        extra = {name: column.take(indices) for name, column in self.extra.items()}
        return MicroBatch(keys=keys, **{name: _taken(getattr(self, name), indices) for name in _PARTS}, extra=extra)


_PARTS = tuple(part.name for part in fields(MicroBatch) if part.name not in ("keys", "extra"))


def _numbers(column: Jagged | None) -> NDArray[np.float32] | None:
    return None if column is None else np.asarray(column.values, dtype=np.float32)


def _by_token(advantage: Jagged, responses: Jagged, loss_mask: Jagged | None) -> Jagged:
    """Return ``advantage`` with one entry per response token, expanding cells with one entry per sample or per turn.

    Cells of any other length are unchanged, so that the caller refuses them.
    """
    if len(advantage) != len(responses) or (loss_mask is not None and len(loss_mask) != len(responses)):
        return advantage
    cells = []
    for index in range(len(advantage)):
        cell, length = advantage.row(index), responses.lengths[index]
        if len(cell) == 1:
            cell = np.repeat(cell, length)
        elif len(cell) != length and loss_mask is not None:
            turn = _turn_of_token(loss_mask.row(index))
            cell = cell[turn] if len(turn) and turn[-1] + 1 == len(cell) else cell
        cells.append(cell)
    return Jagged.from_rows(cells, advantage.dtype)


def _turn_of_token(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the model's turn of each token, int64[length]; an observation belongs to the turn before it."""
    begins = chosen & ~np.r_[False, chosen[:-1]]
    turns: NDArray[np.int64] = np.maximum(np.cumsum(begins, dtype=np.int64) - 1, 0)
    return turns


def _joined(parts: Sequence[Any]) -> Any:
    """Return one field of several batches, concatenated."""
    if isinstance(parts[0], Jagged):
        return Jagged.concat(parts)
    return None if parts[0] is None else np.concatenate(parts)


def _taken(part: Any, indices: Sequence[int]) -> Any:
    if isinstance(part, Jagged):
        return part.take(indices)
    return None if part is None else part[list(indices)]
