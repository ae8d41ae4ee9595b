"""The tokenizer of all roles: text to ids and back, and chat templates, without transformers or torch.

Invariant: ``Tokenizer.load(folder)`` produces the same ids as transformers for the same ordinary Hugging Face folder,
with ``TODAY`` as the current date in chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncflow.errors import ManifestError
from asyncflow.models.folder import MORE_TEMPLATES, text_config

TODAY = date(2024, 7, 26)
"""The date that chat templates use, so that a run does not depend on its date: the default of Llama's templates."""

_DEFAULT, _TOOL_USE = "default", "tool_use"
"""Names of a model's chat templates: the default, and the template for chats with tools if the model has one."""
_RESERVED = ("messages", "add_generation_prompt")
"""Variables of a chat template that are not options."""


class ChatTemplate(NamedTuple):
    """A compiled template, and the names of the variables that it reads."""

    template: Template
    reads: frozenset[str]


class Tokenizer:
    """The tokenizer of one model folder.

    eos_ids: the ids that end a response, sorted; pad_id: the padding id, or the first of eos_ids if the folder names
    none; vocab_size: the number of ids of the tokenizer itself (the model's embedding may be larger); embeddings: the
    number of ids that the model knows, None if it is not stated.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        pad_id: int,
        embeddings: int | None = None,
        chat_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._core = core
        self._chats = {name: _compile(text) for name, text in (chat_templates or {}).items()}
        self._special_tokens = dict(special_tokens or {})
        self.eos_ids = tuple(sorted(eos_ids))
        self.pad_id = pad_id
        self.embeddings = embeddings
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, config.json, generation_config.json and the chat template.

        Raises ManifestError if the folder has no tokenizer.json or no end-of-sequence token.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ManifestError(
                "the model has no tokenizer.json",
                where=str(folder),
                hint="Use a Hugging Face folder with a fast tokenizer; transformers' save_pretrained writes one",
            )
        try:
            core = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no more specific type
            raise ManifestError(f"cannot be read: {error}", where=str(file), hint="Copy the folder again") from error
        core.no_padding()
        core.no_truncation()
        settings = _json(folder / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: text for name in names if (text := _token_text(settings.get(name)))}
        named = [core.token_to_id(special["eos_token"])] if "eos_token" in special else []
        config = _json(folder / "config.json")
        for source in (config, _json(folder / "generation_config.json")):
            ids = source.get("eos_token_id")
            named += ids if isinstance(ids, list) else [ids]
        eos = {int(token) for token in named if token is not None}
        if not eos:
            raise ManifestError(
                "no end-of-sequence token is named", where=str(folder), hint="Set eos_token_id in its config.json"
            )
        pad = core.token_to_id(special["pad_token"]) if "pad_token" in special else None
        return cls(
            core,
            eos_ids=sorted(eos),
            pad_id=min(eos) if pad is None else pad,
            embeddings=text_config(config).get("vocab_size"),
            chat_templates=_chat_templates(folder, settings),
            special_tokens=special,
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of ``text``; special tokens in it are recognised; ``add_special_tokens`` adds the others.

        Raises ManifestError if the text has a token that the model does not know.
        """
        ids: list[int] = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        if self.embeddings is not None and (last := max(ids, default=0)) >= self.embeddings:
            raise ManifestError(
                f"a text has the token {self._core.id_to_token(last)!r}, with the id {last} in the tokenizer, "
                f"and the model knows the ids below {self.embeddings}",
                where="spec.model.source",
                hint="Resize the embeddings of the model (resize_token_embeddings), or use its own tokenizer",
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``, without special tokens by default."""
        text: str = self._core.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)
        return text

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with the text ``text``, None if the model has none."""
        return next(
            (id_ for id_, token in self._core.get_added_tokens_decoder().items() if token.content == text), None
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of a conversation, rendered by the model's own chat template.

        messages: {"role", "content"} each; options: variables for the template. Raises ManifestError if there is no
        template, if it does not read one of the options, or if it refuses the messages.
        """
        options = dict(options or {})
        chat = self._chats.get(_TOOL_USE) if options.get("tools") is not None else None
        chat = chat or self._chats.get(_DEFAULT)
        if chat is None:
            raise ManifestError(
                "the prompts are chats, and the model has no chat template",
                where="spec.model.source",
                hint="Remove data.train.chat and data.eval.chat, and write prompts as texts; or use a chat model",
            )
        known = chat.reads - {*_RESERVED, *self._special_tokens}
        if unknown := sorted(options.keys() - known):
            raise ManifestError(
                f"the model's chat template does not read the chatOptions {', '.join(unknown)}",
                where="spec.data",
                hint=f"It reads: {', '.join(sorted(known)) or 'no options'}",
            )
        try:
            text = chat.template.render(
                **{"tools": None, "documents": None, **self._special_tokens, **options},
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template may raise any error of Python
            raise ManifestError(f"the model's chat template refuses the messages: {error}") from error
        return self.encode(text)


class _Generation(Extension):
    """The block ``{% generation %}``, with which templates mark the model's output: rendered as its body."""

    tags = {"generation"}  # noqa: RUF012  the base class says so

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Return the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> ChatTemplate:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = TODAY.strftime
    try:
        reads = find_undeclared_variables(environment.parse(template)) - environment.globals.keys()
        return ChatTemplate(environment.from_string(template), frozenset(reads))
    except TemplateError as error:
        raise ManifestError(f"the model's chat template cannot be read: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a model that are used, by name."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        files = {_DEFAULT: file, _TOOL_USE: folder / MORE_TEMPLATES / f"{_TOOL_USE}.jinja"}
        return {name: each.read_text(encoding="utf-8") for name, each in files.items() if each.is_file()}
    stated = settings.get("chat_template") or []
    if isinstance(stated, str):
        return {_DEFAULT: stated}
    named = {entry.get("name"): entry.get("template") for entry in stated}
    return {name: named[name] for name in (_DEFAULT, _TOOL_USE) if named.get(name)}


def _token_text(token: object) -> str:
    if isinstance(token, Mapping):
        return str(token.get("content", ""))
    return token if isinstance(token, str) else ""


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ManifestError(f"is not JSON: {error}", where=str(file), hint="Copy the folder again") from error
    return content if isinstance(content, dict) else {}
