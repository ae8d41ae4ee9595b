"""Importing and exporting ordinary folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from asyncflow.errors import CheckpointError, ManifestError
from asyncflow.models.folder import export_folder, find_gguf
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
    AutoTokenizer.from_pretrained(materialize_config("tiny://reverse-digits", tmp_path)).save_pretrained(source)
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
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("12=")["input_ids"]
    assert {path.name for path in tmp_path.iterdir()} == {"source", "export", "model"}


def test_bfloat16_is_exported_as_such_and_named_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    ones = torch.ones(2, dtype=torch.bfloat16)
    for given in (ones, ones.view(torch.uint16).numpy()):
        export_folder({"a": given}, tmp_path, tmp_path / "export")
        stored = load_file(tmp_path / "export" / "model.safetensors")["a"]
        assert stored.dtype == torch.bfloat16
        assert stored.equal(ones)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


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
