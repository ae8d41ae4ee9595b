"""Importing and exporting ordinary folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM

from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.models.folder import export_folder, find_gguf, named_weights
from asyncflow.models.source import materialize_config


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("as_numpy", [False, True])
def test_an_exported_folder_is_loaded_by_transformers(tmp_path: Path, tied: bool, as_numpy: bool) -> None:
    source = tmp_path / "source"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(materialize_config("tiny://reverse-digits", tmp_path))
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    tokenizer.save_pretrained(source)
    trained = LlamaForCausalLM(config).state_dict()
    tensors = {name: tensor.numpy() if as_numpy else tensor for name, tensor in trained.items()}
    for _ in range(2):
        export_folder(tensors, source, tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.state_dict().keys() == trained.keys()
    assert all(tensor.equal(trained[name]) for name, tensor in model.state_dict().items())
    stored = load_file(tmp_path / "export" / "model.safetensors")
    assert stored.keys() == load_file(source / "model.safetensors").keys()
    assert ("lm_head.weight" in stored) == (not tied)
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert again("12=")["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert {path.name for path in tmp_path.iterdir()} == {"source", "export", "model"}


def test_bfloat16_is_exported_as_such_and_named_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    ones = torch.ones(2, dtype=torch.bfloat16)
    for given in (ones, ones.view(torch.uint16).numpy()):
        export_folder({"a": given}, tmp_path, tmp_path / "export")
        stored = load_file(tmp_path / "export" / "model.safetensors")["a"]
        assert stored.dtype == torch.bfloat16
        assert stored.equal(ones)
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == {"dtype": "bfloat16"}


def test_tensors_that_transformers_does_not_load_or_names_otherwise_do_not_matter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "source")
    stored = load_file(tmp_path / "source" / "model.safetensors")
    # Like gpt2 on the hub: without a prefix, with masks that are computed today; and with a copy in another format.
    older = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    save_file({**older, "h.0.attn.bias": torch.ones(4, 4)}, tmp_path / "source" / "model.safetensors")
    save_file({"layers.0.wq.weight": torch.ones(2)}, tmp_path / "source" / "consolidated.safetensors")
    trained = dict(named_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "source")))
    export_folder(trained, tmp_path / "source", tmp_path / "export")
    written = load_file(tmp_path / "export" / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all(tensor.equal(stored[name]) for name, tensor in written.items())
    del trained["transformer.wpe.weight"]
    with pytest.raises(CheckpointError, match=r"transformer\.wpe\.weight is missing"):
        export_folder(trained, tmp_path / "source", tmp_path / "export")


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    for tensors in ({"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(4)}):
        with pytest.raises(CheckpointError, match="b is"):
            export_folder(tensors, tmp_path, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_gguf_file_is_found_by_path_or_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carries_gguf"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ManifestError, match="holds 0"):
        find_gguf("carries-gguf")
    file = package / "model.gguf"
    file.touch()
    assert find_gguf("carries-gguf") == file == find_gguf(str(file))
    with pytest.raises(ManifestError, match="neither a file nor"):
        find_gguf("no-such-package")
