"""An NPU's attention kernel is asked for attention under the pack's mask, and torch_npu says what it lacks.

The kernel is played by what its documentation says of it: nothing here has run on an NPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from asyncflow.errors import ManifestError, PeerLost
from asyncflow.models.device import load_npu
from asyncflow.training.packing import LayoutName, Pack, pack_samples
from asyncflow.training.torch import attention
from asyncflow.training.torch.attention import Documents, NpuSequences, attend, sequences_of
from asyncflow.training.torch.device import collective, limit_waits
from asyncflow.training.torch.optimizer import has_fused_kernel

CPU = torch.device("cpu")
HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    atten_mask: Tensor,
    scale: float,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
    sparse_mode: int,
) -> tuple[Tensor]:
    """Attend as the documentation of layout TND and mode 3 says: sequences by their cumulative lengths, the last query
    sees all keys, and a mask of 2048 x 2048 stands for all causal masks. It takes at most 1024 sequences."""
    assert (input_layout, sparse_mode, head_num) == ("TND", 3, query.shape[1])
    assert query.dtype == key.dtype == value.dtype
    assert torch.equal(atten_mask, torch.ones(2048, 2048).triu(1).bool())
    assert len(actual_seq_qlen) == len(actual_seq_kvlen) <= 1024
    assert (actual_seq_qlen[-1], actual_seq_kvlen[-1]) == (len(query), len(key))
    out = []
    for q0, q1, k0, k1 in zip(
        [0, *actual_seq_qlen], actual_seq_qlen, [0, *actual_seq_kvlen], actual_seq_kvlen, strict=False
    ):
        queries, keys = q1 - q0, k1 - k0
        seen = torch.ones(queries, keys).tril(keys - queries).bool()
        of_heads = [
            part.transpose(0, 1).repeat_interleave(query.shape[1] // part.shape[1], 0)
            for part in (query[q0:q1], key[k0:k1], value[k0:k1])
        ]
        out.append(F.scaled_dot_product_attention(*of_heads, attn_mask=seen, scale=scale).transpose(0, 1))
    return (torch.cat(out),)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch_npu")
    module.npu_fusion_attention = npu_fusion_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)


def packs(made: list[tuple[int, list[int]]], layout: LayoutName, budget: int) -> list[Pack]:
    rows = [(np.zeros(prompt, int), np.zeros(size, int), g) for g, (prompt, sizes) in enumerate(made) for size in sizes]
    prompts, responses, names = zip(*rows, strict=True)
    return pack_samples(prompts, responses, names, layout=layout, budget=budget)


groups = st.lists(
    st.tuples(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=4
)
layouts = st.sampled_from(["separate", "shared-prompt"])


@settings(deadline=None, max_examples=100)
@given(groups, layouts, st.integers(1, 40))
def test_sequences_say_who_sees_whom(made: list[tuple[int, list[int]]], layout: LayoutName, budget: int) -> None:
    for pack in packs(made, layout, budget):
        query_ends, key_ends, rows = sequences_of(pack)
        rows = np.arange(len(pack.ids)) if rows is None else rows
        seen = np.zeros((len(pack.ids), len(pack.ids)), dtype=bool)
        for q0, q1, k0, k1 in zip([0, *query_ends], query_ends, [0, *key_ends], key_ends, strict=False):
            for query in range(q0, q1):
                seen[query, rows[k0 : k1 - (q1 - 1 - query)]] = True
        assert (seen == pack.mask()).all()
        if layout == "separate":
            assert query_ends == key_ends, "keys are copied only where they are shared"


def test_keys_of_a_prompt_are_copied_only_where_responses_share_it() -> None:
    (shared,) = packs([(2, [3, 1, 2]), (1, [4])], "shared-prompt", 40)
    query_ends, key_ends, rows = sequences_of(shared)
    assert (query_ends, key_ends) == ([2, 4, 5, 9], [2, 6, 9, 13])
    assert rows is not None
    assert rows.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8]
    (alone,) = packs([(2, [3]), (1, [4])], "shared-prompt", 40)
    assert sequences_of(alone) == ([4, 8], [4, 8], None)


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("layout", ["separate", "shared-prompt"])
@pytest.mark.parametrize("most", [1024, 2])
def test_the_kernel_gives_what_sdpa_gives_under_the_mask(
    monkeypatch: pytest.MonkeyPatch, layout: LayoutName, most: int
) -> None:
    monkeypatch.setattr(attention, "_MOST_SEQUENCES", most)
    (pack,) = packs([(3, [4, 2, 5]), (1, [3]), (2, [1, 6]), (4, [2, 2])], layout, 100)
    source = torch.Generator().manual_seed(0)
    results = []
    for documents in (NpuSequences.of(pack, CPU), Documents.of(pack, CPU)):
        source.manual_seed(0)
        shapes = [(1, heads, len(pack.ids), WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
        states = [torch.randn(shape, generator=source, dtype=torch.float64).requires_grad_() for shape in shapes]
        out, _ = attend(nn.Identity(), *states, None, documents=documents, scaling=SCALE)
        out.pow(2).sum().backward()
        results.append([out.detach(), *(state.grad for state in states)])
    for own, plain in zip(*results, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("npu")
def test_the_kernel_is_given_one_dtype_under_autocast() -> None:
    (pack,) = packs([(3, [4, 2])], "shared-prompt", 100)
    query, key = (torch.randn(1, heads, len(pack.ids), WIDTH) for heads in (HEADS, KEY_HEADS))
    out, _ = attend(nn.Identity(), query, key, key.bfloat16(), None, documents=NpuSequences.of(pack, CPU))
    assert out.dtype == torch.bfloat16


def test_a_missing_torch_npu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(ManifestError, match=r"torch_npu is not installed\. Install the one for torch \d"):
        load_npu()


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            "ImportError('libhccl.so: cannot open shared object file: No such file or directory')",
            r"cannot be loaded with torch .*: libhccl\.so: cannot open .* CANN",
        ),
        ("ModuleNotFoundError('No module named decorator', name='decorator')", "torch_npu needs decorator, which"),
        ("RuntimeError('torch 2.1 is too old')", "cannot be loaded with torch .*: torch 2.1 is too old"),
    ],
)
def test_what_torch_npu_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, told: str) -> None:
    (tmp_path / "torch_npu.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(ManifestError, match=told):
        load_npu()


@pytest.mark.parametrize(("device", "given", "waits"), [("npu", None, "21"), ("npu", "7", "7"), ("cuda", None, None)])
def test_hccl_waits_as_long_as_a_collective_may_take(
    monkeypatch: pytest.MonkeyPatch, device: str, given: str | None, waits: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if given is None else {"HCCL_EXEC_TIMEOUT": given})
    limit_waits(device, timeout_s=20.5)
    assert os.environ.get("HCCL_EXEC_TIMEOUT") == waits


def test_adamw_is_one_kernel_where_torch_has_one() -> None:
    assert has_fused_kernel(CPU)
    assert not has_fused_kernel(torch.device("privateuseone")), "no package of an NPU registers one here"


HCCL = "create_config:torch_npu/csrc/distributed/HCCLUtils.cpp:130 HCCL function error: HcclAllreduce(), error code is"
DIST = "\n[ERROR] 2026-10-09-08:38:05 (PID:237, Device:3, RankID:3) ERR02200 DIST call hccl api failed."


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HCCL} 9{DIST}", "error code is 9"),
        (f"{HCCL} 21[ERROR] 2026-10-09-08:38:05", "error code is 21"),
        (f"{HCCL} 1{DIST}\nCommunication_Error_Ranktable_Detect(EI0015): No rank can connect", "EI0015"),
        (f"HCCL error in: ProcessGroupHCCL.cpp:64, \nHCCL_E_REMOTE: A call failed{DIST}", "HCCL_E_REMOTE: A call"),
        ("error code is 507048\nEI0002: [PID: 7] The wait execution of the Notify register times out.", "EI0002"),
        (f"OPS function error: HcclAllgather, error code is 6{DIST}\n  EI0006: Getting socket times out.", "EI0006"),
    ],
)
def test_an_error_of_hccl_that_says_that_a_rank_is_gone_is_one(text: str, said: str) -> None:
    with pytest.raises(PeerLost, match=rf"has ended, or has not answered in time: (?=\S).*{said}"), collective():
        raise RuntimeError(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The size of tensor a (3) must match the size of tensor b (2)",
        f"{HCCL} 1{DIST}",
        f"{HCCL} 15{DIST}",
        f"{HCCL} 7{DIST}\nEJ0003: Failed to bind the IP port.",
        f"{HCCL} 1{DIST}\nEI0001: Environment variable [HCCL_INTRA_PCIE_ENABLE] is invalid",
    ],
)
def test_an_error_of_a_rank_s_own_stays_what_it_is(text: str) -> None:
    with pytest.raises(RuntimeError) as raised, collective():
        raise RuntimeError(text)
    assert str(raised.value) == text
