"""Tests of how questions become ids: templates, chats, conversations."""

import json
from pathlib import Path

import pytest

from asyncflow.api.learning import DataSpec
from asyncflow.data.base import Message, Prompt
from asyncflow.data.prompter import PromptFormat
from asyncflow.data.sources import open_held_out, open_training
from asyncflow.errors import ManifestError
from asyncflow.models.source import materialize_config
from asyncflow.models.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<say>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = materialize_config("tiny://reverse-digits", tmp_path)
    turns = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "+1"},
    ]
    lines = [{"prompt": turns, "answer": 3}, {"prompt": "5 {x}", "answer": 5}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def asked(folder: Path, line: int, **config: object) -> str:
    data = DataSpec(train={"source": "chats.jsonl", "config": {"split": "whole"}, **config})
    tokenizer = Tokenizer.load(folder)
    prompter = open_training(data, tokenizer, folder=folder.parent.parent, cache=folder.parent.parent)
    serial = next(n for n in range(2) if prompter.source.prompt(n).answer == (3, 5)[line])
    return tokenizer.decode(prompter.ids(serial))


def test_a_template_is_put_around_the_question_and_nothing_else_is_replaced(folder: Path) -> None:
    assert asked(folder, 1) == "5 {x}"
    assert asked(folder, 1, template="Q: {question} {y}\nA:") == "Q: 5 {x} {y}\nA:"


def test_a_prompt_without_tokens_is_refused(folder: Path) -> None:
    (folder.parent.parent / "chats.jsonl").write_text('{"prompt": "", "answer": 5}\n')
    assert asked(folder, 1, template="{question}?") == "?"
    with pytest.raises(
        ManifestError, match=r"the prompt '' has no tokens\. Remove it from the data, or set a template"
    ):
        asked(folder, 1)


def test_chats(folder: Path) -> None:
    with pytest.raises(ManifestError, match="no chat template"):
        asked(folder, 1, chat=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert asked(folder, 1, chat=True) == "<user>5 {x}<say>"
    assert asked(folder, 1, chat=True, system="Be kind.", template="{question}!") == "<system>Be kind.<user>5 {x}!<say>"


THINKING = "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}"


def both(folder: Path, **data: object) -> list[str]:
    """The first training prompt and the first held-out one of a manifest, as texts."""
    base = folder.parent.parent
    for name in ("train", "eval"):
        (base / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "answer": 1}))
    spec = DataSpec(
        train={"source": "train.jsonl", **data.pop("train", {})},
        eval={"source": "eval.jsonl", "size": 1, **data.pop("eval", {})},
        **data,
    )
    tokenizer = Tokenizer.load(folder)
    train = open_training(spec, tokenizer, folder=base, cache=base)
    held_out = open_held_out(spec, tokenizer, train=train.source, folder=base, cache=base)
    return [tokenizer.decode(prompter.ids(0)) for prompter in (train, *held_out.values())]


def test_an_evaluation_has_the_options_of_training_unless_it_says_otherwise(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(THINKING)
    off, chat = {"chatOptions": {"enable_thinking": False}}, {"chat": True}
    assert both(folder, train=chat, eval=chat) == ["train", "eval"]
    assert both(folder, train=chat | off, eval=chat) == ["train<no>", "eval<no>"]
    assert both(folder, train=chat | off, eval=chat | {"chatOptions": {}}) == ["train<no>", "eval"]
    assert both(folder, train=chat, eval=chat | off) == ["train", "eval<no>"]
    assert both(folder, train=chat | off, eval={}) == ["train<no>", "eval"], "no template, so nothing reads them"


def test_options_that_nothing_reads_are_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(THINKING)
    with pytest.raises(
        ManifestError, match=r"data\.eval\.chatOptions: no chat template .* Set spec\.data\.eval\.chat: true"
    ):
        both(folder, eval={"chatOptions": {"enable_thinking": False}})
    with pytest.raises(ManifestError, match=r"data\.evalSets\[b\]\.chatOptions: no chat template "):
        both(folder, evalSets=[{"name": "b", "source": "eval.jsonl", "size": 1, "chatOptions": {"enable_thinking": 0}}])
    with pytest.raises(
        ManifestError, match=r"does not read the chatOptions enable_thinkin\. It reads: enable_thinking"
    ):
        both(folder, train={"chat": True, "chatOptions": {"enable_thinkin": False}})
    with pytest.raises(
        ManifestError, match=r"chatOptions is not a setting of the source\. Set spec\.data\.train\.chatOptions"
    ):
        both(folder, train={"config": {"chatOptions": {}}})


def test_a_conversation_is_sent_as_it_is(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert asked(folder, 0) == "<user>1+1<assistant>2<user>+1<say>"
    assert asked(folder, 0, chat=True, system="Sum.") == "<system>Sum.<user>1+1<assistant>2<user>+1<say>"


def test_a_second_system_message_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    own = (Message(role="system", content="Add."), Message(role="user", content="1+1"))
    prompt = Prompt(question="1+1 with a rule", messages=own)
    assert PromptFormat(chat=True).messages(prompt) == own
    with pytest.raises(ManifestError, match=r"the manifest has a system .* 1\+1 with a rule\. Remove it"):
        PromptFormat(chat=True, system="Sum.").messages(prompt)
