"""PPO written out: one padded batch through transformers in float64, a critic, GAE over pairs, and both losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_reference import HORIZON, REFERENCE_SCALE, padded_logprobs
from transformers import AutoModelForCausalLM

from asyncflow.training.batch import MicroBatch

Named = Mapping[str, torch.Tensor]


@dataclass
class Wanted:
    """The results of the reference: gradients by name, losses, and what they are made of, [n, longest] each."""

    policy: dict[str, torch.Tensor]
    critic: dict[str, torch.Tensor]
    policy_loss: float
    value_loss: float
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    mask: torch.Tensor
    clipped: float


def rewarded(batch: MicroBatch) -> MicroBatch:
    """The samples with outcomes in the place of advantages."""
    rng = np.random.default_rng(11)
    outcomes = rng.normal(0.3, 0.7, size=len(batch)).astype(np.float32)
    return replace(batch, advantages=None, outcomes=outcomes)


def reference(
    folder: Path,
    batch: MicroBatch,
    *,
    critic: Named,
    temperature: float,
    gamma: float,
    lam: float,
    low: float,
    high: float,
    value_clip: float | None,
    how: str = "token-mean",
    whiten: bool = False,
    penalty: float = 0,
    before: Wanted | None = None,
    policy: Named | None = None,
) -> Wanted:
    """Compute a step: with the estimates of ``before``, where that is given, else with those of these very weights.

    critic, policy: weights by name, of the critic with ``value_head``; without ``policy`` those of the folder. how: the
    average of the policy's losses; that of the critic's is over tokens. penalty: coefficient of the KL (k1) from the
    folder's model, its weights times ``REFERENCE_SCALE``, in the reward.
    """
    kind: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "sdpa"}
    model, judge = (AutoModelForCausalLM.from_pretrained(folder, **kind) for _ in range(2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameter if policy is None else policy[name])
        for name, parameter in judge.named_parameters():
            if name in critic:
                parameter.copy_(critic[name])
    head = critic["value_head.weight"].double().clone().requires_grad_()
    bias = critic["value_head.bias"].double().clone().requires_grad_()
    n, longest = len(batch), max(len(batch.responses.row(i)) for i in range(len(batch)))
    width = max(len(batch.prompts.row(i)) for i in range(n)) + longest
    ids, seen = torch.zeros(n, width, dtype=torch.long), torch.zeros(n, width, dtype=torch.long)
    mask, behaviour = torch.zeros(n, longest, dtype=torch.float64), torch.zeros(n, longest, dtype=torch.float64)
    for i in range(n):
        prompt, response = batch.prompts.row(i), batch.responses.row(i)
        whole = np.concatenate([prompt, response]).astype(np.int64)
        ids[i, : len(whole)], seen[i, : len(whole)] = torch.from_numpy(whole), 1
        counted = np.ones(len(response)) if batch.loss_mask is None else batch.loss_mask.row(i)
        mask[i, : len(response)] = torch.from_numpy(counted.astype(np.float64))
        behaviour[i, : len(response)] = torch.from_numpy(batch.logprobs.row(i).astype(np.float64))
    logits = model(input_ids=ids, attention_mask=seen).logits / temperature
    states = judge.base_model(input_ids=ids, attention_mask=seen).last_hidden_state
    logprobs, values = torch.zeros(n, longest, dtype=torch.float64), torch.zeros(n, longest, dtype=torch.float64)
    for i in range(n):
        start, length = len(batch.prompts.row(i)), len(batch.responses.row(i))
        rows = slice(start - 1, start - 1 + length)
        targets = ids[i, start : start + length, None]
        logprobs[i, :length] = logits[i, rows].log_softmax(-1).gather(1, targets)[:, 0]
        values[i, :length] = (states[i, rows] @ head.T)[:, 0] + bias
    if before is None:
        old = values.detach()
        paid = penalty * (behaviour - scaled_logprobs(folder, batch, longest).double()) * mask
        advantages, returns = estimates(old, mask, paid, torch.from_numpy(batch.outcomes).double(), gamma, lam)
        if whiten:
            chosen = advantages[mask > 0]
            advantages = (advantages - chosen.mean()) / (chosen.std() + 1e-8) * mask
    else:
        old, advantages, returns = before.values, before.advantages, before.returns
    ratio = torch.exp(logprobs - behaviour)
    free, bounded = -advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high)
    policy_loss = average(torch.maximum(free, bounded) * mask, mask.sum(1), how)
    policy_loss.backward()
    squares = (values - returns) ** 2
    held = squares
    if value_clip is not None:
        held = (old + torch.clamp(values - old, -value_clip, value_clip) - returns) ** 2
    value_loss = (0.5 * torch.maximum(squares, held) * mask).sum() / mask.sum()
    value_loss.backward()
    gradients = {name: parameter.grad for name, parameter in judge.named_parameters() if parameter.grad is not None}
    return Wanted(
        policy={name: parameter.grad for name, parameter in model.named_parameters()},
        critic=gradients | {"value_head.weight": head.grad, "value_head.bias": bias.grad},
        policy_loss=policy_loss.item(),
        value_loss=value_loss.item(),
        values=values.detach(),
        advantages=advantages,
        returns=returns,
        mask=mask,
        clipped=((held > squares + 1e-12) * mask).sum().item() / mask.sum().item(),
    )


def average(tokens: torch.Tensor, counts: torch.Tensor, how: str) -> torch.Tensor:
    """The loss of a step out of those of tokens, [n, longest], of which ``counts`` [n] of each sample count."""
    sums, spoken = tokens.sum(1), int((counts > 0).sum())
    if how == "token-sum":
        return sums.sum()
    if how == "token-mean":
        return sums.sum() / counts.sum()
    scale = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": HORIZON, "seq-mean-token-mean": counts.clamp(min=1)}
    return (sums / scale[how]).sum() / spoken


def scaled_logprobs(folder: Path, batch: MicroBatch, longest: int) -> torch.Tensor:
    anchor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in anchor.parameters():
            parameter.mul_(REFERENCE_SCALE)
        return padded_logprobs(anchor, batch, longest)


def estimates(
    values: torch.Tensor, mask: torch.Tensor, paid: torch.Tensor, outcomes: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, [n, longest], token after token over those that count, from the last to the first."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for i in range(len(values)):
        ahead, later, reward = 0.0, 0.0, outcomes[i]
        for t in reversed(mask[i].nonzero()[:, 0].tolist()):
            later = reward - paid[i, t] + gamma * ahead - values[i, t] + gamma * lam * later
            advantages[i, t], returns[i, t] = later, later + values[i, t]
            ahead, reward = values[i, t], 0.0
    return advantages, returns
