"""Checks of a manifest on one machine, before anything starts.

``load`` reads a manifest of any kind and checks the contract's rules, the files that it names, the plug-ins that are
installed here, and the requirements of its algorithm. ``preflight`` then checks a job's model, data, options of
plug-ins, and the functions that users write.

Invariants: the checks write only a temporary folder, download nothing and do not import torch. The code of a user's
function runs only in a process of its own, which ``load`` does not start.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from importlib.util import find_spec
from io import StringIO
from operator import getitem
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.algorithms.base import ALGORITHMS, algorithm_of
from asyncflow.api.check import Problem, refusal
from asyncflow.api.document import check_overrides
from asyncflow.api.graph import graph_of
from asyncflow.api.job import RLJob, RLJobSpec
from asyncflow.api.learning import FILE_SCHEMES, TrainDataSpec
from asyncflow.api.load import KINDS, Manifest, check_files, to_yaml
from asyncflow.api.load import load as parse
from asyncflow.api.names import FOLDER
from asyncflow.data.prompter import Encoder, Prompter, survey
from asyncflow.data.sources import open_held_out, open_training
from asyncflow.driver.sample_files import check_format
from asyncflow.environments.functions import check as check_environment
from asyncflow.environments.pool import environment_process
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError
from asyncflow.flow.selection import selection_of
from asyncflow.functions import find_function
from asyncflow.local.placement import DeviceAllocator
from asyncflow.plan.job import plan
from asyncflow.plugins import NoOptions, installed, load_plugin, read_options
from asyncflow.queue.storage.backend import BACKENDS, Backend
from asyncflow.rewards.functions import check as check_reward
from asyncflow.rewards.process import RewardProcess, Scorer
from asyncflow.rollout.engines.base import OPTIONS as ENGINE_OPTIONS
from asyncflow.rollout.engines.base import RolloutEngine
from asyncflow.rollout.engines.vllm.program import MIN_TEMPERATURE, VllmOptions
from asyncflow.tasks.child import START_S, FunctionProcess
from asyncflow.telemetry.sinks.base import check_sink
from asyncflow.training.backend import OPTIONS as BACKEND_OPTIONS
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.settings import TorchOptions
from asyncflow.weights.transport import GROUP as TRANSPORTS
from asyncflow.weights.transport import find_transport

_PLUGINS = {
    "RLJob": (
        (("spec", "algorithm", "name"), ALGORITHMS),
        (("spec", "rollout", "engine", "name"), "asyncflow.rollout_engines"),
        (("spec", "trainer", "backend", "name"), "asyncflow.trainer_backends"),
        (("spec", "weightSync", "transport"), TRANSPORTS),
        (("spec", "transferQueue", "backend"), BACKENDS),
    ),
    "TransferQueue": ((("spec", "backend"), BACKENDS),),
    "WeightSync": (
        (("spec", "transport"), TRANSPORTS),
        (("spec", "follower", "engine", "name"), "asyncflow.rollout_engines"),
    ),
}
"""For each kind of manifest: paths of the fields that name a plug-in, with the entry point group of the plug-in."""


def load(source: Manifest | Path | str, overrides: Sequence[str] = ()) -> Manifest:
    """Read and check a manifest: an RLJob, a TransferQueue or a WeightSync.

    source: a file, or a manifest made in Python, whose relative paths are relative to the working directory; overrides:
    ``path=value`` strings, as for ``--set``. The paths of a job are made absolute, so that they do not depend on the
    folder in which it runs. Raises ManifestError that lists all problems that were found.
    """
    check_source(source, *KINDS.values(), where="asyncflow.load")
    check_overrides(overrides)
    if isinstance(source, (str, Path)):
        text: Path | StringIO = Path(source)
        parent = Path(source).absolute().parent
    else:
        text, parent = StringIO(to_yaml(source)), Path.cwd()
    manifest = parse(text, overrides)
    check_plugins(manifest, source=source_name(source))
    if not isinstance(manifest, RLJob):
        return manifest
    algorithm_of(manifest.spec)
    folder = manifest.folder(parent)
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        hint = "Move the manifest to another folder"
        raise ManifestError("the path is not UTF-8", where=ascii(str(folder)), hint=hint) from error
    check_files(manifest, folder, name=source_name(source))
    reward = manifest.spec.reward
    for part in reward.parts:
        check_reward(part.function, part.extractor, workdir=folder)
    if manifest.spec.environment is not None:
        check_environment(manifest.spec.environment.function, workdir=folder)
    for index, task in enumerate(manifest.spec.tasks):
        if task.function is not None:
            find_function(task.function, workdir=folder, where=f"spec.tasks[{index}].function")
    for each in graph_of(manifest.spec).tasks:
        selection_of(each.order, where=f"the order of the task {each.name}")
    return _with_absolute_paths(manifest, folder)


def check_source(source: object, *kinds: type, where: str) -> None:
    """Raise ManifestError unless ``source`` is the path of a manifest or a manifest of one of ``kinds``."""
    if not isinstance(source, (str, Path, *kinds)):
        hint = "Pass the path of a manifest, or an RLJob; asyncflow.RLJob.model_validate makes one from a mapping"
        raise ManifestError(f"an object of the type {type(source).__name__} was given", where=where, hint=hint)


def runnable_job(source: Manifest | Path | str, overrides: Sequence[str] = ()) -> RLJob:
    """Read and check a job that is to run now.

    Raises ManifestError as ``load`` does, and if the manifest is not a job, names a WeightSync of a cluster, or is
    suspended.
    """
    manifest = load(source, overrides)
    where = source_name(source)
    if not isinstance(manifest, RLJob):
        raise ManifestError(f"kind = {manifest.kind!r}: not a job", where=where, hint="Pass an RLJob")
    if (named := manifest.spec.weight_sync.name) is not None:
        what = f"the job names the WeightSync {named!r}, which is an object of a cluster"
        raise ManifestError(what, where=where, hint="Put it into the same file, after a line with ---")
    if manifest.spec.suspend:
        raise ManifestError("the job is suspended", where=where, hint="Run it with --set suspend=false")
    return manifest


def source_name(source: Manifest | Path | str) -> str:
    """Return the name of a manifest's source for error messages."""
    if isinstance(source, (str, Path)):
        return str(source)
    return f"job {source.name}" if isinstance(source, RLJob) else f"{source.kind} {source.metadata.name}"


def _with_absolute_paths(job: RLJob, base: Path) -> RLJob:
    """Return ``job`` with the paths of its model and files made absolute; they are relative to ``base``."""
    data = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = data["spec"]
    data_sets = (spec["data"][name] for name in ("train", "eval") if name in spec["data"])
    for section in (spec["model"], *data_sets, *spec["data"].get("evalSets", ())):
        section["source"] = _absolute(section["source"], base)
    data["metadata"].setdefault("annotations", {})[FOLDER] = str(base)
    return RLJob.model_validate(data)


def _absolute(source: str, base: Path) -> str:
    scheme, separator, rest = source.partition("://")
    if not separator:
        return str(base / source)
    return f"{scheme}://{base / rest}" if scheme in FILE_SCHEMES else source


def check_plugins(manifest: Manifest, *, source: str) -> None:
    """Raise ManifestError if the manifest names plug-ins that are not installed here."""
    if problems := list(_missing_plugins(manifest)):
        raise refusal(problems, source=source)


def _missing_plugins(manifest: Manifest) -> Iterator[Problem]:
    data = manifest.model_dump(mode="json", by_alias=True)
    for place, group in _PLUGINS.get(manifest.kind, ()):
        try:
            name: Any = reduce(getitem, place, data)
        except TypeError:  # an absent section
            continue
        known = installed(group)
        if name not in known:
            yield Problem(
                place=place,
                value=name,
                reason=f"no installed package offers it in {group}",
                fix=f"Install its package, or use one of: {', '.join(known)}",
            )


ROWS = 20_000
"""Most prompts of one file that are checked."""
GENERATED = 512
"""Most prompts of an infinite source that are checked."""
LOOK_S = 5.0
"""Seconds after which no further prompt is checked."""
QUOTED = 60
"""Most characters of a question that are shown."""

HEAVY: Mapping[str, type[msgspec.Struct]] = {"transformers": NoOptions, "torch": TorchOptions, "vllm": VllmOptions}
"""Options of plug-ins that are not loaded here, because importing torch takes seconds and much memory."""
_NEED_ANSWER = ("task", "math_verify")
"""Reward functions that compare a response with the prompt's answer."""


@dataclass
class _Findings:
    """Results of the checks.

    elsewhere: whether the job may run on other machines, so that something missing on this one is no error; errors:
    problems of the job; notes: notes for the user.
    """

    elsewhere: bool = False
    errors: list[AsyncFlowError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Catch and store the error of the body, so that the remaining checks run, too."""
        try:
            yield
        except AsyncFlowError as error:
            self.errors.append(error)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Treat an error of the body as something that this machine ``lacks``."""
        try:
            yield
        except ManifestError as error:
            self.lacks(error)

    def lacks(self, error: ManifestError) -> None:
        """Add a note that this machine lacks something, or raise ``error`` if the job runs here."""
        if not self.elsewhere:
            raise error
        self.notes.append(f"this machine could not run it: {error}")

    def refuse(self, source: str) -> None:
        """Raise ManifestError with all errors, if there are any."""
        if len(self.errors) == 1:
            raise ManifestError(str(self.errors[0]), where=source)
        if self.errors:
            lines = "".join(f"\n  {error}" for error in self.errors)
            raise ManifestError(f"{len(self.errors)} problems{lines}", where=source)


def preflight(job: RLJob, *, source: str, elsewhere: bool = False) -> list[str]:
    """Check everything of ``job`` that can be checked without training, and return notes as sentences.

    job: result of ``load``; source: name of the manifest in errors; elsewhere: whether the job may run on other
    machines, so that something missing on this one is a note instead of an error. The checks take seconds, since they
    start reward processes. Raises ManifestError with all problems.
    """
    spec, folder, findings = job.spec, job.folder(Path.cwd()), _Findings(elsewhere=elsewhere)
    if spec.rollout.replicas == 0:
        waits = "nothing is generated until rollouts are added: spec.rollout.replicas is 0"
        findings.notes.append(f"{waits} (asyncflow scale, kubectl scale)")
    if spec.data.held_out and spec.evaluation is None:
        unused = "data.eval is" if spec.data.eval is not None else "data.evalSets are"
        findings.notes.append(unused + " not used: there is no `evaluation`. Add e.g. evaluation: {every: 10}")
    _check_options(spec, findings)
    with findings.gather():
        queue = spec.transfer_queue
        backend = load_plugin(BACKENDS, queue.backend, kind=Backend, where="spec.transferQueue.backend")
        with findings.here():
            backend.check(servers=queue.store is None)
    with findings.gather(), findings.here():
        find_transport(spec.weight_sync.transport).check()
    for number, sink in enumerate(spec.telemetry.sinks):
        with findings.gather():
            check_sink(sink, number=number)
    with findings.gather():
        check_format(spec.storage.samples.format)
    with findings.gather(), findings.here():
        DeviceAllocator(plan(job).roles)
    with findings.gather():
        _check_packages(spec, findings)
        with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
            tokenizer = _check_model(spec, Path(scratch), findings)
            if tokenizer is not None:
                _check_data(spec, tokenizer, folder, Path(scratch), findings)
    with findings.gather():
        asyncio.run(_check_reward(spec, folder))
    with findings.gather():
        asyncio.run(_check_environment(spec, folder))
    for index, task in enumerate(spec.tasks):
        if task.function is not None:
            with findings.gather():
                asyncio.run(_check_task(task.function, folder, where=f"spec.tasks[{index}].function"))
    findings.refuse(source)
    return findings.notes


def check_options(job: RLJob, *, source: str) -> None:
    """Raise ManifestError for options that the engine or the backend does not accept.

    source: name of the manifest in errors.
    """
    findings = _Findings()
    _check_options(job.spec, findings)
    findings.refuse(source)


def _check_options(spec: RLJobSpec, findings: _Findings) -> None:
    """Check the options of the engine and of the backend."""
    engine, backend = spec.rollout.engine, spec.trainer.backend
    for group, kind, plugin, where in (
        ("asyncflow.rollout_engines", RolloutEngine, engine, ENGINE_OPTIONS),
        ("asyncflow.trainer_backends", TrainerBackend, backend, BACKEND_OPTIONS),
    ):
        with findings.gather():
            shape = HEAVY.get(plugin.name) or load_plugin(group, plugin.name, kind=kind, where=where).Options
            if shape is not None:
                read_options(plugin.options, shape, where=where)
    if engine.name == "vllm":
        of_evaluation = None if spec.evaluation is None else spec.evaluation.temperature
        for section, temperature in (("sampling", spec.sampling.temperature), ("evaluation", of_evaluation)):
            if temperature is not None and temperature < MIN_TEMPERATURE:
                what, hint = f"vLLM would sample at {MIN_TEMPERATURE} instead of {temperature}", "Set at least that"
                findings.errors.append(ManifestError(what, where=f"spec.{section}.temperature", hint=hint))


def _check_packages(spec: RLJobSpec, findings: _Findings) -> None:
    """Raise ManifestError unless the packages that load and run models are installed."""
    needed = ["tokenizers", "safetensors"]
    if spec.reference is not None or {spec.rollout.engine.name, spec.trainer.backend.name} & HEAVY.keys():
        needed += ["torch", "transformers"]
    if spec.rollout.engine.name == "vllm" and find_spec("vllm") is None:
        hint = "make vllm installs the build for the CPU; for others see docs/guide/vllm.md"
        findings.lacks(ManifestError("not installed: vllm", where="spec.rollout.engine", hint=hint))
    if absent := [name for name in needed if find_spec(name) is None]:
        raise ManifestError(f"not installed: {', '.join(absent)}", hint="Run pip install 'asyncflow[torch]'")
    if spec.trainer.lora is not None and find_spec("peft") is None:
        raise ManifestError("not installed: peft, for adapters", hint="Run pip install 'asyncflow[torch,lora]'")


def _check_model(spec: RLJobSpec, scratch: Path, findings: _Findings) -> Encoder | None:
    """Check the model, and return its tokenizer, None if it is not on this machine. Raises ManifestError."""
    from asyncflow.models.lora import chosen_layers
    from asyncflow.models.source import (
        ModelSource,
        check_dtype,
        check_length,
        check_model,
        check_packs,
        check_weights,
        materialize_config,
        no_packs,
        positions,
        stored_matrices,
    )
    from asyncflow.models.tiny import linear_layers
    from asyncflow.models.tokenizer import Tokenizer

    source = spec.model.source
    kind = ModelSource.resolve(source, scratch).kind
    try:
        folder = materialize_config(source, scratch)
    except ManifestError as error:
        if kind == "tiny":
            raise
        findings.lacks(error)
        return None
    with findings.gather():
        if spec.rollout.engine.name == "transformers":
            check_dtype(spec.rollout.engine.dtype, where="spec.rollout.engine.dtype")
    with findings.gather():
        if spec.rollout.engine.name in HEAVY or spec.trainer.backend.name in HEAVY:
            config, where = _config(folder / "config.json"), f"model.source {source}"
            check = check_packs if spec.rollout.engine.name == "transformers" else check_model
            check(config, longest=spec.longest, where=where)
            with findings.gather(), findings.here():
                _check_images(spec, config)
            if spec.trainer.backend.name == "torch" and (why := no_packs(config, longest=spec.longest)):
                findings.notes.append(f"{where}: samples are trained in padded rows, not in packs: {'; '.join(why)}")
            if (limit := positions(config)) is not None:
                check_length(spec.longest, limit, where=where)
    with findings.gather():
        if spec.trainer.backend.name == "torch":
            check_weights(source, folder)
            if spec.trainer.lora is not None:
                layers = linear_layers() if kind == "tiny" else stored_matrices(folder)
                if layers:
                    chosen_layers(spec.trainer.lora, layers)
    return Tokenizer.load(folder)


def _check_images(spec: RLJobSpec, config: Mapping[str, Any]) -> None:
    """Raise ManifestError if vLLM lacks what it needs for a model of texts and images."""
    if spec.rollout.engine.name == "vllm" and "vision_config" in config and find_spec("torchvision") is None:
        what = "not installed: torchvision, which vLLM needs for a model of texts and images"
        raise ManifestError(what, where="spec.rollout.engine", hint="Install the version for your version of torch")


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ManifestError(f"cannot be read: {error}", where=str(file), hint="Copy the folder again") from error
    if not isinstance(config, dict):
        raise ManifestError("is not a JSON object", where=str(file), hint="Use an ordinary Hugging Face folder")
    return config


def _check_data(spec: RLJobSpec, tokenizer: Encoder, folder: Path, scratch: Path, findings: _Findings) -> None:
    """Check the prompts; raise ManifestError for the first source that cannot be used."""
    train = open_training(spec.data, tokenizer, folder=folder, cache=scratch)
    size = train.source.size
    most = GENERATED if size is None else min(size, ROWS)
    if train.source.available is None:
        _survey(spec, spec.data.train, train, findings, most=most, where="spec.data.train")
    if spec.evaluation is not None:
        held_out = open_held_out(spec.data, tokenizer, train=train.source, folder=folder, cache=scratch)
        for name, data in spec.data.held_out.items():
            where = f"spec.data.evalSets[{name}]" if name else "spec.data.eval"
            _survey(spec, data, held_out[name], findings, most=min(data.size, ROWS), where=where)


def _survey(
    spec: RLJobSpec, data: TrainDataSpec, prompter: Prompter, findings: _Findings, *, most: int, where: str
) -> None:
    """Add to ``findings`` the number of prompts with a problem among the first ones of a source.

    where: the field that names the source.
    """
    tokens, size = spec.sampling.max_prompt_tokens, spec.data.max_task_bytes
    seen = survey(prompter, most=most, within_s=LOOK_S, max_tokens=tokens, max_bytes=size)
    checked = f"of {seen.prompts} prompts of {data.source}"
    skipped = spec.data.overlong == "skip"

    def overlong(found: list[str], what: str, field: str) -> None:
        if skipped and 0 < len(found) < seen.prompts:
            findings.notes.append(f"{where}: {len(found)} {checked} {what}: they are skipped, such as {_quoted(found)}")
        elif found:
            hint = f"Raise {field}, or remove these prompts, such as {_quoted(found)}"
            findings.errors.append(ManifestError(f"{len(found)} {checked} {what}", where=where, hint=hint))

    overlong(
        seen.too_long,
        f"have more than {tokens} tokens, the longest has {seen.longest}",
        "sampling.maxPromptTokens",
    )
    overlong(seen.too_large, f"have more than {size} bytes, with answer and meta", "data.maxTaskBytes")
    if found := seen.unanswered:
        problem = f"{len(found)} {checked} have no answer"
        judge = next((part.function for part in spec.reward.parts if part.function in _NEED_ANSWER), None)
        if judge is not None:
            hint = f"Name the field in config.answer, or remove these prompts, such as {_quoted(found)}"
            reason = f"{problem}, and the reward function {judge} compares with it"
            findings.errors.append(ManifestError(reason, where=where, hint=hint))
        else:
            findings.notes.append(f"{where}: {problem}: the reward function receives None for it")


def _quoted(questions: list[str]) -> str:
    first = questions[0]
    return repr(first if len(first) <= QUOTED else f"{first[:QUOTED]}...")


async def _check_scorer(scorer: Scorer, folder: Path, *, within_s: float, where: str) -> bool:
    """Load a function in a separate process; return whether it takes whole groups.

    Raises ManifestError.
    """
    try:
        process = await RewardProcess.start(scorer, timeout=within_s)
    except AsyncFlowError as error:
        refused = isinstance(error, ManifestError)
        what = error.what if refused else f"{scorer.function!r} cannot be loaded: {error.what}"
        hint = f"It is imported in a sandbox (docs/guide/rewards.md), in {folder}"
        if isinstance(error, DeadlineExceeded):
            hint = "Raise reward.startSeconds, or do less when its module is imported"
        raise ManifestError(what, where=f"{where}.function", hint=hint) from error
    await process.kill()
    return process.takes == "group"


async def _check_reward(spec: RLJobSpec, folder: Path) -> None:
    """Load each reward function in a reward process. Raises ManifestError."""
    role = spec.reward.role
    for part, scorer in zip(spec.reward.parts, Scorer.of(spec.reward, workdir=folder), strict=True):
        where = f"spec.reward.components[{part.name}]" if part.name else "spec.reward"
        by_group = await _check_scorer(scorer, folder, within_s=spec.reward.start_seconds, where=where)
        if role is not None:
            role.check(by_group=by_group)


async def _check_environment(spec: RLJobSpec, folder: Path) -> None:
    """Load the environment, if there is one, in a process. Raises ManifestError, DeadlineExceeded."""
    if spec.environment is not None:
        scorer = environment_process(spec.environment, spec.reward, workdir=folder)
        await _check_scorer(scorer, folder, within_s=spec.reward.start_seconds, where="spec.environment")


async def _check_task(function: str, folder: Path, *, where: str) -> None:
    """Load the function of a task in a process. Raises ManifestError."""
    process = await FunctionProcess.start(outputs=(), silent=True)
    try:
        await process.load(function, workdir=folder, timeout=START_S)
    except AsyncFlowError as error:
        raise ManifestError(error.what, where=where, hint=error.hint) from error
    finally:
        await process.end()
