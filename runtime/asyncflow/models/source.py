"""The model of a job: its source, and checks that it can be trained and run.

A source is ``tiny://NAME?seed=N``, a folder, ``pvc://CLAIM/PATH``, or ``hf://ORG/NAME`` (local cache). Every role needs
config and tokenizer, which are cheap and need no torch. Only the first trainer rank needs weights.

A model can be trained if a token's output depends only on the earlier tokens of its own sequence. If it does so by
softmax attention alone, sequences can also share a pack, and the engine ``transformers`` supports it (``check_packs``).
Properties that the configuration does not show are checked when the model is opened (``torch.model``), before any
training.

Invariants: ``materialize_config`` and ``materialize_weights`` may be called by several processes at the same time, and
again after a crash, with the same bytes as result. Nothing is ever downloaded. Importing this module loads no torch, so
``asyncflow validate`` can apply the same checks as the roles.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec

from asyncflow.api.names import CLAIMS_DIR
from asyncflow.data.generated import tiny_task
from asyncflow.durable import sync
from asyncflow.errors import ManifestError, NotYetError
from asyncflow.models.folder import text_config, whole_folder
from asyncflow.models.tiny import write_config

WHERE = "spec.model.source"
WEIGHTS = "model.safetensors"
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_DAMAGED = "Copy it again: it may be cut off, or the pointer of a large-file store"


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed source of a model.

    kind: kind of the source; name: the tiny model, or ORG/NAME; folder: existing or future model folder (hf: unused).
    """

    kind: Literal["tiny", "folder", "hf"]
    folder: Path
    name: str = ""
    seed: int = 0

    @classmethod
    def resolve(cls, source: str, workdir: Path) -> ModelSource:
        """Parse ``source`` without any I/O. workdir: the role's folder, for models that this project generates.

        Raises ManifestError for an unknown form.
        """
        scheme, separator, rest = source.partition("://")
        if not separator:
            return cls(kind="folder", folder=Path(source))
        if scheme == "pvc" and rest.strip("/"):
            return cls(kind="folder", folder=Path(CLAIMS_DIR) / rest)
        if scheme == "hf" and rest:
            return cls(kind="hf", name=rest, folder=workdir)
        if scheme == "tiny":
            name, seed = _tiny(rest)
            return cls(kind="tiny", name=name, seed=seed, folder=workdir / "model" / f"{name}-{seed}")
        raise ManifestError(
            f"no model {source!r}", where=WHERE, hint="Use tiny://NAME, a folder, pvc://CLAIM/PATH or hf://ORG/NAME"
        )


def materialize_config(source: str, workdir: Path) -> Path:
    """Return a folder with config.json and the tokenizer's files; a tiny model's are written under ``workdir``.

    Raises ManifestError if there is no such model.
    """
    model = ModelSource.resolve(source, workdir)
    if model.kind == "tiny":
        if not model.folder.is_dir():
            with whole_folder(model.folder, replace=False) as folder:
                write_config(folder)
        return model.folder
    folder = _cached(model.name) if model.kind == "hf" else model.folder
    if not (folder / "config.json").is_file():
        raise ManifestError(f"{folder} has no config.json", where=WHERE, hint="Use an ordinary Hugging Face folder")
    return folder


def materialize_weights(source: str, folder: Path) -> None:
    """Write the initial weights into ``folder``, which ``materialize_config`` returned.

    A tiny model without weights is trained first (about 5 seconds of one core). Raises ManifestError if any other
    folder has no weights.
    """
    if any(next(folder.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        return
    model = ModelSource.resolve(source, folder)
    if model.kind != "tiny":
        raise _no_weights(folder)
    from safetensors.torch import save_file

    from asyncflow.models.tiny import warm_up

    weights = warm_up(folder, tiny_task(model.name, where=WHERE), seed=model.seed)
    written = folder / f".{WEIGHTS}.{os.getpid()}"
    save_file(weights, written, metadata={"format": "pt"})
    sync(written)
    written.replace(folder / WEIGHTS)
    sync(folder)


def check_weights(source: str, folder: Path) -> None:
    """Raise ManifestError if the weights in ``folder``, from ``materialize_config``, are missing or cannot be read.

    Only the headers of safetensors files are read.
    """
    if ModelSource.resolve(source, folder).kind == "tiny":
        return
    stored = sorted(folder.glob("*.safetensors"))
    if not stored and not any(folder.glob(_WEIGHT_PATTERNS[1])):
        raise _no_weights(folder)
    named = set(_index(folder / f"{WEIGHTS}.index.json"))
    if absent := sorted(named - {file.name for file in stored}):
        hint = "Copy the whole folder; its index names the file"
        raise ManifestError(f"{folder / absent[0]} is missing, of {len(named)} files", where=WHERE, hint=hint)
    for file in stored:
        _check_header(file)


def stored_matrices(folder: Path) -> list[str]:
    """Return the names of the layers whose weights are matrices in the safetensors files of ``folder``.

    Names have no ``.weight`` suffix. Embeddings and output layers are left out, and so are experts, which transformers
    loads as one tensor. Only headers are read.
    """
    from safetensors import safe_open

    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np") as stored:
            for name in stored.keys():  # noqa: SIM118  a safetensors file is not a mapping
                layer, _, kind = name.rpartition(".")
                if kind == "weight" and len(stored.get_slice(name).get_shape()) == 2 and not _has_no_adapter(layer):
                    found.append(layer)
    return found


def _has_no_adapter(layer: str) -> bool:
    return layer.endswith(("lm_head", "embed_tokens", "wte", "wpe")) or ".experts." in layer


def _index(file: Path) -> list[str]:
    """Return the files that the index of a sharded model lists, [] without an index."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(f"{file} is not an index of weights: {error!r}", where=WHERE, hint=_DAMAGED) from error


def _check_header(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except (OSError, SafetensorError) as error:
        raise ManifestError(f"{file} is not a safetensors file: {error}", where=WHERE, hint=_DAMAGED) from error


def _no_weights(folder: Path) -> ManifestError:
    return ManifestError(f"{folder} has no weights", where=WHERE, hint=f"It needs {' or '.join(_WEIGHT_PATTERNS)}")


def _tiny(rest: str) -> tuple[str, int]:
    name, _, query = rest.partition("?")
    fields = dict(parse_qsl(query, keep_blank_values=True))
    seed = fields.pop("seed", "0")
    if fields or not seed.isdecimal():
        raise ManifestError(f"{query!r} is not valid", where=WHERE, hint="Use tiny://NAME or tiny://NAME?seed=N")
    tiny_task(name, where=WHERE)
    return name, int(seed)


def _cached(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ManifestError(
            f"hf://{name} is not in this machine's cache: {str(error).rstrip('.')}",
            where=WHERE,
            hint=f"Download it first: hf download {repository}",
        ) from error


ENGINE_DTYPES = ("float32", "bfloat16")
"""Dtypes in which the engine ``transformers`` computes."""

_HINT = "Use a causal model with weights in float32, bfloat16 or float16"
_PACKS_HINT = "Use a causal model with softmax attention over all earlier tokens, or over a sliding window of them"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NO_INTERFACE = _names(
    "bloom codegen cpmant falcon fuyu got_ocr2 gpt-sw3 gpt_neo gpt_neox_japanese gptj mpt openai-gpt trocr xglm"
)
"""Model types that implement attention in the model itself, so that transformers cannot replace it."""
_RECURRENT = _names(
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h "
    "olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2"
)
"""Model types with layers that carry a state from token to token."""
_NOT_CAUSAL = _names(
    "bert bert-generation big_bird bigbird_pegasus camembert data2vec-text electra ernie megatron-bert mvp prophetnet "
    "reformer rembert roberta roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
)
"""Model types whose tokens attend to later tokens, or to another sequence."""
_SINKS = _names("deepseek_v4 gpt_oss granite_swa granitemoe_swa hy_v4 mimo_v2_flash")
"""Model types whose softmax has a term that does not belong to a token."""
_KEEPS_ARGUMENTS = _names("nemotron stablelm")
"""Model types whose layers do not pass their arguments on to attention."""
_WINDOW_IN_MASK = _names("doge phimoe qwen2_moe")
"""Model types whose layers do not pass their window on to attention."""
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_MORE_THAN_SOFTMAX = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of transformers' attention functions that request more than softmax attention."""


def check_model(config: Mapping[str, Any], *, longest: int, where: str) -> None:
    """Raise NotYetError for a model that is quantized, or whose samples change each other's results in any batch.

    config: the content of config.json; longest: most tokens of a sequence; where: the folder.
    """
    config = text_config(config)
    unsupported = {
        "its tokens do not only see earlier ones": config.get("model_type") in _NOT_CAUSAL
        or config.get("is_encoder_decoder") is True
        or bool(config.get("use_bidirectional_attention")),
        "its experts have a capacity, beyond which tokens are dropped": bool(config.get("expert_capacity")),
        "its weights are quantized": bool(config.get("quantization_config")),
    }
    reasons = [reason for reason, applies in unsupported.items() if applies]
    _refuse(config, [*reasons, *_rope(config, longest)], where=where, hint=_HINT)


def check_packs(config: Mapping[str, Any], *, longest: int, where: str) -> None:
    """Raise NotYetError for a model that ``check_model`` refuses, or whose samples cannot share a pack."""
    check_model(config, longest=longest, where=where)
    _refuse(config, no_packs(config, longest=longest), where=where, hint=_PACKS_HINT)


def no_packs(config: Mapping[str, Any], *, longest: int) -> list[str]:
    """Return the reasons why samples of a model cannot share a pack, [] if they can.

    longest: most tokens of a sequence; windows and chunks of at least that length are no restriction.
    """
    config = text_config(config)
    family = config.get("model_type")
    reasons = {
        "transformers cannot replace its attention": family in _NO_INTERFACE,
        "its layers carry a state from token to token": family in _RECURRENT,
        "its layers do not pass their arguments on to attention": family in _KEEPS_ARGUMENTS,
        "its attention has sinks": family in _SINKS,
        "its attention scores are capped": config.get("attn_logit_softcapping") is not None,
        "its attention has ALiBi biases": config.get("alibi") is True,
    }
    return [*(reason for reason, applies in reasons.items() if applies), *_windows(config, longest)]


def _refuse(config: Mapping[str, Any], reasons: list[str], *, where: str, hint: str) -> None:
    if reasons:
        family = text_config(config).get("model_type")
        raise NotYetError(f"model type {family!r}: {'; '.join(reasons)}", where=where, hint=hint)


def check_dtype(dtype: str, *, where: str) -> None:
    """Raise ManifestError for a dtype that the engine ``transformers`` does not support."""
    if dtype not in ENGINE_DTYPES:
        raise ManifestError(f"dtype {dtype!r}", where=where, hint=f"Use one of {', '.join(ENGINE_DTYPES)}")


def check_attention(arguments: Mapping[str, Any], *, longest: int | None = None) -> None:
    """Raise ManifestError if a layer requests more than softmax attention over earlier tokens.

    arguments: optional arguments of transformers' attention functions; longest: most tokens of a sequence, None if the
    caller supports sliding windows.
    """
    extra = [name for name in _MORE_THAN_SOFTMAX if arguments.get(name) is not None]
    if arguments.get("dropout"):
        extra.append("dropout")
    window = arguments.get("sliding_window")
    if window is not None and longest is not None and window < longest:
        extra.append(f"sliding_window {window}")
    if extra:
        raise ManifestError(
            f"the model's attention uses {', '.join(extra)}, which is not supported",
            where="spec.model.source",
            hint=_PACKS_HINT,
        )


def check_length(max_length: int, limit: int, *, where: str) -> None:
    """Raise ManifestError if sequences may be longer than the model's number of positions."""
    if max_length > limit:
        raise ManifestError(
            f"the model has {limit} positions, and a sequence may have {max_length} tokens",
            where=where,
            hint="Lower sampling.maxPromptTokens or sampling.maxTokens",
        )


def positions(config: Mapping[str, Any]) -> int | None:
    """Return the model's number of positions, None if its configuration does not state it."""
    config = text_config(config)
    found = (config.get(name) for name in ("max_position_embeddings", "n_positions", "n_ctx"))
    return next((limit for limit in found if isinstance(limit, int)), None)


def _windows(config: Mapping[str, Any], longest: int) -> list[str]:
    kinds = set(config.get("layer_types") or ())
    reasons = [f"layers of type {kind!r}" for kind in sorted(kinds - {_FULL, _SLIDING, _CHUNKED})]
    chunk, window = config.get("attention_chunk_size"), config.get("sliding_window")
    if (_CHUNKED in kinds or (chunk is not None and not kinds)) and (chunk is None or chunk < longest):
        reasons.append(f"attention_chunk_size {chunk} is shorter than the longest sequence ({longest} tokens)")
    if _SLIDING in kinds and window is None:
        reasons.append("layers of type 'sliding_attention', but no sliding_window")
    enabled = config.get("use_sliding_window", True)
    if config.get("model_type") in _WINDOW_IN_MASK and enabled and window is not None and window < longest:
        reasons.append(f"its layers do not pass sliding_window {window} on to attention")
    return reasons


def _rope(config: Mapping[str, Any], longest: int) -> list[str]:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    reasons: list[str] = []
    for part in by_layer_type or [rope]:
        kind = part.get("rope_type", part.get("type", "default"))
        original = part.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        original = original or positions(config) or 0
        if kind == "dynamic" or (kind == "longrope" and longest > original):
            why = "a sequence's positions would depend on the lengths of other sequences"
            reasons.append(f"rope type {kind!r}: {why}")
    return reasons
