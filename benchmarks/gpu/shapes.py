"""The shapes of the measured models. Their weights are random, because speed does not depend on weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import Qwen3Config


class Shape(NamedTuple):
    """The shape of a model with Qwen3's architecture."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head: int
    feed_forward: int
    vocabulary: int

    @property
    def config(self) -> Qwen3Config:
        """The configuration of the model for transformers."""
        return Qwen3Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head,
            intermediate_size=self.feed_forward,
            vocab_size=self.vocabulary,
            tie_word_embeddings=True,
            max_position_embeddings=32_768,
        )

    def flops_of_token(self, parameters: int, *, document: int) -> float:
        """Return the floating-point operations of a forward and backward pass per token of a document.

        Six per parameter, and six per attention head dimension and token of the document: causal attention computes
        half of the pairs of tokens. document: its length in tokens.
        """
        return 6.0 * parameters + 6.0 * self.layers * self.heads * self.head * document


SHAPES: dict[str, Shape] = {
    "tiny": Shape(64, 2, 4, 2, 16, 128, 512),
    "0.6B": Shape(1024, 28, 16, 8, 128, 3072, 151_936),
    "1.7B": Shape(2048, 28, 16, 8, 128, 6144, 151_936),
    "4B": Shape(2560, 36, 32, 8, 128, 9728, 151_936),
}

PEAK_FLOPS: dict[str, float] = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12}
"""Peak operations per second in bfloat16, without sparsity, by the prefix of the device's name."""


def peak_flops(device: Any) -> float | None:
    """Return the peak of the device of this name, None if it is unknown."""
    return next((peak for name, peak in PEAK_FLOPS.items() if str(device).startswith(name)), None)
