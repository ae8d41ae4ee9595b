"""The tokenizer gives the ids that transformers gives, from the same folder."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncflow.errors import ManifestError
from asyncflow.models.source import materialize_config
from asyncflow.models.tokenizer import Tokenizer

TEMPLATE = """
{%- for message in messages -%}
    {%- if message.role not in ("system", "user") -%}{{ raise_exception("who is " + message.role + "?") }}{%- endif -%}
    {{ "<" + message["role"] + ">" + message["content"] | trim + eos_token }}
{% endfor %}
{%- if add_generation_prompt %}{{ "<assistant>" }}{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = materialize_config("tiny://reverse-digits", tmp_path_factory.mktemp("work"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@given(st.text())
def test_any_text_survives(text: str) -> None:
    tokenizer = _tiny()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def _tiny() -> Tokenizer:
    from asyncflow.models import tiny

    return Tokenizer(tiny.byte_tokenizer(), eos_ids=[1], pad_id=0)


@pytest.mark.parametrize("text", ["40718=", "Grüße\n 日本", "a<|end|>b", ""])
def test_ids_are_those_of_transformers(folder: Path, text: str) -> None:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == theirs(text)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert (ours.eos_ids, ours.pad_id) == ((theirs.eos_token_id,), theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("generation", [True, False])
def test_chats_are_those_of_transformers(folder: Path, generation: bool) -> None:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be kind. "}, {"role": "user", "content": "{{ 1 + 1 }}"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=generation)["input_ids"]
    assert ours.chat(messages, add_generation_prompt=generation) == expected


TOOLS = [{"type": "function", "function": {"name": "sum", "description": "Adds <a> & b", "parameters": {"n": [1]}}}]
OPTIONS_TEMPLATE = """
{%- if tools is not none %}{% for tool in tools %}{{ tool | tojson(indent=1) }}{{ "\n" }}{% endfor %}{% endif -%}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif -%}
{{ date_string }}
{%- for message in messages -%}
    {{ "<" + message["role"] + ">" }}
    {%- if message.role == "assistant" %}{% generation %}{{ message["content"] }}{% endgeneration %}
    {%- else %}{{ message["content"] }}{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<assistant>" }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ "<think></think>" }}{% endif %}
{%- endif %}"""
TURNS = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "+1"}]


def with_template(folder: Path, made: Path, template: str) -> Path:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (made / file).write_bytes((folder / file).read_bytes())
    (made / "chat_template.jinja").write_text(template)
    return made


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}, {"tools": TOOLS}])
def test_options_are_read_as_transformers_passes_them(folder: Path, tmp_path: Path, options: dict) -> None:
    made = with_template(folder, tmp_path, OPTIONS_TEMPLATE)
    ours, theirs = Tokenizer.load(made), AutoTokenizer.from_pretrained(made)
    options = {**options, "date_string": "1 May 2025"}
    expected = theirs.apply_chat_template(TURNS, add_generation_prompt=True, **options)["input_ids"]
    assert ours.chat(TURNS, options=options) == expected


def test_the_template_for_tools_is_taken_where_there_are_tools(folder: Path, tmp_path: Path) -> None:
    made = with_template(folder, tmp_path, "{{ messages[0].content }}")
    (made / "additional_chat_templates").mkdir()
    (made / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    ours, theirs = Tokenizer.load(made), AutoTokenizer.from_pretrained(made)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(TURNS, tools=tools, add_generation_prompt=True)["input_ids"]
        assert ours.chat(TURNS, options={"tools": tools} if tools else {}) == expected
    assert ours.decode(ours.chat(TURNS, options={"tools": TOOLS})) == "sum"


def test_an_option_that_the_template_does_not_read_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(with_template(folder, tmp_path, OPTIONS_TEMPLATE))
    with pytest.raises(
        ManifestError, match=r"does not read the chatOptions thinking\. It reads: date_string, enable_thinking, tools"
    ):
        tokenizer.chat(TURNS, options={"thinking": False})
    with pytest.raises(ManifestError, match=r"does not read the chatOptions messages"):
        tokenizer.chat(TURNS, options={"messages": []})


def test_what_the_template_refuses_is_a_manifest_error(folder: Path) -> None:
    with pytest.raises(ManifestError, match="who is pope"):
        Tokenizer.load(folder).chat([{"role": "pope", "content": ""}])


def test_an_error_of_python_in_a_template_is_a_manifest_error(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(with_template(folder, tmp_path, "{{ messages | length + tools }}"))
    with pytest.raises(ManifestError, match="refuses the messages: unsupported operand"):
        tokenizer.chat(TURNS)


@pytest.mark.parametrize("config", [{"vocab_size": 258}, {"text_config": {"vocab_size": 258}}])
def test_a_token_that_the_model_does_not_know_is_refused(folder: Path, tmp_path: Path, config: dict) -> None:
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens(["<|new|>"])
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("1+1") == [18, 12, 18]
    with pytest.raises(ManifestError, match=r"'<\|new\|>', with the id 258 .* knows the ids below 258"):
        tokenizer.encode("1<|new|>")


def test_a_template_that_asks_for_the_day_is_always_told_the_same(folder: Path, tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y, %H:%M') }}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.chat([])) == tokenizer.decode(tokenizer.encode("26 Jul 2024, 00:00"))


def test_all_end_tokens_are_known(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1, 9]}))
    assert Tokenizer.load(tmp_path).eos_ids == (1, 7, 9)


def test_folders_without_a_tokenizer_or_an_end_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ManifestError, match="end-of-sequence"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ManifestError, match="is not JSON"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ManifestError, match="no chat template"):
        _tiny().chat([{"role": "user", "content": "hello"}])
