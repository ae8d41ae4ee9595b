"""Conversion of a task to the token ids of a prompt: template, system message, chat template.

Invariant: the ids are a pure function of (prompt, format, tokenizer), both for training and for held-out prompts.
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
"""Role of the message with instructions for the model."""
_QUOTED = 200


class PromptFormat(NamedTuple):
    """Format of a question for the model.

    template: the text around ``{question}``, the only placeholder; system: a system message, for chat only;
    chat: whether the model's chat template is applied (instruct models) or the text is used unchanged (base models);
    chat_options: variables of the chat template.
    """

    template: str = QUESTION
    system: str = ""
    chat: bool = False
    chat_options: Mapping[str, Any] = MappingProxyType({})

    def messages(self, prompt: Prompt) -> tuple[Message, ...]:
        """Return the conversation with the question of ``prompt``. Raises ManifestError for two system messages."""
        if self.system and any(message.role == SYSTEM for message in prompt.messages):
            raise ManifestError(
                f"the manifest has a system message, and so has the conversation {prompt.question[:_QUOTED]}",
                where="spec.data",
                hint="Remove it from the manifest, or remove the system messages from the data",
            )
        system = (Message(role=SYSTEM, content=self.system),) if self.system else ()
        if prompt.messages:
            return system + prompt.messages
        return (*system, Message(role="user", content=self.text(prompt)))

    def text(self, prompt: Prompt) -> str:
        """Return the question inside the template."""
        return self.template.replace(QUESTION, prompt.question)


class Encoder(Protocol):
    """The methods of a tokenizer that a prompter needs."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""

    def chat(self, messages: Sequence[Mapping[str, str]], *, options: Mapping[str, Any]) -> list[int]:
        """Return the ids of a conversation. Raises ManifestError if the model's chat template cannot render it."""


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
        """Return the token ids of ``prompt``. Raises ManifestError if they cannot be made, or if there are none."""
        if self.form.chat or prompt.messages:
            messages = self.form.messages(prompt)
            turns = [{"role": turn.role, "content": turn.content} for turn in messages]
            ids = self._tokenizer.chat(turns, options=self.form.chat_options)
        else:
            ids = self._tokenizer.encode(self.form.text(prompt), add_special_tokens=True)
        if not ids:
            hint = "Remove it from the data, or set a template: a prompt needs at least one token"
            raise ManifestError(f"the prompt {prompt.question[:_QUOTED]!r} has no tokens", where="spec.data", hint=hint)
        return ids


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Findings about the first prompts of a source.

    prompts: number of prompts examined; longest: tokens of the longest one; too_long: the questions with more tokens
    than allowed; too_large: the questions whose packed task has more bytes than allowed; unanswered: the questions
    without an answer.
    """

    prompts: int
    longest: int
    too_long: list[str]
    too_large: list[str]
    unanswered: list[str]


def survey(prompter: Prompter, *, most: int, within_s: float, max_tokens: int, max_bytes: int) -> Survey:
    """Examine at most ``most`` of the first prompts of a source, for no longer than ``within_s`` seconds.

    Raises ManifestError if a prompt or its token ids cannot be made.
    """
    deadline = time.monotonic() + within_s
    examined = longest = 0
    too_long: list[str] = []
    too_large: list[str] = []
    unanswered: list[str] = []
    while examined < most and (examined == 0 or time.monotonic() < deadline):
        prompt = prompter.source.prompt(examined)
        length = len(prompter.encode(prompt))
        examined, longest = examined + 1, max(longest, length)
        if length > max_tokens:
            too_long.append(prompt.question)
        if len(prompt.packed()) > max_bytes:
            too_large.append(prompt.question)
        if prompt.answer is None:
            unanswered.append(prompt.question)
    return Survey(prompts=examined, longest=longest, too_long=too_long, too_large=too_large, unanswered=unanswered)
