"""The process that is a vLLM server: ``python -m asyncflow.rollout.engines.vllm.program SETTINGS``, settings in JSON.

It compares what is asked for with what the installed vLLM can do, by its own parser and platform and not by its version
number, and then becomes vLLM's HTTP server. What vLLM cannot do is written to the file ``refusal`` for the parent.

Invariant: every process of the server ends with its parent, also after SIGKILL: the processes that vLLM spawns import
this module before anything else, as ``__mp_main__``, and call ``die_with_parent`` there.
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

from asyncflow.process import PARENT, die_with_parent

EXTENSION = "asyncflow.rollout.engines.vllm.worker.WorkerExtension"
REFUSED = 2
"""Exit status of a server that cannot be what it was asked to be."""
_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_SERVERS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
_PARSER_CLASSES = ("vllm.utils.argparse_utils", "vllm.utils")
"""Modules in which different versions of vLLM have these, newest first."""
_BATCH_INVARIANT = "cuda"
"""Kind of device for which vLLM has batch-invariant kernels: another is refused before vLLM is imported."""
_VARIANT = "the installed vLLM has no batch-invariant kernels for {}: deterministic cannot be kept"


class VllmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the engine ``vllm``.

    args: options of ``vllm serve``, by name with underscores, as the installed version knows them; start_s: seconds
    that the server may take to answer; stall_s: seconds without a new token, while requests run, after which it counts
    as stuck.
    """

    args: dict[str, Any] = {}
    start_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    stall_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0

    def __post_init__(self) -> None:
        """Raise ValueError for an option of vLLM that the manifest says elsewhere."""
        for name in self.args:
            if instead := _SAID_ELSEWHERE.get(name.replace("-", "_")):
                raise ValueError(f"args.{name}: {instead}")


_OURS = "it is set by the engine"
_ONE = "the devices of one engine are used by tensor parallelism"
_SAID_ELSEWHERE: Mapping[str, str] = {
    "model": "spec.model.source says it",
    "tokenizer": "spec.model.source says it",
    "dtype": "spec.rollout.engine.dtype says it",
    "max_model_len": "spec.sampling.maxPromptTokens and maxTokens say it",
    "max_num_seqs": "spec.rollout.engine.slots says it",
    "tensor_parallel_size": "spec.rollout.accelerator.count says it",
    "pipeline_parallel_size": _ONE,
    "data_parallel_size": _ONE,
    "config": "give the options themselves",
    **dict.fromkeys(
        ("uds", "host", "port", "api_key", "ssl_keyfile", "ssl_certfile", "load_format", "logprobs_mode",
         "worker_extension_cls", "generation_config", "served_model_name", "skip_tokenizer_init",
         "disable_log_stats", "disable_fastapi_docs"),
        _OURS,
    ),
}  # fmt: skip
"""Options of vLLM that ``args`` may not have, and where each belongs instead."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a server.

    required: options of vLLM, by name with underscores; optional: those that are left out where vLLM does not know
    them; given: those of the manifest; device: torch's name of the kind of device; deterministic: batch-invariant
    kernels; refusal: file for the reason why not.
    """

    required: dict[str, Any]
    optional: dict[str, Any]
    given: dict[str, Any]
    device: str
    deterministic: bool
    refusal: str


def main(settings: ServerSettings) -> None:
    """Serve until a signal comes. Exits with ``REFUSED`` where the settings have no meaning for this vLLM."""

    def refuse(why: str) -> NoReturn:
        Path(settings.refusal).write_text(why, encoding="utf-8")
        sys.exit(REFUSED)

    if settings.deterministic and settings.device != _BATCH_INVARIANT:
        refuse(_VARIANT.format(settings.device))
    try:
        parser = _first(_PARSERS).make_arg_parser(_first(_PARSER_CLASSES).FlexibleArgumentParser(allow_abbrev=False))
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
        _first(_PARSERS).validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as wrong:
        refuse(str(wrong))
    import uvloop

    uvloop.run(_first(_SERVERS).run_server(arguments))


def _first(names: tuple[str, ...]) -> ModuleType:
    """Import the first of these modules that this vLLM has. Raises ImportError."""
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
    """Return options as words of a command line: flags for true and false, JSON for mappings."""
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
