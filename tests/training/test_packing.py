from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ProtocolError
from asyncflow.training.packing import LayoutName, Pack, few_sizes, few_sizes_below, pack_samples

tokens = st.lists(st.integers(0, 9), min_size=1, max_size=5)
group = st.tuples(tokens, st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=4))
batches = st.lists(group, max_size=5)
layouts = st.sampled_from(["separate", "shared-prompt"])


def flat(groups: list[tuple[list[int], list[list[int]]]]) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    rows = [(prompt, response, g) for g, (prompt, responses) in enumerate(groups) for response in responses]
    prompts = [np.array(prompt) for prompt, _, _ in rows]
    return prompts, [np.array(response, dtype=np.int64) for _, response, _ in rows], [g for _, _, g in rows]


def context(pack: Pack, row: int) -> list[tuple[int, int]]:
    """Return what the model sees at a row: tokens with their positions, in the order of positions."""
    seen = np.flatnonzero(pack.mask()[row])
    return sorted((int(pack.positions[i]), int(pack.ids[i])) for i in seen)


@given(batches, layouts, st.integers(1, 30), st.randoms(use_true_random=False))
def test_every_token_is_predicted_once_from_its_own_context(
    groups: list[tuple[list[int], list[list[int]]]], layout: LayoutName, budget: int, random: st.DataObject
) -> None:
    prompts, responses, names = flat(groups)
    order = list(range(len(prompts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    prompts, responses, names = ([values[i] for i in order] for values in (prompts, responses, names))
    packs = pack_samples(prompts, responses, names, layout=layout, budget=budget)
    seen = set()
    for pack in packs:
        for row, target, sample, offset in zip(pack.rows, pack.targets, pack.samples, pack.offsets, strict=True):
            seen.add((int(sample), int(offset)))
            assert responses[sample][offset] == target
            expected = [*prompts[sample], *responses[sample][:offset]]
            assert context(pack, int(row)) == list(enumerate(expected))
    assert seen == {(i, t) for i, response in enumerate(responses) for t in range(len(response))}
    assert sum(len(pack.targets) for pack in packs) == len(seen)


@given(batches, layouts, st.integers(1, 30))
def test_packs_keep_the_budget_unless_one_sample_exceeds_it(
    groups: list[tuple[list[int], list[list[int]]]], layout: LayoutName, budget: int
) -> None:
    prompts, responses, names = flat(groups)
    for pack in pack_samples(prompts, responses, names, layout=layout, budget=budget):
        assert len(pack.ids) <= budget or len(set(pack.samples.tolist())) == 1
    for pack in pack_samples(prompts, responses, names, layout=layout, budget=budget, padded=True):
        assert pack.table().places.size <= budget or len(set(pack.samples.tolist())) == 1


@given(batches, layouts, st.integers(1, 30))
def test_the_table_of_documents_and_the_sequences_say_the_same_as_the_mask(
    groups: list[tuple[list[int], list[list[int]]]], layout: LayoutName, budget: int
) -> None:
    prompts, responses, names = flat(groups)
    for pack in pack_samples(prompts, responses, names, layout=layout, budget=budget):
        table = pack.table()
        count, width = table.places.shape
        assert table.places.reshape(-1)[table.rows].tolist() == list(range(len(pack.ids)))
        visible = np.zeros((count * width, count * width), dtype=bool)
        for d in range(count):
            inner = np.tri(width, dtype=bool) if table.mask is None else table.mask[d]
            visible[d * width : (d + 1) * width, d * width : (d + 1) * width] = inner
        np.testing.assert_array_equal(visible[np.ix_(table.rows, table.rows)], pack.mask())
        sequences = pack.sequences()
        visible = np.zeros_like(pack.mask())
        for start, stop in pairwise(sequences.starts):
            visible[start:stop, start:stop] = np.tri(stop - start, dtype=bool)
        for (a, b), (c, d) in zip(pairwise(sequences.row_starts), pairwise(sequences.prompt_starts), strict=True):
            visible[np.ix_(sequences.rows[a:b], sequences.prompts[c:d])] = True
        np.testing.assert_array_equal(visible, pack.mask())


@settings(max_examples=30)
@given(batches, layouts, st.integers(0, 20))
def test_padding_sees_nothing_and_makes_no_document_longer(
    groups: list[tuple[list[int], list[list[int]]]], layout: LayoutName, more: int
) -> None:
    prompts, responses, names = flat(groups)
    for pack in pack_samples(prompts, responses, names, layout=layout, budget=30):
        size = len(pack.ids)
        padded = pack.padded(size + more)
        assert len(padded.ids) == len(padded.positions) == size + more
        np.testing.assert_array_equal(padded.mask()[:size, :size], pack.mask())
        assert not padded.mask()[size:, :size].any()
        longest = np.bincount(pack.documents).max()
        assert np.bincount(padded.documents).max() == longest
        assert padded.positions[size:].max(initial=0) < longest
        assert padded.rows.tolist() == pack.rows.tolist()


@settings(max_examples=30)
@given(batches, layouts, st.integers(1, 30))
def test_a_group_may_be_kept_in_one_pack(
    groups: list[tuple[list[int], list[list[int]]]], layout: LayoutName, budget: int
) -> None:
    prompts, responses, names = flat(groups)
    packs = pack_samples(prompts, responses, names, layout=layout, budget=budget, whole=True)
    of_pack = [{names[sample] for sample in pack.samples} for pack in packs]
    assert sum(map(len, of_pack)) == len(
        {name for name, response in zip(names, responses, strict=True) if len(response)}
    )
    assert all(len(pack.ids) <= budget or len(groups) == 1 for pack, groups in zip(packs, of_pack, strict=True))


def test_shared_prompts_save_their_copies() -> None:
    prompts, responses, names = flat([([1, 2, 3, 4], [[5, 6], [7, 8, 9], [5]])])
    (separate,) = pack_samples(prompts, responses, names, layout="separate", budget=100)
    (shared,) = pack_samples(prompts, responses, names, layout="shared-prompt", budget=100)
    assert (len(separate.ids), len(shared.ids)) == (15, 7)
    assert shared.rows.tolist() == [3, 4, 3, 5, 6, 3]


@pytest.mark.parametrize(("layout", "size"), [("separate", 15), ("shared-prompt", 7)])
def test_a_pack_may_be_just_full(layout: LayoutName, size: int) -> None:
    prompts, responses, names = flat([([1, 2, 3, 4], [[5, 6], [5], [7, 8, 9]])])
    for budget, count in ((size, 1), (size - 1, 2)):
        assert len(pack_samples(prompts, responses, names, layout=layout, budget=budget)) == count


def test_groups_are_told_apart_by_prompt_and_not_by_neighbourhood() -> None:
    a, b = np.array([1]), np.array([2])
    packs = pack_samples([a, b, a], [np.array([3, 3])] * 3, [0, 0, 0], layout="shared-prompt", budget=100)
    assert packs[0].ids.tolist() == [1, 3, 3, 2, 3]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ProtocolError, match="empty prompt"):
        pack_samples([np.array([], dtype=np.int64)], [np.array([1])], [0], layout="separate", budget=8)


@given(st.integers(1, 1 << 20))
def test_few_sizes_occur_and_little_is_filled_up(tokens: int) -> None:
    size = few_sizes(tokens)
    assert tokens <= size <= 1.25 * tokens
    assert few_sizes(size) == size
    below = few_sizes_below(tokens)
    assert few_sizes(below) == below <= tokens < few_sizes(below + 1)
    assert len({few_sizes(n) for n in range(tokens, 2 * tokens, max(1, tokens // 64))}) <= 6
