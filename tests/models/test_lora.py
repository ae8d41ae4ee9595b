"""Adapters as tensors: which layers they belong to, what they make of weights, and the folder that peft reads."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig

from asyncflow.api.workers import LoraSpec
from asyncflow.errors import ManifestError
from asyncflow.models.lora import MergedWeights, adapters_of, chosen_layers, export_adapters, merge_folder, weight_of

LORA = LoraSpec(rank=3, alpha=6, targets=("q_proj", "layers.1.mlp.up_proj"))
ADAPTED = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj")


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    torch.manual_seed(0)
    kind = GemmaConfig if request.param else LlamaConfig
    config = kind(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    written = json.loads(file.read_text())
    assert written.pop("tie_word_embeddings") == request.param
    file.write_text(json.dumps(written))  # files on the hub name only what differs from the default of their class
    return tmp_path / "base"


def adapters_for(folder: Path) -> dict[str, np.ndarray]:
    random, weights, made = np.random.default_rng(1), load_file(folder / "model.safetensors"), {}
    for module in ADAPTED:
        out, in_ = weights[f"{module}.weight"].shape
        for name, shape in zip(adapters_of(f"{module}.weight"), ((LORA.rank, in_), (out, LORA.rank)), strict=True):
            made[name] = random.normal(size=shape).astype(np.float32)
            made[name].flags.writeable = False
    return made


def test_layers_are_chosen_by_the_end_of_their_name() -> None:
    layers = ["h.0.q", "h.0.xq", "h.1.q", "h.1.up"]
    assert chosen_layers(LoraSpec(targets=("q",)), layers) == ["h.0.q", "h.1.q"]
    assert chosen_layers(LoraSpec(targets=("1.q", "up")), layers) == ["h.1.q", "h.1.up"]
    assert chosen_layers(LoraSpec(), layers) == layers
    with pytest.raises(ManifestError, match=r"no linear layer called 'k'.*It has q, up, xq"):
        chosen_layers(LoraSpec(targets=("q", "k")), layers)


def test_names_lead_from_a_weight_to_its_adapters_and_back() -> None:
    for name in adapters_of("model.layers.0.q_proj.weight"):
        assert weight_of(name) == "model.layers.0.q_proj.weight"
    assert adapters_of("a.b.weight")[0] == "base_model.model.a.b.lora_A.weight"


def test_merged_weights_are_those_of_peft(folder: Path, tmp_path: Path) -> None:
    adapters = adapters_for(folder)
    export_adapters(adapters, LORA, base=str(folder), target=tmp_path / "export")
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "export")
    expected = dict(peft.merge_and_unload().named_parameters())
    merged = MergedWeights(folder, scale=LORA.scale, dtype="float32")
    weights = merged(adapters)
    assert weights.keys() == expected.keys()
    before = load_file(folder / "model.safetensors")
    for name, array in weights.items():
        np.testing.assert_allclose(array, expected[name].detach().numpy(), atol=1e-6)
        changed = name.removesuffix(".weight") in ADAPTED
        assert np.array_equal(array, before[name].numpy()) != changed, name
    again = merged({name: -array for name, array in adapters.items()})
    assert all((again[name] is weights[name]) == (name.removesuffix(".weight") not in ADAPTED) for name in weights)


def test_the_command_writes_the_merged_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = adapters_for(folder)
    export_adapters(adapters, LORA, base=str(folder), target=tmp_path / "export")
    merge_folder(tmp_path / "export", tmp_path / "whole")
    expected = MergedWeights(folder, scale=LORA.scale, dtype="float32")(adapters)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], atol=1e-6)
    with pytest.raises(ManifestError, match="exists"):
        merge_folder(tmp_path / "export", tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "peft", None)  # a wrong folder is refused before the slow import
        with pytest.raises(ManifestError, match=r"no adapter_config\.json"):
            merge_folder(folder, tmp_path / "other")
    (folder / "config.json").unlink()
    with pytest.raises(ManifestError, match=r"base has no config\.json"):
        merge_folder(tmp_path / "export", tmp_path / "other")
    file = tmp_path / "export" / "adapter_config.json"
    file.write_text(file.read_text().replace(str(folder), "nobody/nothing"))
    with pytest.raises(ManifestError, match="nobody/nothing"):
        merge_folder(tmp_path / "export", tmp_path / "other")
    file.write_text("{")
    with pytest.raises(ManifestError):
        merge_folder(tmp_path / "export", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_adapters_name_a_revision_of_a_model_so_that_peft_finds_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "models--some--model"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "v2").write_text("a" * 40)
    shutil.copytree(folder, cache / "snapshots" / ("a" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    adapters = adapters_for(folder)
    export_adapters(adapters, LORA, base="some/model@v2", target=tmp_path / "export")
    opened = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "export")
    config = opened.peft_config["default"]
    assert (config.base_model_name_or_path, config.revision) == ("some/model", "v2")
    assert merge_folder(tmp_path / "export", tmp_path / "whole") == cache / "snapshots" / ("a" * 40)
    export_adapters(adapters, LORA, base=str(tmp_path / "a@b"), target=tmp_path / "export")
    assert PeftConfig.from_pretrained(tmp_path / "export").base_model_name_or_path == str(tmp_path / "a@b")


def test_a_merged_weight_is_rounded_once(folder: Path) -> None:
    exact = MergedWeights(folder, scale=LORA.scale, dtype="float32")(adapters_for(folder))
    bits = MergedWeights(folder, scale=LORA.scale, dtype="bfloat16")(adapters_for(folder))
    for name, array in exact.items():
        assert bits[name].dtype == np.uint16
        assert np.array_equal(bits[name], torch.tensor(array).bfloat16().view(torch.uint16).numpy())


def test_a_model_that_was_stored_in_bfloat16_takes_half_the_memory(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    merged = MergedWeights(folder, scale=LORA.scale, dtype="float32")
    assert {tensor.dtype for tensor in merged._base.values()} == {torch.bfloat16}
    assert {array.dtype for array in merged(adapters_for(folder)).values()} == {np.dtype(np.float32)}


def test_adapters_of_another_model_are_refused(folder: Path) -> None:
    merged, adapters = MergedWeights(folder, scale=1.0, dtype="float32"), adapters_for(folder)
    a, b = adapters_of(f"{ADAPTED[0]}.weight")
    for wrong in (
        {**adapters, "base_model.model.other.lora_A.weight": adapters[a]},
        {**adapters, a: adapters[a][:, 1:]},
        {**adapters, b: adapters[b][:, 1:]},
        {name: array for name, array in adapters.items() if name != b},
    ):
        with pytest.raises(ManifestError, match="do not fit the model"):
            merged(wrong)
