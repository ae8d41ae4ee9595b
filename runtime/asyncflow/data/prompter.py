"""Conversion of a task into the token ids of a prompt: template, system prompt, chat template.

Invariant: the ids are a pure function of (prompt, format, tokenizer), for training and held-out prompts alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from asyncflow.data.base import Message, Prompt, PromptSource
from asyncflow.errors import ManifestError

QUESTION = "{question}"
SYSTEM = "system"
"""Role of who says how the model is to answer."""
_QUOTED = 200


class PromptFormat(NamedTuple):
    """Format in which a question is put to the model.

    template: the text around ``{question}``, the only placeholder; system: a system message, for chat only;
    chat: whether the model's chat template is applied (instruct models) or the text is given as it is (base models);
    chat_options: variables for the chat template.
    """

    template: str = QUESTION
    system: str = ""
    chat: bool = False
    chat_options: Mapping[str, Any] = MappingProxyType({})

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        """Return the conversation that asks ``prompt``. Raises ManifestError for two system messages."""
        if self.system and any(message.role == SYSTEM for message in prompt.messages):
            raise ManifestError(
                f"the manifest gives a system message, and so does the conversation {prompt.question[:_QUOTED]}",
                where="system",
                hint="Leave it out of the manifest, or take those of the data out",
            )
        system = (Message(role=SYSTEM, content=self.system),) if self.system else ()
        if prompt.messages:
            return system + prompt.messages
        return (*system, Message(role="user", content=self.text(prompt)))

    def text(self, prompt: Prompt) -> str:
        """Return the question inside the template."""
        return self.template.replace(QUESTION, prompt.question)


class Encoder(Protocol):
    """Interface of a tokenizer, as far as a prompter needs it."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""

    def chat(self, messages: Sequence[Mapping[str, str]], *, options: Mapping[str, Any]) -> list[int]:
        """Return the ids of a conversation. Raises ManifestError where the model's chat template cannot make them."""


class Prompter:
    """A source of prompts as token ids, by serial."""

    def __init__(self, source: PromptSource, tokenizer: Encoder, form: PromptFormat) -> None:
        self.source = source
        self.form = form
        self._tokenizer = tokenizer

    def ids(self, serial: int) -> list[int]:
        """Return the token ids of task ``serial``."""
        return self.encode(self.source.prompt(serial))

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of ``prompt``. Raises ManifestError where the model cannot be asked so."""
        if self.form.chat or prompt.messages:
            messages = self.form.messages(prompt)
            turns = [{"role": turn.role, "content": turn.content} for turn in messages]
            ids = self._tokenizer.chat(turns, options=self.form.chat_options)
        else:
            ids = self._tokenizer.encode(self.form.text(prompt), add_special_tokens=True)
        if not ids:
            hint = "Take it out, or give a template: a prompt has one token at least"
            raise ManifestError(f"the prompt {prompt.question[:_QUOTED]!r} has no tokens", where="data", hint=hint)
        return ids


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Findings about the first prompts of a source.

    prompts: how many were looked at; longest: tokens of the longest; too_long: the questions with more tokens than
    allowed; too_large: those whose packed task has more bytes than allowed; unanswered: those without an answer.
    """

    prompts: int
    longest: int
    too_long: list[str]
    too_large: list[str]
    unanswered: list[str]


def survey(prompter: Prompter, *, most: int, within_s: float, max_tokens: int, max_bytes: int) -> Survey:
    """Look at the first prompts of a source: at ``most`` of them, and no longer than ``within_s`` seconds.

    Raises ManifestError where a prompt cannot be made, or the model cannot be asked it.
    """
    deadline = time.monotonic() + within_s
    looked = longest = 0
    too_long: list[str] = []
    too_large: list[str] = []
    unanswered: list[str] = []
    while looked < most and (looked == 0 or time.monotonic() < deadline):
        prompt = prompter.source.prompt(looked)
        length = len(prompter.encode(prompt))
        looked, longest = looked + 1, max(longest, length)
        if length > max_tokens:
            too_long.append(prompt.question)
        if len(prompt.packed()) > max_bytes:
            too_large.append(prompt.question)
        if prompt.answer is None:
            unanswered.append(prompt.question)
    return Survey(prompts=looked, longest=longest, too_long=too_long, too_large=too_large, unanswered=unanswered)
