"""Where models come from: understood without reading, written whole, the same bytes each time."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.api.learning import EvalDataSpec
from asyncflow.data.sources import open_source
from asyncflow.errors import ManifestError
from asyncflow.models import tiny
from asyncflow.models.folder import whole_folder
from asyncflow.models.source import ModelSource, materialize_config, materialize_weights
from asyncflow.models.tiny import linear_layers
from asyncflow.models.tokenizer import Tokenizer

TINY = "tiny://reverse-digits"


@pytest.mark.parametrize(
    ("source", "kind", "folder"),
    [
        (TINY, "tiny", "/work/model/reverse-digits-0"),
        (f"{TINY}?seed=3", "tiny", "/work/model/reverse-digits-3"),
        ("/some/where", "folder", "/some/where"),
        ("pvc://claim/a/b", "folder", "/mnt/claim/a/b"),
    ],
)
def test_sources_are_understood(source: str, kind: str, folder: str) -> None:
    model = ModelSource.resolve(source, Path("/work"))
    assert (model.kind, model.folder) == (kind, Path(folder))


@pytest.mark.parametrize(
    "source", ["tiny://nothing", f"{TINY}?sead=1", f"{TINY}?seed=x", "ftp://x", "pvc://", "hf://no/such", "/absent"]
)
def test_other_sources_are_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"model\.source"):
        materialize_config(source, tmp_path)


def test_the_linear_layers_of_the_tiny_model_are_known_without_it(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(materialize_config(TINY, tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {*linear_layers(), "lm_head"} == layers


def test_config_and_tokenizer_need_no_torch_and_are_the_same_bytes_for_all_who_write_at_once(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from asyncflow.models.source import materialize_config;"
        f"materialize_config({TINY!r}, pathlib.Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    shared = [subprocess.Popen([sys.executable, "-c", program, tmp_path / "shared"]) for _ in range(3)]
    assert [process.wait() for process in shared] == [0, 0, 0]
    alone = materialize_config(TINY, tmp_path / "alone")
    together = materialize_config(TINY, tmp_path / "shared")
    assert [p.name for p in together.parent.iterdir()] == [together.name]
    names = sorted(file.name for file in alone.iterdir())
    assert names == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert all((alone / name).read_bytes() == (together / name).read_bytes() for name in names)


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with pytest.raises(FileNotFoundError), whole_folder(target, replace=True) as made:
        (made / "half").rename(made / "absent" / "half")
    assert list(target.parent.iterdir()) == []
    for text in ("first", "second"):
        with whole_folder(target, replace=True) as made:
            (made / "file").write_text(text)
    with whole_folder(target, replace=False) as made:
        (made / "file").write_text("third")
    assert (target / "file").read_text() == "second"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("at", ["in the block", "between the renames"])
def test_what_a_killed_process_left_of_a_folder_is_removed_unless_it_is_the_only_copy(tmp_path: Path, at: str) -> None:
    target = tmp_path / "target"
    with whole_folder(target, replace=True) as living:
        if (child := os.fork()) == 0:
            with whole_folder(target, replace=True) as first:
                (first / "file").write_text("first")
            with whole_folder(target, replace=True) as second:
                (second / "file").write_text("second")
                if at == "in the block":
                    os.kill(os.getpid(), signal.SIGKILL)
                sys.addaudithook(_killing(second))
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        only_copy = not target.exists()
        assert only_copy == (at == "between the renames")
        with pytest.raises(RuntimeError), whole_folder(target, replace=True):
            raise RuntimeError
        left = sorted(file.read_text() for file in tmp_path.rglob("file"))
        assert left == (["first", "second"] if only_copy else ["first"])
        for _ in range(2):
            with whole_folder(target, replace=True):
                pass
        assert living.is_dir()
    assert list(tmp_path.iterdir()) == [target]


def _killing(folder: Path) -> Callable[[str, tuple[object, ...]], None]:
    """Return an audit hook that kills this process when ``folder`` is about to be renamed."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[0]) == str(folder):
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def test_weights_are_a_function_of_the_seed_whatever_the_caller_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "STEPS", 5)
    threads = torch.get_num_threads()
    files = []
    for name, source in (("a", TINY), ("b", TINY), ("c", f"{TINY}?seed=1")):
        torch.manual_seed(len(files))
        state = torch.random.get_rng_state()
        folder = materialize_config(source, tmp_path / name)
        materialize_weights(source, folder)
        assert torch.random.get_rng_state().equal(state)
        files.append((folder / "model.safetensors").read_bytes())
    assert torch.get_num_threads() == threads
    assert files[0] == files[1] != files[2]


def test_weights_that_are_there_are_kept(tmp_path: Path) -> None:
    folder = materialize_config(TINY, tmp_path)
    (folder / "model.safetensors").write_text("mine")
    materialize_weights(TINY, folder)
    assert (folder / "model.safetensors").read_text() == "mine"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ManifestError, match="no weights"):
        materialize_weights(str(tmp_path), tmp_path)


def test_the_warm_up_teaches_the_skill_and_the_wrong_habits(tmp_path: Path) -> None:
    folder = materialize_config(TINY, tmp_path)
    materialize_weights(TINY, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert set(load_file(folder / "model.safetensors")) == set(model.state_dict())
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    tokenizer = Tokenizer.load(folder)
    data = EvalDataSpec(source=TINY, size=256)
    source = open_source(data, workdir=tmp_path, cache=tmp_path, where="data.eval")
    prompts = [source.prompt(serial) for serial in range(256)]
    ids = torch.tensor([tokenizer.encode(prompt.question) for prompt in prompts])
    right = [[*tokenizer.encode(prompt.answer), tokenizer.eos_ids[0]] for prompt in prompts]
    whole = torch.cat([ids, torch.tensor(right)], dim=1)
    with torch.no_grad():
        logits = model(input_ids=whole[:, :-1]).logits[:, ids.shape[1] - 1 :].log_softmax(-1)
    chosen = logits.gather(2, whole[:, ids.shape[1] :, None])[..., 0]
    assert 0.08 < chosen.sum(1).exp().mean() < 0.20, "pass@1 at temperature 1"
    assert chosen[:, 1:4].exp().mean() > 0.95, "the skill"
    assert (logits[:, 0].argmax(-1) == tokenizer.encode("=")[0]).float().mean() > 0.9, "the habit"
