"""Tests of what ``validate`` and the start of a run say before anything runs: model, data, options, reward function."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from safetensors.numpy import save_file

from asyncflow import cli
from asyncflow.models.tiny import write_config

pytestmark = pytest.mark.process

JUDGES = """
def good(*, response, prompt, answer, meta):
    return 1.0

def any_keywords(**given):
    return 1.0

def narrow(answer):
    return 1.0

async def unsaid(*, responses):
    return 1.0
"""


def validated(capsys, manifest: Path, *settings: str) -> tuple[int, str]:
    """Return the exit status, and what was said."""
    words = [word for setting in settings for word in ("--set", setting)]
    status = cli.invoke(["validate", str(manifest), *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out + err


def refused(capsys, manifest: Path, *settings: str) -> str:
    status, said = validated(capsys, manifest, *settings)
    assert status == 2, said
    assert said.startswith("error: ")
    return said


def test_a_folder_whose_path_is_no_text_is_refused(capsys, manifest: Path):
    folder = manifest.parent / os.fsdecode(b"\xff")
    folder.mkdir()
    assert "the path is not UTF-8. Move the manifest" in refused(capsys, manifest.rename(folder / "job.yaml"))


@pytest.fixture
def model(manifest: Path) -> Path:
    """A model folder as transformers writes one."""
    folder = manifest.parent / "model"
    folder.mkdir()
    write_config(folder)
    save_file({"weight": np.zeros(4, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def judges(manifest: Path) -> None:
    (manifest.parent / "judges.py").write_text(JUDGES)
    (manifest.parent / "broken.py").write_text("import a_module_that_is_not_there\n")
    (manifest.parent / "torn.py").write_text("\ndef f(*, response)\n")
    (manifest.parent / "leaves.py").write_text("raise SystemExit(3)\n")


def rows(manifest: Path, name: str, *tasks: dict[str, object]) -> str:
    (manifest.parent / name).write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return f"data.train={{source: {name}, config: {{split: whole}}}}"


TORCH = ("rollout.engine.name=transformers", "trainer.backend.name=torch")


def test_a_whole_model_is_valid_and_torch_is_not_imported(manifest, model):
    program = (
        "import sys; from asyncflow import cli;"
        f"status = cli.invoke(['validate', {str(manifest)!r}, '--set', 'model.source=model',"
        " '--set', 'rollout.engine.name=transformers', '--set', 'trainer.backend={name: torch,"
        " options: {head_tokens: 64}}']);"
        "sys.exit(status or ('torch' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("absent", ["tokenizers", "torch"])
def test_packages_that_are_not_installed_are_named_with_the_way_to_get_them(manifest, absent):
    program = (
        f"import sys; sys.modules[{absent!r}] = None; from asyncflow import cli;"
        f"sys.exit(cli.invoke(['validate', {str(manifest)!r}, '--set', 'rollout.engine.name=transformers']))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert run.stderr == f"error: {manifest}: not installed: {absent}. Run pip install 'asyncflow[torch]'\n"


def test_a_model_that_the_engine_cannot_run_is_refused(manifest, model, capsys):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    assert "model type 'bert': its tokens do not only see earlier ones" in refused(
        capsys, manifest, "model.source=model", *TORCH
    )
    (model / "config.json").write_text("{")
    assert "config.json: cannot be read" in refused(capsys, manifest, "model.source=model", *TORCH)


def test_exported_adapters_in_place_of_a_model_are_refused_with_the_command_that_merges_them(manifest, capsys):
    (manifest.parent / "export").mkdir()
    (manifest.parent / "export" / "adapter_config.json").write_text("{}")
    assert f"asyncflow model merge {manifest.parent}/export DIR" in refused(capsys, manifest, "model.source=export")


def test_everything_that_is_wrong_with_a_model_is_said_at_once(manifest, model, capsys):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (model / "tokenizer.json").write_text("{}")
    settings = ("model.source=model", *TORCH, "rollout.engine={dtype: float16}", "reward.function=absent_in:judges")
    (manifest.parent / "absent_in.py").write_text("")
    said = refused(capsys, manifest, *settings)
    assert "4 problems" in said
    for words in ("model.safetensors is not a safetensors file", "tokenizer.json: cannot be read", "'float16'"):
        assert words in said
    assert "no function 'judges'" in said


def test_weights_in_several_parts_must_all_be_there(manifest, model, capsys):
    parts = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert "model-00002-of-00002.safetensors is missing" in refused(capsys, manifest, "model.source=model", *TORCH)
    for file in model.glob("model*"):
        file.unlink()
    assert "has no weights" in refused(capsys, manifest, "model.source=model", *TORCH)
    assert validated(capsys, manifest, "model.source=model")[0] == 0  # nothing is computed with them


def test_layers_for_adapters_are_looked_up_in_the_files_of_the_model(manifest, model, capsys):
    layers = {f"model.layers.0.self_attn.{name}.weight": np.zeros((4, 4), np.float32) for name in ("q_proj", "k_proj")}
    others = ("model.embed_tokens.weight", "model.layers.0.mlp.experts.0.gate_proj.weight")
    save_file(
        {
            **layers,
            **{name: np.zeros((4, 4), np.float32) for name in others},
            "model.norm.weight": np.zeros(4, np.float32),
        },
        model / "model.safetensors",
    )
    said = refused(capsys, manifest, "model.source=model", *TORCH, "trainer.lora={targets: [q_proj, query]}")
    assert "no linear layer called 'query'" in said
    assert "It has k_proj, q_proj" in said
    said = refused(capsys, manifest, "model.source=model", *TORCH, "trainer.lora={targets: [gate_proj]}")
    assert "It has k_proj, q_proj" in said
    assert validated(capsys, manifest, "model.source=model", *TORCH, "trainer.lora={targets: [q_proj]}")[0] == 0


def test_layers_for_adapters_of_the_tiny_model_are_known_before_it_is_made(manifest, capsys):
    said = refused(capsys, manifest, *TORCH, "trainer.lora={targets: [q_proj, query]}")
    assert "no linear layer called 'query'" in said
    assert "It has down_proj, gate_proj, k_proj" in said
    assert validated(capsys, manifest, *TORCH, "trainer.lora={targets: [q_proj]}")[0] == 0


def test_adapters_need_peft(manifest):
    program = (
        "import sys; sys.modules['peft'] = None; from asyncflow import cli;"
        f"sys.exit(cli.invoke(['validate', {str(manifest)!r}, '--set', 'rollout.engine.name=transformers',"
        " '--set', 'trainer.backend.name=torch', '--set', 'trainer.lora={rank: 8}']))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2
    assert "not installed: peft" in run.stderr
    assert "pip install 'asyncflow[torch,lora]'" in run.stderr


def test_sequences_longer_than_the_models_positions_are_refused(manifest, capsys):
    assert "has 512 positions" in refused(capsys, manifest, "sampling.maxTokens=500", *TORCH)


def test_every_wrong_sink_is_named_by_its_number(manifest, capsys):
    sinks = "[{kind: lines}, {kind: tensorboard, options: {a: 1}}, {kind: mlflow, options: {b: 2}}]"
    said = refused(capsys, manifest, f"telemetry.sinks={sinks}")
    assert "3 problems" in said
    assert "spec.telemetry.sinks[0]: no installed package offers 'lines'" in said
    assert "spec.telemetry.sinks[1].options: unknown option a" in said
    assert "spec.telemetry.sinks[2].options: unknown option b" in said


def test_the_options_of_both_plugins_are_checked_at_once(manifest, capsys):
    said = refused(capsys, manifest, "rollout.engine.options={quick: 1}", "trainer.backend.options={slow: 1}")
    assert "2 problems" in said
    assert "unknown option quick" in said
    assert "unknown option slow" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.engine.options={quick: 1}", "spec.rollout.engine.options: unknown option quick. Known: tokens"),
        ("rollout.engine={name: transformers, options: {quick: 1}}", "unknown option quick. Known: none"),
        ("trainer.backend.options={quick: 1}", "spec.trainer.backend.options: unknown option quick. Known: capacity"),
        ("trainer.backend={name: torch, options: {head_tokens: 0}}", "head_tokens"),
        (
            "data.train.config={chat: true}",
            "spec.data.train.config: chat is not a setting of the source. Set spec.data.train.chat",
        ),
        ("data.train.chat=true", "no chat template"),
        ("data.train.source=gym://chain_sums", "similar names: chain_sum"),
        ("reward.function=gym", "the function gym scores prompts of gym:// only"),
    ],
)
def test_what_plugins_tokenizer_and_sources_refuse_is_refused_before_the_start(manifest, capsys, setting, said):
    assert said in refused(capsys, manifest, setting)


def test_rows_are_counted(manifest, capsys):
    train = rows(manifest, "tasks.jsonl", {"prompt": "a", "answer": "b"}, {"prompt": "c"}, {"prompt": "d" * 40})
    said = refused(capsys, manifest, train, "data.overlong=refuse")
    assert "1 of 3 prompts of " in said
    assert "have more than 16 tokens, the longest has 40" in said
    assert "2 of 3 prompts" in said
    assert "have no answer, and the reward function task compares with it" in said
    settings = (train, "sampling.maxPromptTokens=64", "reward.function=judges:good")
    (manifest.parent / "judges.py").write_text(JUDGES)
    status, said = validated(capsys, manifest, *settings)
    assert status == 0
    assert "note: spec.data.train: 2 of 3 prompts" in said


def test_prompts_that_are_too_large_are_counted(manifest, capsys):
    train = rows(manifest, "tasks.jsonl", {"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d" * 300})
    said = refused(capsys, manifest, train, "data.maxTaskBytes=256", "data.overlong=refuse")
    assert "1 of 2 prompts" in said
    assert "have more than 256 bytes, with answer and meta" in said
    assert "'c'" in said


def test_prompts_that_will_be_skipped_are_counted_and_no_error_unless_all_are(manifest, capsys):
    train = rows(manifest, "tasks.jsonl", {"prompt": "a", "answer": "b"}, {"prompt": "d" * 40, "answer": "e"})
    status, said = validated(capsys, manifest, train)
    assert status == 0
    assert "note: spec.data.train: 1 of 2 prompts" in said
    assert "have more than 16 tokens, the longest has 40: they are skipped, such as 'dddd" in said
    long = rows(manifest, "long.jsonl", *({"prompt": letter * 40, "answer": "x"} for letter in "de"))
    assert "2 of 2 prompts" in refused(capsys, manifest, long)


def test_a_column_that_rows_lack_is_named_with_their_number(manifest, capsys):
    train = rows(manifest, "tasks.jsonl", {"prompt": "a"}, {"question": "b"}, {"question": "c"})
    assert "tasks.jsonl:2: the row has no field 'prompt', like 2 of 3 rows" in refused(capsys, manifest, train)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("marks:absent", "module 'marks' has no function 'absent'"),
        ("marks_torn:f", "SyntaxError: expected ':' (marks_torn.py:1)"),
        ("marks:narrow", "it cannot be called with rows and config: too many positional arguments"),
        ("marks_that_end:f", "the process of the function has ended (exit status 3)"),
    ],
)
def test_the_function_of_a_task_is_loaded_in_a_process_of_its_own(manifest, capfd, function, said):
    (manifest.parent / "marks.py").write_text("def good(rows, config): ...\ndef narrow(rows): ...\n")
    (manifest.parent / "marks_torn.py").write_text("def f(rows, config)\n")
    (manifest.parent / "marks_that_end.py").write_text("import os\nos._exit(3)\n")
    task = "tasks=[{{name: mark, function: '{}', reads: [response_ids], writes: [{{name: mark, most: 1}}]}}]"
    told = refused(capfd, manifest, task.format(function))
    assert "spec.tasks[0].function: " in told
    assert said in told
    assert "Traceback" not in told
    assert validated(capfd, manifest, task.format("marks:good"))[0] == 0
    assert "marks" not in sys.modules


def test_a_temperature_that_vllm_would_replace_is_refused(manifest, capsys):
    engine = "rollout={engine: {name: vllm}}"
    held_out = ("data.eval={source: 'tiny://reverse-digits', size: 4}", "evaluation={every: 1, temperature: 0.001}")
    said = refused(capsys, manifest, engine, "sampling.temperature=0.005", *held_out)
    assert "spec.sampling.temperature: vLLM would sample at 0.01 instead of 0.005. Set at least that" in said
    assert "spec.evaluation.temperature: vLLM would sample at 0.01 instead of 0.001" in said


def test_an_empty_file_is_called_empty(manifest, capsys):
    said = refused(capsys, manifest, rows(manifest, "tasks.jsonl"))
    assert "tasks.jsonl: there are no rows" in said
    assert "hash" not in said


def test_prompts_for_no_evaluation_are_noted(manifest, capsys):
    status, said = validated(capsys, manifest, "data.eval={source: 'tiny://reverse-digits', size: 4}")
    assert status == 0
    assert "note: data.eval is not used: there is no `evaluation`" in said


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("judges:absent", "has no function 'absent'"),
        ("judges:narrow", "cannot be loaded: spec.reward.function: 'judges:narrow' has no parameter response"),
        ("judges:unsaid", "must have exactly one of the parameters prompt"),
        ("broken:f", "No module named 'a_module_that_is_not_there' (broken.py:1)"),
        ("torn:f", "SyntaxError: expected ':' (torn.py:2)"),
        ("leaves:f", "the reward process ended (exit status 3)"),
    ],
)
def test_a_reward_function_is_loaded_in_a_process_of_its_own(manifest, judges, capsys, function, said):
    told = refused(capsys, manifest, f"reward.function={function}")
    assert f"spec.reward.function: {function!r} cannot be loaded" in told
    assert said in told
    assert "judges" not in sys.modules


@pytest.mark.parametrize("function", ["judges:good", "judges:any_keywords"])
def test_a_reward_function_that_can_be_called_is_valid(manifest, judges, capsys, function):
    assert validated(capsys, manifest, f"reward.function={function}")[0] == 0


def test_what_this_machine_lacks_is_no_fault_of_a_manifest_but_starts_no_run(manifest, tmp_path, capsys, monkeypatch):
    for package in ("mooncake.engine", "torch"):
        monkeypatch.setitem(sys.modules, package, None)
    elsewhere = {
        "model.source=pvc://models/absent": "spec.model.source: ",
        "model.source=hf://nobody/nothing": "spec.model.source: ",
        "weightSync.transport=mooncake": "spec.weightSync.transport: Mooncake cannot be loaded",
        "weightSync.transport=pairs": "spec.weightSync.transport: torch cannot be imported",
    }
    for setting, told in elsewhere.items():
        status, said = validated(capsys, manifest, setting)
        assert status == 0
        assert f"note: this machine could not run it: {told}" in said
        assert cli.invoke(["run", str(manifest), "--output", str(tmp_path / "out"), "--set", setting]) == 2
        assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_a_model_needs_beyond_packs_is_told(manifest, model, capsys, monkeypatch):
    config = json.loads((model / "config.json").read_text())
    hybrid = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
    images = {"model_type": "qwen3_5", "text_config": {**config, **hybrid}, "vision_config": {}}
    (model / "config.json").write_text(json.dumps({**config, **images}))
    settings = ("model.source=model", "rollout.engine.name=vllm", "trainer.backend.name=torch")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    status, said = validated(capsys, manifest, *settings)
    assert status == 0, said
    assert "samples are trained in padded rows, not in packs: its layers carry a state from token to token" in said
    assert "note: this machine could not run it: spec.rollout.engine: not installed: torchvision" in said
    alone = (*settings, "rollout.engine.name=transformers")
    assert "model type 'qwen3_5_text': its layers carry a state" in refused(capsys, manifest, *alone)


def test_a_run_without_rollouts_waits_until_somebody_adds_some(manifest, capsys):
    status, said = validated(capsys, manifest, "rollout.replicas=0")
    assert status == 0
    waits = "nothing is generated until rollouts are added: spec.rollout.replicas is 0"
    assert f"note: {waits} (asyncflow scale, kubectl scale)" in said


def test_every_set_of_held_out_prompts_is_looked_at(manifest, capsys):
    def table(name: str, *asked: str) -> None:
        Dataset.from_dict({"ask": list(asked), "truth": ["1"] * len(asked)}).to_parquet(manifest.parent / name)

    table("train.parquet", "a", "b")
    table("apart.parquet", "c", "x" * 40)
    table("shared.parquet", "d", "b")
    config = "config: {prompt: ask, answer: truth}"
    train = f"data.train={{source: 'parquet://train.parquet', {config}}}"
    evaluation = "evaluation={every: 1}"

    def sets(*names: str) -> str:
        each = (f"{{name: {name}, source: 'parquet://{name}.parquet', size: 2, {config}}}" for name in names)
        return f"data.evalSets=[{', '.join(each)}]"

    status, said = validated(capsys, manifest, train, sets("apart"), evaluation)
    assert status == 0
    assert "spec.data.evalSets[apart]: 1 of 2 prompts of parquet://" in said
    said = refused(capsys, manifest, train, sets("apart", "shared"), evaluation)
    assert "data.evalSets[shared]: 1 held-out prompts are also trained on, such as 'b'" in said
    assert "there is no file" in refused(capsys, manifest, train, sets("absent"), evaluation)
    assert not list(manifest.parent.rglob("*.arrow")), "nothing is left"
