"""Packing of samples of any length without padding.

A pack is one row of tokens, [T]. It holds *documents*: a prompt (segment 0) and one or more responses to it (segments
1, 2, ...). A token attends to the earlier tokens of its document that belong to the prompt or to its own response:

    M[i, j] = j <= i  and  document(i) = document(j)  and  (segment(j) = 0 or segment(i) = segment(j))

In the layout ``separate`` each document has one response. In ``shared-prompt`` the responses of one group follow one
copy of their prompt: position(token t of a response) = |P| + t, and the row of the *last prompt token* predicts the
first token of every response (shared-prompt attention of the Periodic Asynchrony paper). The last token of a response
predicts nothing and is left out.

Invariant: each token of each response is a target exactly once, and is predicted from exactly the context that it was
sampled in, until ``Pack.targeting`` removes tokens that do not count. So layout, budget and order only change rounding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import ProtocolError

Ids = NDArray[np.integer]
LayoutName = Literal["separate", "shared-prompt"]


@dataclass(frozen=True)
class Pack:
    """One row of T input tokens with N targets; every array is int64.

    ids, positions, documents, segments: [T]. rows [N]: the input token whose logits predict the target; targets [N]:
    the predicted token; samples [N] and offsets [N]: sample of the target, and its index in the sample's response.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    documents: NDArray[np.int64]
    segments: NDArray[np.int64]
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    samples: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def mask(self) -> NDArray[np.bool_]:
        """Return the attention mask, bool[T, T]: whether row i may attend to column j."""
        causal = np.tri(len(self.ids), dtype=np.bool_)
        same_document = self.documents[:, None] == self.documents
        visible = (self.segments == 0) | (self.segments[:, None] == self.segments)
        mask: NDArray[np.bool_] = causal & same_document & visible
        return mask

    def table(self) -> DocumentTable:
        """Return the pack as a batch of documents, for attention kernels that take a padded batch."""
        lengths = np.bincount(self.documents)
        starts, columns = np.r_[0, np.cumsum(lengths)[:-1]], np.arange(lengths.max())
        inside = columns < lengths[:, None]
        places = starts[:, None] + np.where(inside, columns, 0)
        segments = self.segments[places]
        plain = self.segments.max() <= 1
        visible = (segments[:, None, :] == 0) | (segments[:, :, None] == segments[:, None, :])
        return DocumentTable(
            places=places,
            rows=np.flatnonzero(inside),
            mask=None if plain else visible & np.tri(len(columns), dtype=np.bool_),
        )

    def sequences(self) -> Sequences:
        """Return the pack as causal sequences, for attention kernels that take sequences of any length."""
        most = np.zeros(self.documents[-1] + 1, dtype=np.int64)
        np.maximum.at(most, self.documents, self.segments)
        shared = (most > 1)[self.documents]
        begins = np.diff(self.documents, prepend=-1) != 0
        begins |= shared & (np.diff(self.segments, prepend=0) != 0)
        rows, prompts = (np.flatnonzero(shared & part) for part in (self.segments > 0, self.segments == 0))
        return Sequences(
            starts=np.r_[np.flatnonzero(begins), len(self.ids)],
            rows=rows,
            row_starts=_starts(self.documents[rows]),
            prompts=prompts,
            prompt_starts=_starts(self.documents[prompts]),
        )

    def targeting(self, counted: NDArray[np.bool_]) -> Pack:
        """Return the pack with only the ``counted`` targets, bool[N]; all input tokens stay."""
        return replace(
            self,
            rows=self.rows[counted],
            targets=self.targets[counted],
            samples=self.samples[counted],
            offsets=self.offsets[counted],
        )

    def padded(self, size: int) -> Pack:
        """Return the pack with ``size`` tokens, adding documents without targets.

        None of them is longer than the longest document of the pack.
        """
        missing, longest = size - len(self.ids), int(np.bincount(self.documents).max())
        places = np.arange(missing)
        return replace(
            self,
            ids=np.r_[self.ids, np.zeros(missing, dtype=np.int64)],
            positions=np.r_[self.positions, places % longest],
            documents=np.r_[self.documents, self.documents[-1] + 1 + places // longest],
            segments=np.r_[self.segments, np.zeros(missing, dtype=np.int64)],
        )


@dataclass(frozen=True)
class Sequences:
    """A pack as S causal sequences, and the shared prompts that some of them also attend to.

    starts [S + 1]: start of each sequence, and the end of the pack.
    rows: rows of responses that share a prompt; each such response is a sequence of its own.
    prompts: rows of the shared prompts.
    row_starts, prompt_starts [D + 1]: start of each document with a shared prompt in ``rows`` and in ``prompts``.
    """

    starts: NDArray[np.int64]
    rows: NDArray[np.int64]
    row_starts: NDArray[np.int64]
    prompts: NDArray[np.int64]
    prompt_starts: NDArray[np.int64]


@dataclass(frozen=True)
class DocumentTable:
    """A pack of D documents as a batch, padded to the longest document, L.

    places [D, L]: row of the pack for each token (any row of the document for padding); rows [T]: index into the
    flattened table for each row of the pack; mask: bool[D, L, L], or None if every document is purely causal. Padding
    is at the end, so that no real token attends to it.
    """

    places: NDArray[np.int64]
    rows: NDArray[np.int64]
    mask: NDArray[np.bool_] | None


@dataclass(frozen=True)
class _Document:
    group: Hashable
    prompt: Ids
    members: list[tuple[int, Ids]]

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(len(response) - 1 for _, response in self.members)


def pack_samples(
    prompts: Sequence[Ids],
    responses: Sequence[Ids],
    groups: Sequence[Hashable],
    *,
    layout: LayoutName,
    budget: int,
    whole: bool = False,
    padded: bool = False,
) -> list[Pack]:
    """Pack n samples in the given order into rows of at most ``budget`` tokens (a longer document has its own pack).

    prompts, responses: token ids of each sample; groups: samples of the same group share a prompt (a sample with a
    different prompt has its own document); whole: keep each group in one pack, even if it exceeds ``budget``; padded:
    sort documents by length, and count each with the length of the longest in its pack, as in ``Pack.table``. Samples
    with an empty response have no target and are left out. Raises ProtocolError for an empty prompt, which cannot
    predict a first token.
    """
    packs: list[Pack] = []
    waiting: list[_Document] = []
    sizes: list[int] = []
    documents = _documents(prompts, responses, groups, layout=layout)
    if padded:
        documents = sorted(documents, key=_length)
    for part in (
        _whole(documents) if whole else ([split] for document in documents for split in _split(document, budget))
    ):
        added = list(map(_length, part))
        if waiting and _tokens([*sizes, *added], padded=padded) > budget:
            packs.append(_lay_out(waiting))
            waiting, sizes = [], []
        waiting += part
        sizes += added
    if waiting:
        packs.append(_lay_out(waiting))
    return packs


def few_sizes(tokens: int) -> int:
    """Return ``tokens`` rounded up to the next of four sizes per octave, so that at most a quarter is padding."""
    step = _quarter_octave(tokens)
    return -(-tokens // step) * step


def few_sizes_below(tokens: int) -> int:
    """Return the largest size of ``few_sizes`` that is at most ``tokens``."""
    step = _quarter_octave(tokens)
    return tokens // step * step


def _quarter_octave(tokens: int) -> int:
    return 1 << max(0, tokens.bit_length() - 3)


def _documents(
    prompts: Sequence[Ids], responses: Sequence[Ids], groups: Sequence[Hashable], *, layout: LayoutName
) -> Iterable[_Document]:
    together: dict[Hashable, _Document] = {}
    for sample, (prompt, response, group) in enumerate(zip(prompts, responses, groups, strict=True)):
        if not len(prompt):
            raise ProtocolError(f"sample {sample} of group {group} has an empty prompt", where="trainer")
        if not len(response):
            continue
        key: Hashable = (group, bytes(np.ascontiguousarray(prompt))) if layout == "shared-prompt" else sample
        document = together.setdefault(key, _Document(group, prompt, []))
        document.members.append((sample, response))
    return together.values()


def _length(document: _Document) -> int:
    return document.size


def _tokens(sizes: Sequence[int], *, padded: bool) -> int:
    return len(sizes) * max(sizes) if padded else sum(sizes)


def _whole(documents: Iterable[_Document]) -> Iterable[list[_Document]]:
    groups: dict[Hashable, list[_Document]] = {}
    for document in documents:
        groups.setdefault(document.group, []).append(document)
    return groups.values()


def _split(document: _Document, budget: int) -> Iterator[_Document]:
    part = _Document(document.group, document.prompt, [])
    for member in document.members:
        if part.members and part.size + len(member[1]) - 1 > budget:
            yield part
            part = _Document(document.group, document.prompt, [])
        part.members.append(member)
    yield part


def _lay_out(documents: Iterable[_Document]) -> Pack:
    inputs: list[tuple[Ids, Ids, int, int]] = []
    outputs: list[tuple[Ids, Ids, int]] = []
    end = 0
    for number, document in enumerate(documents):
        prompt = document.prompt
        inputs.append((prompt, np.arange(len(prompt)), number, 0))
        end += len(prompt)
        last_prompt_row = end - 1
        for segment, (sample, response) in enumerate(document.members, start=1):
            inputs_of_response = response[:-1]
            positions = len(prompt) + np.arange(len(inputs_of_response))
            inputs.append((inputs_of_response, positions, number, segment))
            outputs.append((np.r_[last_prompt_row, end : end + len(inputs_of_response)], response, sample))
            end += len(inputs_of_response)
    sizes = [len(ids) for ids, _, _, _ in inputs]
    lengths = [len(targets) for _, targets, _ in outputs]
    return Pack(
        ids=_join(ids for ids, _, _, _ in inputs),
        positions=_join(positions for _, positions, _, _ in inputs),
        documents=np.repeat([number for _, _, number, _ in inputs], sizes),
        segments=np.repeat([segment for _, _, _, segment in inputs], sizes),
        rows=_join(rows for rows, _, _ in outputs),
        targets=_join(targets for _, targets, _ in outputs),
        samples=np.repeat([sample for _, _, sample in outputs], lengths),
        offsets=_join(np.arange(length) for length in lengths),
    )


def _starts(documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each document in a sorted array of documents, and the array's length."""
    starts: NDArray[np.int64] = np.r_[np.flatnonzero(np.diff(documents, prepend=-1)), len(documents)]
    return starts


def _join(parts: Iterable[Ids]) -> NDArray[np.int64]:
    return np.concatenate(list(parts), dtype=np.int64)
