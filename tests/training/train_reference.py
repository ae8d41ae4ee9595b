"""The reference of these tests: one padded batch through transformers, and every formula written out, naively."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from asyncflow.algorithms.loss import Loss
from asyncflow.algorithms.losses import MAX_LOG_RATIO
from asyncflow.api.workers import LoraSpec
from asyncflow.identity import SampleKey
from asyncflow.rpc.columns import Jagged
from asyncflow.training.batch import MicroBatch
from asyncflow.training.ranks import ProcessGroup
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend

HORIZON = 12
TEMPERATURE = 0.8
REFERENCE_SCALE = 1.02


def samples(groups: int = 5, size: int = 4) -> MicroBatch:
    """Groups with one prompt each; one sample is silent, one has an empty response, one is wholly masked."""
    rng = np.random.default_rng(3)
    keys, prompts, responses, masks = [], [], [], []
    for serial in range(groups):
        prompt = rng.integers(0, 64, rng.integers(2, 9))
        for sample in range(size):
            length = int(rng.integers(1, HORIZON + 1))
            keys.append(SampleKey(serial, sample))
            prompts.append(prompt)
            responses.append(rng.integers(0, 64, length))
            masks.append(rng.random(length) < 0.8)
    responses[5], masks[5] = responses[5][:0], masks[5][:0]
    masks[9] = np.zeros_like(masks[9])
    advantages = rng.normal(size=len(keys)).astype(np.float32)
    advantages[2] = 0
    lengths = [len(response) for response in responses]
    return MicroBatch(
        keys=keys,
        prompts=Jagged.from_rows(prompts, "int32"),
        responses=Jagged.from_rows(responses, "int32"),
        logprobs=Jagged.from_rows([rng.normal(-4, 0.6, n) for n in lengths], "float32"),
        versions=Jagged.from_rows([np.zeros(n) for n in lengths], "int64"),
        advantages=advantages,
        loss_mask=Jagged.from_rows(masks, "bool"),
    )


def part(batch: MicroBatch, indices: Sequence[int]) -> MicroBatch:
    return batch.take(list(indices))


def padded_logprobs(model: Any, batch: MicroBatch, longest: int) -> torch.Tensor:
    """Log-probs of the responses, [n, longest], from one right-padded batch; 0 beyond a response."""
    return padded_outputs(model, batch, longest)[0]


def padded_outputs(model: Any, batch: MicroBatch, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the responses, and the entropy at each token, as ``padded_logprobs`` has the first."""
    n, width = len(batch), max(np.diff(batch.prompts.offsets)) + longest
    ids, attention = torch.zeros(n, width, dtype=torch.long), torch.zeros(n, width, dtype=torch.long)
    for i in range(n):
        whole = np.concatenate([batch.prompts.row(i), batch.responses.row(i)])
        ids[i, : len(whole)] = torch.from_numpy(whole.astype(np.int64))
        attention[i, : len(whole)] = 1
    logits = model(input_ids=ids, attention_mask=attention).logits / TEMPERATURE
    out, entropy = torch.zeros(n, longest), torch.zeros(n, longest)
    for i in range(n):
        start, length = len(batch.prompts.row(i)), len(batch.responses.row(i))
        rows = logits[i, start - 1 : start - 1 + length].log_softmax(-1)
        out[i, :length] = rows.gather(1, ids[i, start : start + length, None])[:, 0]
        entropy[i, :length] = torch.special.entr(rows.exp()).sum(-1)
    return out, entropy


def reference_gradient(folder: Path, batch: MicroBatch, loss: Loss) -> dict[str, torch.Tensor]:
    return reference_step(folder, batch, loss)[1]


def reference_step(folder: Path, batch: MicroBatch, loss: Loss) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient, in torch's default dtype."""
    # The attention "eager" has a softmax in float32.
    kind: dict[str, Any] = {"dtype": torch.get_default_dtype(), "attn_implementation": "sdpa"}
    model, anchor = (AutoModelForCausalLM.from_pretrained(folder, **kind) for _ in range(2))
    with torch.no_grad():
        for parameter in anchor.parameters():
            parameter.mul_(REFERENCE_SCALE)
    longest = max(len(batch.responses.row(i)) for i in range(len(batch)))
    logprobs, entropy = padded_outputs(model, batch, longest)
    mask, old = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
    assert batch.loss_mask is not None
    for i in range(len(batch)):
        length = len(batch.responses.row(i))
        mask[i, :length] = torch.from_numpy(batch.loss_mask.row(i).astype(np.float32))
        old[i, :length] = torch.from_numpy(batch.logprobs.row(i).copy())
    advantages = torch.from_numpy(batch.advantages)[:, None]
    behaviour, own = old, logprobs.detach()
    ratio = torch.exp(logprobs - (old if loss.old == "behaviour" else own))
    clipped = torch.clamp(ratio, 1 - loss.clip.low, 1 + loss.clip.high)
    tokens = torch.maximum(-advantages * ratio, -advantages * clipped)
    if loss.clip.dual is not None:
        tokens = torch.where(advantages < 0, torch.minimum(tokens, -advantages * loss.clip.dual), tokens)
    if loss.correction is not None:
        tokens = tokens * reference_weights(own - behaviour, mask, loss)
    if loss.kl:
        with torch.no_grad():
            anchored = padded_logprobs(anchor, batch, longest)
        tokens = tokens + loss.kl * reference_divergence(logprobs, anchored, loss.kl_name)
    tokens = tokens - loss.entropy * entropy
    tokens = tokens * mask
    counts = mask.sum(1)
    alive = counts > 0
    value = {
        "token-mean": lambda: tokens.sum() / mask.sum(),
        "token-sum": lambda: tokens.sum(),
        "seq-mean-token-sum": lambda: tokens.sum(1)[alive].mean(),
        "seq-mean-token-mean": lambda: (tokens.sum(1)[alive] / counts[alive]).mean(),
        "seq-mean-token-sum-norm": lambda: tokens.sum(1)[alive].mean() / HORIZON,
    }[loss.aggregation.name]()
    value.backward()
    return value.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def reference_divergence(logprobs: torch.Tensor, anchored: torch.Tensor, name: str) -> torch.Tensor:
    """Schulman's estimates of KL(policy || reference); k3+ has the value of k3 and the gradient of k2."""
    away = logprobs - anchored
    k3 = torch.exp(-away) + away - 1
    return {
        "k1": away,
        "k2": away**2 / 2,
        "k3": k3,
        "k3+": k3.detach() + away.detach() * (logprobs - logprobs.detach()),
    }[name]


def reference_weights(distance: torch.Tensor, mask: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Importance weights, [n, longest], of samples whose policies are ``distance`` apart; 0 beyond a response."""
    correction = loss.correction
    assert correction is not None
    weights = torch.zeros_like(mask)
    for i, j in mask.nonzero().tolist():
        whole = distance[i][mask[i] > 0]
        exponent = {"token": distance[i, j], "sequence": whole.sum(), "geometric": whole.mean()}[correction.level]
        ratio = exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if correction.low <= ratio <= correction.high:
            weights[i, j] = 1 if loss.old == "behaviour" else ratio
        elif correction.kind == "truncate":
            weights[i, j] = min(max(ratio, torch.tensor(correction.low)), torch.tensor(correction.high))
    return weights


STOCHASTIC: dict[str, Any] = {"compute": "bfloat16", "weights": "bfloat16"}
HALF: dict[str, Any] = {"compute": "bfloat16", "options": {"gradient_checkpointing": True, "head_tokens": 5}}


def settings_of_shards(**more: Any) -> BackendSettings:
    return BackendSettings(
        optimizer=OptimizerSettings(learning_rate=1e-4, steps=8, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.5),
        loss=Loss(kl=0.05, entropy=0.01),
        temperature=TEMPERATURE,
        pack_tokens=48,
        threads=1,
        **more,
    )


def train_share(backend: TorchBackend, first: int, last: int) -> dict[str, float]:
    """Train this rank's share of the samples, in two slots a step."""
    batch, rank, world, metrics = samples(), backend.group.rank, backend.group.world, {}
    for step in range(first, last + 1):
        mine = [i for i in range(len(batch)) if i % world == rank]
        for slot in (mine[: 1 + rank], mine[1 + rank :]):
            backend.micro_batch(part(batch, slot), version=step - 1)
        metrics = backend.finish_step(step)
    return metrics


def held_bytes(backend: TorchBackend) -> int:
    """Bytes of parameters, gradients and moments on this rank."""
    kept = [piece.tensor for piece in (*backend._shards, *backend._optimizer.state())]
    return sum(tensor.nbytes for tensor in (*kept, backend._optimizer.gradient))


def weights(backend: TorchBackend) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in backend.tensors()}


def assert_same_bits(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    assert got
    for name, array in expected.items():
        assert got[name].tobytes() == array.tobytes(), name


def aged_samples() -> MicroBatch:
    return part(samples(), range(6))


def adapter_steps(folder: Path, group: ProcessGroup, own: Sequence[int]) -> dict[str, np.ndarray]:
    """Adapters after two steps of two updates each, of which this rank has the samples ``own``."""
    # A large epsilon, so that AdamW does not blow up differences of rounding.
    optimizer = OptimizerSettings(learning_rate=1e-2, steps=2, epsilon=1e-2)
    lora = LoraSpec(rank=4, targets=("q_proj", "up_proj"))
    backend = TorchBackend(BackendSettings(optimizer=optimizer, lora=lora, threads=1), group=group)
    backend.load(folder, checkpoint=None)
    batch = samples()
    for step in (1, 2):
        for half in (range(10), range(10, 20)):
            if half.start:
                backend.update(step)
            backend.micro_batch(part(batch, [i for i in half if i in own]), version=None)
        backend.finish_step(step)
    made = {name: array.copy() for name, array in backend.full_tensors(dict(backend.tensors()))}
    backend.close()
    return made


class GradientKept(TorchBackend):
    """The backend itself; it only keeps the normalised gradient that ``finish_step`` saw.

    Weights in float64 stay where they are, since AdamW's moments are float32.
    """

    def load(self, folder: Path, *, checkpoint: Path | None) -> None:
        super().load(folder, checkpoint=checkpoint)
        if self._reference is not None:
            with torch.no_grad():
                for parameter in self._reference.parameters():
                    parameter.mul_(REFERENCE_SCALE)
        step = self._optimizer._adam.step

        def keep_and_step() -> None:
            grads = {name: p.grad for name, p in self._model.named_parameters()}
            self.kept = {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}
            if str(self.settings.weights) != "float64":
                step()

        self._optimizer._adam.step = keep_and_step


def relative_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert got.keys() == expected.keys()
    a = torch.cat([got[name].double().flatten() for name in sorted(got)])
    b = torch.cat([expected[name].double().flatten() for name in sorted(got)])
    return float((a - b).norm() / b.norm())
