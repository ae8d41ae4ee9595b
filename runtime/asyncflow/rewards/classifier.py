"""The reward ``reward_model``: a sequence classification model of transformers, on the device of the reward process.

A sample is formatted by the model's chat template: the prompt as one turn, or as the turns of its conversation, then
the response; without a chat template, the response is appended to the prompt. The reward is the logit of ``label``.

Invariant: the model is loaded together with the function, before the deadline of the first sample starts, and from
local files only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from asyncflow.data.base import MODEL, Message
from asyncflow.errors import ManifestError
from asyncflow.models.device import find_device
from asyncflow.plugins import read_options


class RewardModelOptions(msgspec.Struct, frozen=True):
    """Settings of ``reward_model``.

    model: folder of the model, in the manifest's folder or named in ``reward.files``; label: index of the logit;
    max_length: most tokens of a sample, of a longer one the last tokens are used; threads: compute threads of a
    process.
    """

    model: str = ""
    label: int = 0
    max_length: Annotated[int, msgspec.Meta(ge=1)] = 4096
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


class RewardModel:
    """The model. Raises ManifestError if the settings are invalid, and any exception of transformers."""

    def __init__(self, *, config: dict[str, Any], device: str, share: float) -> None:
        self._options = options = read_options(config, RewardModelOptions, where="spec.reward.config")
        torch.set_num_threads(options.threads)
        self._device = find_device(device, share=share, where="spec.reward.role.accelerator")
        if not (options.model and Path(options.model).is_dir()):
            what = f"there is no folder {options.model!r} that this process can read"
            hint = "Set it to the model's folder, next to the manifest or listed in reward.files"
            raise ManifestError(what, where="spec.reward.config.model", hint=hint)
        self._tokenizer = AutoTokenizer.from_pretrained(
            options.model, local_files_only=True, truncation_side="left", padding_side="right"
        )
        model = AutoModelForSequenceClassification.from_pretrained(options.model, local_files_only=True)
        self._model = model.to(self._device).eval()
        labels = self._model.config.num_labels
        if not 0 <= options.label < labels:
            what = f"{options.label} is not one of the model's {labels} labels"
            raise ManifestError(what, where="spec.reward.config.label", hint=f"Set 0 to {labels - 1}")
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
        text: str = self._tokenizer.apply_chat_template(turns(prompt, response), tokenize=False)
        return text


def turns(prompt: str, response: str) -> list[dict[str, str]]:
    """Return a sample as turns. prompt: a question, or a conversation as JSON, as ``data.files`` writes it."""
    try:
        asked = msgspec.json.decode(prompt, type=Annotated[list[Message], msgspec.Meta(min_length=1)])
    except msgspec.DecodeError:
        asked = [Message(role="user", content=prompt)]
    said: list[dict[str, str]] = msgspec.to_builtins([*asked, Message(role=MODEL, content=response)])
    return said
