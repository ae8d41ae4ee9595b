"""Texts that end a response, found however the model spells them.

Invariant: a response ends with the token that completes the first such text; whether it has is a function of its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Return the text of ids, special tokens included."""

_MARGIN = 2
"""Tokens more than a text has bytes: a tokenizer may drop a space in front of the first of them."""


class StopTexts:
    """Looks for ``texts`` at the end of a response in the making."""

    def __init__(self, texts: Sequence[str], *, decode: Decode) -> None:
        self._texts = texts
        self._decode = decode
        self._window = max(len(text.encode()) for text in texts) + _MARGIN

    def met(self, ids: Sequence[int]) -> bool:
        """Return whether the last of ``ids`` completes one of the texts, given that none before it did.

        A token has at least one byte, so that no text is longer than the tokens that are looked at.
        """
        end = self._decode(ids[-self._window :])
        return any(text in end for text in self._texts)
