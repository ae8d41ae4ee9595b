"""Attention over sequences of any length is attention under the pack's mask, forwards and backwards."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, MistralConfig

from asyncflow.errors import ManifestError
from asyncflow.training.packing import LayoutName, Pack, pack_samples
from asyncflow.training.torch.attention import (
    ATTENTION,
    AttentionPart,
    Documents,
    FlashKernel,
    KernelSequences,
    NpuSequences,
    attend,
    attend_sequences,
    takes_sequences,
)
from asyncflow.training.torch.model import _layout

HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3
CPU = torch.device("cpu")


class PlainKernel:
    """The formulas of flash attention, a sequence at a time."""

    def _parts(self, part: AttentionPart) -> list[tuple[slice, slice]]:
        queries, keys = part.query_starts.tolist(), part.key_starts.tolist()
        return [(slice(*queries[i : i + 2]), slice(*keys[i : i + 2])) for i in range(len(queries) - 1)]

    def _scores(self, query: Tensor, key: Tensor, part: AttentionPart, scale: float) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        if part.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        return scores

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, part: AttentionPart, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        groups = query.shape[1] // key.shape[1]
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
        for q, k in self._parts(part):
            keys, values = (part[k].repeat_interleave(groups, 1) for part in (key, value))
            scores = self._scores(query[q], keys, part, scale)
            out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            lse[:, q] = scores.logsumexp(-1)
        return out, lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, part: AttentionPart, *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        groups = query.shape[1] // key.shape[1]
        of_query, of_key, of_value = (torch.zeros_like(part) for part in (query, key, value))
        for q, k in self._parts(part):
            keys, values = (part[k].repeat_interleave(groups, 1) for part in (key, value))
            chances = (self._scores(query[q], keys, part, scale) - lse[:, q, None]).exp()
            delta = (grad[q] * out[q]).sum(-1).t()[..., None]
            of_scores = chances * (torch.einsum("qhd,khd->hqk", grad[q], values) - delta) * scale
            of_query[q] = torch.einsum("hqk,khd->qhd", of_scores, keys)
            for given_, made in (
                (
                    of_key,
                    of_scores,
                ),
                (of_value, chances),
            ):
                other = query[q] if given_ is of_key else grad[q]
                whole = torch.einsum("hqk,qhd->khd", made, other)
                given_[k] = whole.unflatten(1, (-1, groups)).sum(2)
        return of_query, of_key, of_value


def masked(query: Tensor, key: Tensor, value: Tensor, pack: Pack) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(groups, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * SCALE
    scores = scores.masked_fill(~torch.from_numpy(pack.mask()), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def states(tokens: int, seed: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=source, dtype=torch.float64).requires_grad_() for shape in shapes]


groups = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=4)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=60)
@given(groups, st.sampled_from(["separate", "shared-prompt"]), st.integers(1, 40), st.booleans())
def test_sequences_say_the_same_as_the_mask(
    made: list[tuple[int, list[int]]], layout: LayoutName, budget: int, filled: bool
) -> None:
    rows = [(np.zeros(prompt, int), np.zeros(size, int), g) for g, (prompt, sizes) in enumerate(made) for size in sizes]
    if not rows:
        return
    prompts, responses, names = zip(*rows, strict=True)
    for pack in pack_samples(prompts, responses, names, layout=layout, budget=budget):
        whole = pack.padded(len(pack.ids) + 5) if filled else pack
        given_, same = states(len(whole.ids), 1), states(len(whole.ids), 1)
        out = attend_sequences(*given_, KernelSequences.of(whole, CPU), scale=SCALE, kernel=PlainKernel())
        expected = masked(*same, whole)
        torch.testing.assert_close(out, expected)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (out * weights).sum().backward()
        (expected * weights).sum().backward()
        for mine, other in zip(given_, same, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("layout", ["separate", "shared-prompt"])
def test_the_kernel_of_torch_is_called_as_it_asks(layout: LayoutName) -> None:
    """Its shapes alone: without a device nothing is computed."""
    prompts, responses = [np.zeros(3, int)] * 4, [np.zeros(5, int)] * 4
    (pack,) = pack_samples(prompts, responses, [0, 0, 1, 1], layout=layout, budget=99)
    laid = KernelSequences.of(pack, CPU)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        query, key, value = (
            mode.from_tensor(part.detach().half()).requires_grad_() for part in states(len(pack.ids), 1)
        )
        out = attend_sequences(query, key, value, laid, scale=SCALE, kernel=FlashKernel())
        assert out.shape == query.shape
        out.sum().backward()
    assert [part.grad.shape for part in (query, key, value)] == [part.shape for part in (query, key, value)]


@pytest.mark.parametrize("layout", ["separate", "shared-prompt"])
def test_a_compiled_layer_is_one_graph_with_its_attention_and_serves_packs_of_any_shape(layout: LayoutName) -> None:
    """Traced alone: without a device nothing is computed."""
    graphs = CompileCounter()
    torch.compiler.reset()

    @torch.compile(backend=graphs, fullgraph=True)
    def layer(query: Tensor, key: Tensor, value: Tensor, documents: KernelSequences) -> Tensor:
        return attend(torch.nn.Identity(), query * 2, key, value, None, documents=documents)[0] + 1

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(part: AttentionPart | Tensor | int | None) -> AttentionPart | Tensor | int | None:
            if isinstance(part, AttentionPart):
                return part._replace(**{name: mode.from_tensor(getattr(part, name)) for name in part._fields[:2]})
            return mode.from_tensor(part) if isinstance(part, Tensor) else part

        for number, (prompt, response) in enumerate([(3, 5), (4, 7), (2, 9), (5, 6), (7, 3), (6, 2)]):
            size = 2 * (number + 2)
            prompts, responses = [np.zeros(prompt, int)] * size, [np.zeros(response, int)] * size
            names = [i // 2 for i in range(size)]
            (pack,) = pack_samples(prompts, responses, names, layout=layout, budget=999)
            laid = KernelSequences(*(fake(part) for part in KernelSequences.of(pack, CPU)))
            query, key, value = (
                mode.from_tensor(part.detach().half().transpose(0, 1)[None]).requires_grad_()
                for part in states(len(pack.ids), 1)
            )
            out = layer(query, key, value, laid)
            assert out.shape == (1, len(pack.ids), HEADS, WIDTH)
            out.sum().backward()
    torch.compiler.reset()
    assert graphs.frame_count <= 2, "one for the first shape, one for all others"


@pytest.mark.parametrize(
    ("head", "compute", "capability", "taken"),
    [
        (128, torch.bfloat16, (9, 0), True),
        (256, torch.float16, (8, 0), True),
        (128, torch.float32, (9, 0), False),
        (264, torch.bfloat16, (9, 0), False),
        (100, torch.bfloat16, (9, 0), False),
        (128, torch.bfloat16, (7, 5), False),
    ],
)
def test_what_the_kernel_of_torch_refuses_is_attended_to_by_document(
    monkeypatch: pytest.MonkeyPatch, head: int, compute: torch.dtype, capability: tuple[int, int], taken: bool
) -> None:
    """Flash attention checks that heads have at most 256 dimensions, a multiple of 8, and that the GPU is an Ampere."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    config = LlamaConfig(hidden_size=32 * head, num_attention_heads=32, num_hidden_layers=1)
    assert takes_sequences(config, device=torch.device("cuda"), compute=compute) is taken
    assert not takes_sequences(config, device=CPU, compute=compute)


def test_a_pack_with_a_sequence_beyond_the_window_is_attended_to_by_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    (pack,) = pack_samples(
        [np.arange(5), np.arange(5)], [np.arange(4), np.arange(3)], [0, 0], layout="shared-prompt", budget=99
    )
    longest = 8  # the last token of a response is a target only

    def layout(window: int | None, device: str) -> type:
        config = MistralConfig(hidden_size=256, num_attention_heads=4, sliding_window=window)
        config._attn_implementation = ATTENTION
        return _layout(config, pack, device=SimpleNamespace(type=device), compute=torch.bfloat16)

    assert [layout(window, "cuda") for window in (None, longest)] == [KernelSequences] * 2
    assert [layout(window, "npu") for window in (None, longest)] == [NpuSequences] * 2
    assert [layout(longest - 1, device) for device in ("cuda", "npu", "cpu")] == [Documents] * 3
    laid = KernelSequences.of(pack, CPU)
    assert laid.longest == longest
    with pytest.raises(ManifestError, match="sliding_window 7"):
        attend(nn.Module(), *states(8, 1), None, documents=laid, sliding_window=longest - 1)
