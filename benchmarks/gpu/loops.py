"""The two loops of the comparison: the trainer's backend, and a plain loop that does only the same computation.

Both compute the log-probs of every token of equally long documents, their clipped policy gradient, and its backward
pass. The plain loop is a minimal script for one model on one device: it has no queue, packs or metrics, and its weights
have the precision of the computation.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from shapes import Shape
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from asyncflow.identity import SampleKey
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings, WeightsDtype
from asyncflow.training.torch.backend import TorchBackend

PLAIN = "benchmark_plain"


class Loop(Protocol):
    """A loop that is measured. parameters: the number of parameters of its model."""

    parameters: int

    def step(self) -> None:
        """Compute one micro-batch forward and backward; on an accelerator, it may still be running on return."""


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Any,
    *,
    document: int,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within documents of equal length: [1, H, T, d] -> [1, T, H, d]."""
    if query.device.type == "cuda":
        states = (part[0].transpose(0, 1).to(value.dtype).contiguous() for part in (query, key, value))
        starts = torch.arange(0, query.shape[2] + 1, document, device=query.device, dtype=torch.int32)
        out = varlen_attn(
            *states, starts, starts, document, document, scale=scaling, window_size=(-1, 0), enable_gqa=True
        )
        return out[None], None
    query, key, value = (part[0].unflatten(1, (-1, document)).transpose(0, 1) for part in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[None], None


AttentionInterface.register(PLAIN, _attend)


class PlainLoop:
    """The plain loop. head_tokens: tokens whose logits are in memory at the same time."""

    def __init__(
        self, shape: Shape, *, tokens: int, document: int, device: torch.device, head_tokens: int, compiled: bool
    ) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        torch.manual_seed(0)
        with device:
            self._model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype, attn_implementation=PLAIN)
            self._ids = torch.randint(0, shape.vocabulary, (1, tokens))
            self._positions = torch.arange(document).repeat(tokens // document)[None]
            self._advantages = torch.randn(tokens)
        self._body = torch.compile(self._model.model, dynamic=False) if compiled else self._model.model
        self._document, self._head_tokens = document, head_tokens
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())

    def step(self) -> None:
        """See ``Loop``."""
        states = self._body(
            input_ids=self._ids, position_ids=self._positions, document=self._document, use_cache=False
        ).last_hidden_state[0]
        targets = self._ids[0].roll(-1)
        logprobs = torch.cat(
            [
                checkpoint(self._logprobs, *piece, use_reentrant=False)
                for piece in zip(states.split(self._head_tokens), targets.split(self._head_tokens), strict=True)
            ]
        )
        ratio = (logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(0.8, 1.2)
        torch.maximum(-self._advantages * ratio, -self._advantages * clipped).sum().backward()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _logprobs(self, states: Tensor, targets: Tensor) -> Tensor:
        return -F.cross_entropy(self._model.lm_head(states).float(), targets, reduction="none")


class TrainerLoop:
    """The backend ``torch``, used as a rank uses it, with one pack per micro-batch.

    weights: the dtype of the weights in memory.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        tokens: int,
        document: int,
        device: torch.device,
        head_tokens: int,
        compiled: bool,
        weights: WeightsDtype,
    ) -> None:
        settings = BackendSettings(
            optimizer=OptimizerSettings(learning_rate=1e-6, steps=1),
            compute="float32" if device.type == "cpu" else "bfloat16",
            weights=weights,
            pack_tokens=tokens,
            threads=torch.get_num_threads(),
            device=device.type,
            options={"head_tokens": head_tokens, "compile": compiled},
        )
        self._backend = TorchBackend(settings, group=SingleProcess())
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16).save_pretrained(folder)
            self._backend.load(Path(folder), checkpoint=None)
        self.parameters = sum(array.size for _, array in self._backend.tensors(dtype="bfloat16"))
        self._batch = _batch(shape, tokens=tokens, document=document)

    def step(self) -> None:
        """See ``Loop``."""
        self._backend.micro_batch(self._batch, version=0)


def _batch(shape: Shape, *, tokens: int, document: int) -> MicroBatch:
    """Return samples whose prompt is one token, so that every token of a pack has a target, as in the plain loop."""
    numbers, rng = tokens // document, np.random.default_rng(0)
    rows = [rng.integers(0, shape.vocabulary, document) for _ in range(numbers)]
    return MicroBatch(
        keys=[SampleKey(number, 0) for number in range(numbers)],
        prompts=Jagged.from_rows([np.zeros(1)] * numbers, "int32"),
        responses=Jagged.from_rows(rows, "int32"),
        logprobs=Jagged.from_rows([np.full(document, -np.log(shape.vocabulary)) for _ in rows], "float32"),
        versions=Jagged.from_rows([np.zeros(document) for _ in rows], "int64"),
        advantages=rng.normal(size=numbers).astype(np.float32),
    )
