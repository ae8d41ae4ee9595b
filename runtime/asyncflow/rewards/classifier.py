"""The reward ``reward_model``: a sequence classification model of transformers, on the device of the reward process.

The sample is written as the model's chat template says, prompt and response as two turns, or one after the other where
it has none. The reward is the logit of ``label``.

Invariant: the model is loaded with the function, before the time of the first sample runs, and from local files only.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from asyncflow.errors import ManifestError
from asyncflow.models.device import find_device
from asyncflow.plugins import read_options


class RewardModelOptions(msgspec.Struct, frozen=True):
    """Settings.

    model: its folder, relative to that of the manifest, or else named in ``reward.files``; label: index of the logit;
    max_length: tokens of a sample, of which the last ones count where there are more; threads: of a process.
    """

    model: str = ""
    label: int = 0
    max_length: Annotated[int, msgspec.Meta(ge=1)] = 4096
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


class RewardModel:
    """The model. Raises ManifestError for settings that have no meaning, and what transformers raises."""

    def __init__(self, *, config: dict[str, Any], device: str, share: float) -> None:
        self._options = options = read_options(config, RewardModelOptions, where="reward.config")
        if not options.model:
            raise ManifestError("no model is named", where="reward.config.model", hint="Give its folder")
        torch.set_num_threads(options.threads)
        self._device = find_device(device, share=share, where="spec.reward.role.accelerator")
        self._tokenizer = AutoTokenizer.from_pretrained(
            options.model, local_files_only=True, truncation_side="left", padding_side="right"
        )
        model = AutoModelForSequenceClassification.from_pretrained(options.model, local_files_only=True)
        self._model = model.to(self._device).eval()
        labels = self._model.config.num_labels
        if not 0 <= options.label < labels:
            raise ManifestError(f"the model has {labels} labels", where="reward.config.label", hint="Give one of them")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def __call__(self, *, responses: list[str], prompts: list[str]) -> list[float]:
        """Return the logit of each sample."""
        texts = [self._text(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        inputs = self._tokenizer(
            texts,
            return_tensors="pt",
            padding=True,
            truncation=True,
            max_length=self._options.max_length,
            add_special_tokens=self._tokenizer.chat_template is None,
        )
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            logits = self._model(**inputs.to(self._device)).logits
        rewards: list[float] = logits[:, self._options.label].float().tolist()
        return rewards

    def _text(self, prompt: str, response: str) -> str:
        if self._tokenizer.chat_template is None:
            return prompt + response
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text: str = self._tokenizer.apply_chat_template(turns, tokenize=False)
        return text
