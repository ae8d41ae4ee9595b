"""Texts of a response: the turns of the model, and the observations of its environment between them.

Invariant: a transcript is a function of the response's tokens and of which of them the model chose. Every reader, such
as a rollout or a judging task, therefore sees the same turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncflow.data.base import ENVIRONMENT, MODEL, Message

if TYPE_CHECKING:
    from asyncflow.models.tokenizer import Tokenizer


def segments(ids: NDArray[np.int32], chosen: NDArray[np.bool_]) -> Iterator[tuple[bool, NDArray[np.int32]]]:
    """Yield turns and observations in order, each as (whether the model chose its tokens, token ids).

    ids int32[n]: tokens of a response; chosen bool[n]: whether the model chose the token.
    """
    starts = np.flatnonzero(np.diff(chosen, prepend=~chosen[:1]))
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield bool(chosen[start]), ids[start:end]


def stop_ids_of(tokenizer: Tokenizer, stop: Iterable[str]) -> tuple[int, ...]:
    """Return the ids that end a turn. stop: texts that end a turn; only those that are special tokens have ids."""
    special = (tokenizer.special_id(text) for text in stop)
    return (*tokenizer.eos_ids, *(id_ for id_ in special if id_ is not None))


@dataclass(frozen=True, kw_only=True)
class Transcriber:
    """Converts responses to texts. stop_ids: the ids that end a turn."""

    tokenizer: Tokenizer
    stop_ids: Collection[int]

    def transcript(self, ids: NDArray[np.int32], chosen: NDArray[np.bool_]) -> list[Message]:
        """Return the turns and observations of a response as texts. Turns exclude special tokens and stop ids."""
        return [
            Message(role=MODEL if turn else ENVIRONMENT, content=self._text(part.tolist(), chosen=turn))
            for turn, part in segments(ids, chosen)
        ]

    def _text(self, ids: list[int], *, chosen: bool) -> str:
        content = ids[:-1] if chosen and ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(content, skip_special_tokens=chosen)
