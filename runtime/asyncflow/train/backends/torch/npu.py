"""Ascend NPUs for the torch trainer: how torch learns of them, and their attention kernel.

Written to the documented API of torch_npu 2.13 and CANN; not run on an NPU. The kernel, ``npu_fusion_attention`` with
layout TND, takes sequences one after another, without padding, of which each has as many keys as queries or more: mode
3, "right down causal", lets query i of n see keys 0 to K - n + i of the K of its sequence.

Invariant: row i of the output is softmax attention of token i over exactly the tokens that ``Pack.mask`` allows.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncflow.errors import ManifestError
from asyncflow.train.backends.torch.copies import on_device
from asyncflow.train.packing import Pack

_RIGHT_DOWN_CAUSAL = 3
_MASK_SIDE = 2048
"""Side of the mask that stands for any causal mask."""
_MOST_SEQUENCES = 1024
"""Most sequences of one call."""


def load_npu() -> ModuleType:
    """Import torch_npu, by which torch has the device ``npu`` and the process groups ``hccl``.

    torch does not do so by itself here (TORCH_DEVICE_BACKEND_AUTOLOAD=0), so that what is missing can be told. Raises
    ManifestError.
    """
    where = "spec.trainer.accelerator"
    try:
        return import_module("torch_npu")
    except ModuleNotFoundError as absent:
        if absent.name != "torch_npu":
            raise ManifestError(f"torch_npu needs {absent.name}, which is not installed", where=where) from absent
        hint = f"Install the one for torch {torch.__version__.partition('+')[0]}, or use the image runtime-ascend"
        raise ManifestError("torch_npu is not installed", where=where, hint=hint) from absent
    except (ImportError, OSError, RuntimeError, AttributeError) as wrong:
        raise ManifestError(
            f"torch_npu {_installed()} cannot be loaded with torch {torch.__version__}: {wrong}",
            where=where,
            hint="A library that is not found belongs to CANN (source its set_env.sh) or to the NPU's driver "
            "(/usr/local/Ascend/driver); otherwise torch_npu is for another version of torch",
        ) from wrong


def _installed() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch_npu")
    except PackageNotFoundError:
        return "of an unknown version"


class NpuSequences(NamedTuple):
    """A pack as S sequences. query_ends, key_ends: where the queries and the keys of each end, counted from the first.

    keys: the row of the pack that each key is of, None where these are the rows as they stand; longest: tokens of the
    longest sequence, a shared prompt included.
    """

    query_ends: list[int]
    key_ends: list[int]
    keys: Tensor | None
    longest: int

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> NpuSequences:
        """Lay ``pack`` out."""
        query_ends, key_ends, keys = sequences_of(pack)
        longest = int(np.diff(key_ends, prepend=0).max())
        return cls(query_ends, key_ends, None if keys is None else on_device(keys, device), longest)


def sequences_of(pack: Pack) -> tuple[list[int], list[int], NDArray[np.int64] | None]:
    """Return a pack as the ends of the sequences' queries, the ends of their keys, and the rows that the keys are of.

    A document with one response is one sequence. Where responses share a prompt, the prompt and each of them are
    sequences of their own, and the keys of a response are those of the prompt and its own. The rows are None where they
    are 0, 1, 2, ...
    """
    documents, segments = pack.documents, pack.segments
    begins = np.flatnonzero((np.diff(documents, prepend=-1) != 0) | (np.diff(segments, prepend=-1) != 0))
    ends = np.r_[begins[1:], len(documents)]
    responses = np.bincount(documents[begins], weights=segments[begins] > 0)
    queries: list[int] = []
    keys: list[NDArray[np.int64]] = []
    prompt = np.zeros(0, dtype=np.int64)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        rows = np.arange(begin, end)
        if segments[begin] == 0:
            prompt = rows
            queries.append(end)
            keys.append(rows)
        elif responses[documents[begin]] == 1:
            queries[-1] = end
            keys[-1] = np.r_[prompt, rows]
        else:
            queries.append(end)
            keys.append(np.r_[prompt, rows])
    rows = np.concatenate(keys)
    shared = len(rows) > len(documents)
    return queries, np.cumsum([len(part) for part in keys]).tolist(), rows if shared else None


def attend_on_npu(query: Tensor, key: Tensor, value: Tensor, *, sequences: NpuSequences, scale: float) -> Tensor:
    """Attend within sequences: query [T, H, d], key and value [T, H / groups, d] -> [T, H, d], all of one dtype."""
    if sequences.keys is not None:
        key, value = (states.index_select(0, sequences.keys) for states in (key, value))
    attention, mask = load_npu().npu_fusion_attention, _causal(query.device)
    parts, first_query, first_key = [], 0, 0
    for begin in range(0, len(sequences.query_ends), _MOST_SEQUENCES):
        query_ends, key_ends = (ends[begin : begin + _MOST_SEQUENCES] for ends in sequences[:2])
        queries, keys = slice(first_query, query_ends[-1]), slice(first_key, key_ends[-1])
        out = attention(
            query[queries],
            key[keys],
            value[keys],
            query.shape[1],
            "TND",
            atten_mask=mask,
            scale=scale,
            actual_seq_qlen=[end - first_query for end in query_ends],
            actual_seq_kvlen=[end - first_key for end in key_ends],
            sparse_mode=_RIGHT_DOWN_CAUSAL,
        )
        parts.append(out[0])
        first_query, first_key = query_ends[-1], key_ends[-1]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@cache
def _causal(device: torch.device) -> Tensor:
    """Return the mask that the kernel wants for every causal mask: True where nothing is seen."""
    return torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu(1)
