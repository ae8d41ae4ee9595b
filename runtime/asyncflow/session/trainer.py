"""A training algorithm as a class: subclass ``Trainer``, and override the methods that differ.

Invariant: methods that are not overridden follow the manifest, and refuse settings that they do not implement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig

from asyncflow.algorithms.base import Algorithm
from asyncflow.algorithms.losses import Clip, ppo_clip
from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError, Refused
from asyncflow.models.folder import model_class
from asyncflow.roles.backend import backend_settings
from asyncflow.rollout.engines.base import GenerationRequest
from asyncflow.session.engines import Engines
from asyncflow.session.experience import Experience
from asyncflow.session.generating import UserEngine
from asyncflow.training.backend import check_skipped


class OwnTrainer:
    """A training loop in plain torch over ``engines``, for models that fit on one device.

    ``update`` computes the loss, ``generate_sequences`` generates like a rollout, ``build`` makes the model and its
    optimizer. An override of any of them makes a new algorithm. model, optimizer: result of ``build``; actor: the model
    that generates in this process if ``generate_sequences`` is overridden.
    """

    def __init__(self, engines: Engines) -> None:
        if engines.job is None:
            hint = "Pass init_engines the manifest of a job, or the folder of its run"
            raise ManifestError("a standalone queue has no model and no rollouts", where="Trainer", hint=hint)
        self.engines = engines
        self.spec = engines.job.spec
        self.device = torch.device(PROFILES[self.spec.trainer.accelerator.profile].device)
        self._settings = backend_settings(self.spec, host="")
        self.model, self.optimizer = self.build()
        self.actor: nn.Module | None = None
        self._generates = False
        if engines.state is not None:
            self.model.load_state_dict(engines.state["model"])
            self.optimizer.load_state_dict(engines.state["optimizer"])

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model with θ_0, and its optimizer: AdamW with the settings of the manifest."""
        kind = model_class(AutoConfig.from_pretrained(self.engines.model))
        model = kind.from_pretrained(self.engines.model, dtype=torch.float32).to(self.device)
        adamw = self._settings.optimizer
        decayed = [each for each in model.parameters() if each.ndim > 1]
        others = [each for each in model.parameters() if each.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": adamw.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return model, torch.optim.AdamW(groups, lr=adamw.learning_rate, betas=adamw.betas, eps=adamw.epsilon)

    def logprobs(self, batch: Experience) -> Tensor:
        """Return the log-prob of each token at the sampling temperature, float32[n, length]; 0 for the first token."""
        logits = self.model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, :-1].float()
        chosen = torch.log_softmax(logits / self.spec.sampling.temperature, -1).gather(-1, batch.ids[:, 1:, None])
        return nn.functional.pad(chosen[..., 0], (1, 0))

    def update(self, batch: Experience) -> Tensor:
        """Return the sum of the losses of the tokens that count; ``fit`` divides by their number in the step.

        The default is the clipped policy gradient with ``spec.algorithm.clip``. Raises ManifestError for settings of
        the algorithm that it does not implement.
        """
        self._check_default()
        clip = self.spec.algorithm.clip
        logprobs, advantages = self.logprobs(batch), batch.advantages[:, None].expand_as(batch.logprobs)
        terms = ppo_clip(
            logprobs[batch.mask],
            batch.logprobs[batch.mask],
            advantages[batch.mask],
            Clip(low=clip.low, high=clip.high, dual=clip.dual),
        )
        return terms.loss.sum()

    def generate_sequences(self, prompts: Sequence[GenerationRequest]) -> list[tuple[list[int], list[float]]]:
        """Return for each prompt the tokens that follow it, and the log-prob of each sampled token.

        By default the job's rollouts generate. An override is called instead, in another thread, with prompts for one
        version of the weights (the weights of ``actor``), and the job must not have rollouts (``rollout.replicas: 0``).
        An override may call this method, which samples as the rollouts do.
        """
        assert self.actor is not None
        return [_sample(self.actor, prompt) for prompt in prompts]

    def fit(self) -> None:
        """Train until the last step. A step whose gradient is not finite changes no weights.

        Raises Diverged if this repeats, and Refused if an earlier call was interrupted within a step, or if ``update``
        returns no loss.
        """
        skipped = 0
        if type(self).generate_sequences is not OwnTrainer.generate_sequences and not self._generates:
            self._generate_here()
        self.engines.start(self.model)
        while self.engines.step < self.engines.steps:
            loss, tokens = 0.0, 0
            self.optimizer.zero_grad()
            while (batch := self.engines.get_experience_data()) is not None:
                part = self.update(batch.to(self.device))
                if not isinstance(part, Tensor) or part.numel() != 1:
                    what = f"update returned {getattr(part, 'shape', part)}"
                    raise Refused(what, where="fit", hint="Return the loss of the batch, summed over its tokens")
                part.backward()
                loss, tokens = loss + float(part.detach()), tokens + int(batch.mask.sum())
            metrics = self._step(tokens) | {"loss": loss / max(1, tokens)}
            skipped = skipped + 1 if metrics["skipped"] else 0
            check_skipped(skipped, step=self.engines.step + 1)
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            self.engines.weight_sync_notify(self.model, state=state, metrics=finite)

    def _step(self, tokens: int) -> dict[str, float]:
        """Make the optimizer step, unless the gradient is not finite, and return its metrics."""
        settings = self._settings.optimizer
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(self.engines.step + 1)
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        for gradient in gradients:
            gradient /= max(1, tokens)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm or float("inf"))
        skipped = not norm.isfinite()
        if not skipped:
            self.optimizer.step()
        return {"grad_norm": float(norm), "skipped": float(skipped)}

    def _check_default(self) -> None:
        algorithm = self.spec.algorithm
        unsupported = {
            "name": type(self._settings.loss.algorithm).policy is not Algorithm.policy,
            "aggregation": algorithm.aggregation != "token-mean",
            "kl.coefficient": algorithm.kl.coefficient > 0,
            "entropy": algorithm.entropy != 0,
            "correction": algorithm.correction is not None,
            "old": algorithm.old != "behaviour",
        }
        if found := [f"spec.algorithm.{name}" for name, present in unsupported.items() if present]:
            hint = "Override update, or leave them at grpo, token-mean, 0, 0, absent and behaviour"
            raise ManifestError("Trainer.update does not implement this setting", where=", ".join(found), hint=hint)

    def _generate_here(self) -> None:
        if self.spec.rollout.replicas:
            what, hint = "rollouts of the job would generate, too", "Set rollout.replicas: 0"
            raise ManifestError(what, where="spec.rollout.replicas", hint=hint)
        config = AutoConfig.from_pretrained(self.engines.model)
        self.actor = model_class(config).from_config(config, dtype=torch.float32).to(self.device).eval()
        self.engines.generate_here(partial(UserEngine, generate=self._generate, load=self._load))
        self._generates = True

    def _generate(self, prompts: Sequence[GenerationRequest]) -> Sequence[tuple[Sequence[int], Sequence[float]]]:
        with torch.no_grad():
            return self.generate_sequences(prompts)

    def _load(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        assert self.actor is not None
        for name, parameter in self.actor.named_parameters():
            tensor = torch.tensor(tensors[name])
            with torch.no_grad():
                parameter.copy_(tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor)


Trainer = OwnTrainer
"""The public name in ``asyncflow``."""


def _sample(model: nn.Module, prompt: GenerationRequest) -> tuple[list[int], list[float]]:
    """Sample one response, token by token."""
    device = next(model.parameters()).device
    tokens = torch.tensor([[*prompt.prompt_ids, *prompt.continues.ids.tolist()]], device=device)
    ids: list[int] = []
    logprobs: list[float] = []
    cache = None
    while len(ids) < prompt.max_tokens - prompt.prior_tokens and not (ids and ids[-1] in prompt.stop_ids):
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits[0, -1].float()
        drawn = torch.log_softmax(logits / (prompt.temperature or 1.0), -1)
        token = int(drawn.argmax() if prompt.temperature == 0 else torch.multinomial(drawn.exp(), 1))
        ids.append(token)
        logprobs.append(float(drawn[token]))
        tokens = torch.tensor([[token]], device=device)
    return ids, logprobs
