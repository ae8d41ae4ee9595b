"""The gradient of a step by three models that see every sample alone, with each formula written out, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncflow.training.batch import MicroBatch


class TriModelLoss(NamedTuple):
    """The clipped policy gradient with a KL from the reference, by the estimator k3, as the mean over tokens."""

    low: float
    high: float
    kl: float
    temperature: float


def separate_gradient(
    folder: Path,
    batch: MicroBatch,
    loss: TriModelLoss,
    *,
    policy: Mapping[str, Any],
    old: Mapping[str, Any] | None,
    reference: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter; the models are given by their weights.

    old: None where the old policy is the policy itself; its log-probs are rounded to float32, as they are kept.
    """
    assert batch.advantages is not None
    trained, tokens = _model(folder, policy), 0
    others = [_model(folder, state) for state in (old or policy, reference)]
    counts = np.split(batch.counted().astype(np.float64), batch.responses.offsets[1:-1])
    for sample in range(len(batch)):
        if not len(batch.responses.row(sample)):
            continue
        logprobs = _alone(trained, batch, sample, temperature=loss.temperature)
        with torch.no_grad():
            before, anchor = (_alone(other, batch, sample, temperature=loss.temperature) for other in others)
        before = before.float().double() if old is not None else logprobs.detach()
        ratio = (logprobs - before).exp()
        advantage = float(batch.advantages[sample])
        clipped = ratio.clamp(1 - loss.low, 1 + loss.high)
        policy_loss = torch.maximum(-advantage * ratio, -advantage * clipped)
        distance = anchor - logprobs
        counted = torch.from_numpy(counts[sample])
        ((policy_loss + loss.kl * (distance.exp() - distance - 1)) * counted).sum().backward()
        tokens += int(counted.sum())
    return {name: parameter.grad / tokens for name, parameter in trained.named_parameters()}


def _model(folder: Path, state: Mapping[str, Any]) -> Any:
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    given = {name: torch.as_tensor(tensor, dtype=torch.float64) for name, tensor in state.items()}
    unknown = made.load_state_dict(given, strict=False).unexpected_keys
    assert not unknown
    return made.eval()


def _alone(model: Any, batch: MicroBatch, sample: int, *, temperature: float) -> torch.Tensor:
    """Return the log-probs of one response, float64[n], from that sample by itself."""
    prompt, response = (torch.from_numpy(ids.row(sample).astype(np.int64)) for ids in (batch.prompts, batch.responses))
    logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
