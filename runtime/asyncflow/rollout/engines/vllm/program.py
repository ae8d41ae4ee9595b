"""Entry point of a vLLM server process: ``python -m asyncflow.rollout.engines.vllm.program SETTINGS`` (JSON).

It compares the settings with the features of the installed vLLM, through vLLM's own parser and platform and not through
its version number, and then runs vLLM's HTTP server. If vLLM cannot fulfil the settings, the reason is written to the
file ``refusal`` for the parent.

Invariant: every process of the server ends with its parent, even after SIGKILL. The processes that vLLM spawns import
this module first, as ``__mp_main__``, and call ``die_with_parent`` there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import msgspec

from asyncflow.plugins import importing
from asyncflow.process import PARENT, die_with_parent

EXTENSION = "asyncflow.rollout.engines.vllm.worker.WorkerExtension"
REFUSED = 2
"""Exit status of a server whose settings the installed vLLM cannot fulfil."""
MIN_TEMPERATURE = 0.01
"""Lowest temperature except 0: vLLM replaces a lower one by this and only logs it."""
_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_SERVERS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
_PARSER_CLASSES = ("vllm.utils.argparse_utils", "vllm.utils")
"""Modules that contain these functions in different versions of vLLM, newest first."""
_BATCH_INVARIANT = "cuda"
"""Device kind for which vLLM has batch-invariant kernels. Another kind is refused before vLLM is imported."""
_VARIANT = "the installed vLLM has no batch-invariant kernels for {}, which deterministic requires"


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the engine ``vllm``.

    args: options of ``vllm serve``, by name with underscores, as the installed version knows them; start_s: seconds
    within which the server must answer; stall_s: seconds without a new token, while requests run, after which it is
    considered stuck.
    """

    args: dict[str, Any] = {}
    start_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    stall_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0

    def __post_init__(self) -> None:
        """Raise ValueError for a vLLM option that another field of the manifest or the engine sets."""
        for name in self.args:
            if reason := _SET_ELSEWHERE.get(name.replace("-", "_")):
                raise ValueError(f"args.{name}: {reason}")


_BY_ENGINE = "it is set by the engine"
_ONE = "the devices of one engine are used by tensor parallelism"
_SET_ELSEWHERE: Mapping[str, str] = {
    "model": "set spec.model.source instead",
    "tokenizer": "set spec.model.source instead",
    "dtype": "set spec.rollout.engine.dtype instead",
    "max_model_len": "set spec.sampling.maxPromptTokens and maxTokens instead",
    "max_num_seqs": "set spec.rollout.engine.slots instead",
    "tensor_parallel_size": "set spec.rollout.accelerator.count instead",
    "pipeline_parallel_size": _ONE,
    "data_parallel_size": _ONE,
    "config": "set the options themselves",
    **dict.fromkeys(
        ("uds", "host", "port", "api_key", "ssl_keyfile", "ssl_certfile", "load_format", "logprobs_mode",
         "worker_extension_cls", "generation_config", "served_model_name", "skip_tokenizer_init",
         "disable_log_stats", "disable_fastapi_docs"),
        _BY_ENGINE,
    ),
}  # fmt: skip
"""Options of vLLM that ``args`` must not contain, and the reason or the field to use instead."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a server.

    required: options of vLLM, by name with underscores; optional: options that are left out if vLLM does not know them;
    given: options of the manifest; device: torch's name of the kind of device; deterministic: whether batch-invariant
    kernels are required; refusal: file for the reason of a refusal.
    """

    required: dict[str, Any]
    optional: dict[str, Any]
    given: dict[str, Any]
    device: str
    deterministic: bool
    refusal: str


def main(settings: ServerSettings) -> None:
    """Serve until a signal arrives. Exits with ``REFUSED`` if this vLLM cannot fulfil the settings."""

    def refuse(why: str) -> NoReturn:
        Path(settings.refusal).write_text(why, encoding="utf-8")
        sys.exit(REFUSED)

    if settings.deterministic and settings.device != _BATCH_INVARIANT:
        refuse(_VARIANT.format(settings.device))
    try:
        with importing():
            parsers, classes = _import_first(_PARSERS), _import_first(_PARSER_CLASSES)
        parser = parsers.make_arg_parser(classes.FlexibleArgumentParser(allow_abbrev=False))
    except ImportError as error:
        refuse(f"vLLM cannot be imported: {error}")
    _check_platform(settings, refuse=refuse)
    parser.error = refuse

    def known(name: str, value: object) -> bool:
        return not parser.parse_known_args(_argv({name: value}))[1]

    optional = {name: value for name, value in settings.optional.items() if known(name, value)}
    if unknown := sorted(name for name, value in settings.given.items() if not known(name, value)):
        refuse(f"the installed vLLM has no option {', '.join(unknown)}")
    try:
        arguments = parser.parse_args(_argv({**settings.required, **optional, **settings.given}))
        parsers.validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        refuse(str(error))
    import uvloop

    uvloop.run(_import_first(_SERVERS).run_server(arguments))


def _import_first(names: tuple[str, ...]) -> ModuleType:
    """Import the first of these modules that the installed vLLM has. Raises ImportError."""
    for name in names[:-1]:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    return import_module(names[-1])


def _check_platform(settings: ServerSettings, *, refuse: Any) -> None:
    envs, platform = import_module("vllm.envs"), import_module("vllm.platforms").current_platform
    if platform.device_type != settings.device:
        refuse(f"the installed vLLM computes on {platform.device_type or 'no device'}, not on {settings.device}")
    if settings.deterministic and "VLLM_BATCH_INVARIANT" not in envs.environment_variables:
        refuse(_VARIANT.format(settings.device))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _argv(options: dict[str, Any]) -> list[str]:
    """Return options as command-line words: flags for true and false, JSON for mappings."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(_flag(name) if value else _flag(f"no_{name}"))
        elif isinstance(value, list):
            words += [_flag(name), *map(str, value)]
        else:
            words.append(f"{_flag(name)}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


if __name__ in ("__main__", "__mp_main__"):
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())

if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=ServerSettings))
