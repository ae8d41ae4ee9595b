"""The trainer's backend of a job: its settings, and the export of its weights as a Hugging Face folder.

The roles that compute with a model use this module, and ``asyncflow model export``, which opens the backend for a
checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import msgspec

from asyncflow.algorithms.base import algorithm_of
from asyncflow.algorithms.correction import Correction
from asyncflow.algorithms.loss import Aggregation, Loss
from asyncflow.algorithms.losses import Clip, KlTarget
from asyncflow.api.job import RLJobSpec
from asyncflow.api.learning import CorrectionSpec, CriticSpec, KlTargetSpec
from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.models.folder import export_folder
from asyncflow.models.lora import export_adapters
from asyncflow.models.source import ModelSource, materialize_config, materialize_weights
from asyncflow.plugins import load_plugin
from asyncflow.training.backend import TrainerBackend
from asyncflow.training.checkpoint import Checkpoints, find_checkpoint
from asyncflow.training.ranks import GroupLeft, SingleProcess, gather_bytes, jointly
from asyncflow.training.settings import BackendSettings, CriticSettings, OptimizerSettings

EXPORT, EXPORT_BEST = "export", "export-best"
"""Names of the folders of a run with its last and its best weights."""


def kind_of_backend(spec: RLJobSpec, *, device: str) -> type[TrainerBackend]:
    """Import the backend. The import blocks heartbeats for seconds, so it must precede the first one.

    On an NPU, torch_npu is loaded first: transformers imports it, too, but would hide the reason of a failed import.
    """
    if device == "npu":
        import_module("asyncflow.models.device").load_npu()
    where = "spec.trainer.backend.name"
    return load_plugin("asyncflow.trainer_backends", spec.trainer.backend.name, kind=TrainerBackend, where=where)


def backend_settings(spec: RLJobSpec, *, host: str, local_rank: int = 0) -> BackendSettings:
    """Return the settings of the job for the backend of a rank. host: address at which other ranks reach this one."""
    algorithm, backend, chosen = spec.algorithm, spec.trainer.backend, algorithm_of(spec)
    optimizer = OptimizerSettings(
        learning_rate=algorithm.learning_rate,
        steps=algorithm.steps,
        warmup_steps=algorithm.warmup_steps,
        curve=algorithm.learning_rate_curve,
        final_fraction=algorithm.final_learning_rate / algorithm.learning_rate,
        betas=(algorithm.betas[0], algorithm.betas[1]),
        epsilon=algorithm.epsilon,
        weight_decay=algorithm.weight_decay,
        max_grad_norm=algorithm.max_grad_norm,
    )
    return BackendSettings(
        optimizer=optimizer,
        critic=_critic(spec.critic or CriticSpec(), optimizer) if chosen.critic else None,
        loss=Loss(
            algorithm=chosen,
            clip=Clip(low=algorithm.clip.low, high=algorithm.clip.high, dual=algorithm.clip.dual),
            aggregation=Aggregation(name=algorithm.aggregation, horizon=spec.sampling.max_tokens),
            old=algorithm.old,
            correction=_correction(algorithm.correction),
            kl=algorithm.kl.coefficient,
            kl_name=algorithm.kl.estimator,
            penalised=algorithm.kl.place == "reward",
            target=_target(algorithm.kl.target),
            entropy=algorithm.entropy,
        ),
        lora=spec.trainer.lora,
        temperature=spec.sampling.temperature,
        compute="float32" if backend.precision == "float32" else "bfloat16",
        weights="bfloat16" if backend.precision == "bf16-stochastic" else "float32",
        layout=backend.packing,
        pack_tokens=backend.tokens_per_micro_batch,
        longest=spec.longest,
        threads=spec.trainer.threads,
        group_size=algorithm.group_size,
        seed=algorithm.seed,
        device=PROFILES[spec.trainer.accelerator.profile].device,
        share=spec.trainer.accelerator.share,
        local_rank=local_rank,
        host=host,
        deterministic=spec.schedule.deterministic,
        reference_given=spec.reference is not None,
        options=backend.options,
    )


def _critic(spec: CriticSpec, policy: OptimizerSettings) -> CriticSettings:
    optimizer = replace(policy, learning_rate=spec.learning_rate)
    return CriticSettings(optimizer=optimizer, warmup_steps=spec.warmup_steps)


def _target(spec: KlTargetSpec | None) -> KlTarget | None:
    return None if spec is None else KlTarget(value=spec.value, horizon=spec.horizon)


def _correction(spec: CorrectionSpec | None) -> Correction | None:
    return None if spec is None else Correction(kind=spec.kind, level=spec.level, low=spec.low, high=spec.high)


def export_checkpoint(spec: RLJobSpec, *, run: Path, step: str, target: Path) -> int:
    """Write the weights of a checkpoint in the folder ``run`` as a Hugging Face folder; return its step.

    step: ``newest``, ``best``, or a number; 0 is the initial model of the run. The export runs on the CPU, in one rank.
    Raises ManifestError if there is no such checkpoint, ``target`` exists, or the backend trains no model, and
    CheckpointError if the checkpoint is damaged.
    """
    if target.exists():
        raise ManifestError("exists already", where=str(target), hint="Pass a folder that does not exist")
    kind = kind_of_backend(spec, device="cpu")
    checkpoints = Checkpoints(run / "checkpoints")
    chosen, checkpoint = find_checkpoint(checkpoints, step)
    if checkpoint is not None:
        checkpoint.verify()
    settings = backend_settings(spec, host="127.0.0.1")
    options = {name: value for name, value in settings.options.items() if name != "compile"}
    settings = replace(settings, loss=Loss(), critic=None, device="cpu", share=1.0, options=options)
    backend = kind(settings, group=SingleProcess())
    if not backend.of_model:
        name = spec.trainer.backend.name
        raise ManifestError(f"the backend {name} trains no model", where=str(run), hint="There is nothing to export")
    model = materialize_config(spec.model.source, run)
    if checkpoint is None or backend.settings.needs_initial_weights:
        materialize_weights(spec.model.source, model)
    backend.load(model, checkpoint=checkpoint.folder if checkpoint is not None else None)
    export_weights(spec, backend, model, run=run, target=target)
    backend.close()
    return chosen


def export_best(
    spec: RLJobSpec,
    backend: TrainerBackend,
    model: Path,
    *,
    checkpoints: Checkpoints,
    best: int | None,
    last: int,
    run: Path,
    target: Path,
) -> int | None:
    """Write the weights of the best checkpoint as ``export_weights`` does, and return its step; collective.

    best: step of the best checkpoint (rank 0's value counts), None on a rank that is to end; last: step of the weights
    that the backend holds. Returns None, and writes nothing, if any rank is to end, or if the best weights are those
    of ``last``, which are exported already, or of the initial model.
    """
    group = backend.group
    try:
        known = gather_bytes(group, msgspec.json.encode(best), what="the best step")
        steps: list[int | None] = [msgspec.json.decode(one) for one in known]
        step = steps[0]
        if step is None or None in steps or step in (0, last):
            return None
        checkpoint = None
        with jointly(group, what="reading the best checkpoint"):
            if checkpoints.shared or group.rank == 0:
                checkpoint = checkpoints.at(step)
                checkpoint.verify(
                    rank=group.rank if checkpoints.shared else 0, world=group.world if checkpoints.shared else 1
                )
        backend.load_weights(model, checkpoint=checkpoint.folder if checkpoint is not None else None)
    except GroupLeft:
        return None
    export_weights(spec, backend, model, run=run, target=target)
    return step


def export_weights(spec: RLJobSpec, backend: TrainerBackend, model: Path, *, run: Path, target: Path) -> None:
    """Write the trained weights of all ranks, from rank 0: a model, or adapters and their model's name; collective.

    run: the role's folder, from which the model's source is resolved; model: the model's folder.
    """
    is_writer, local = backend.group.rank == 0, dict(backend.tensors(dtype=backend.settings.weights))
    whole = backend.full_tensors(local)
    weights = {name: array for name, array in whole if is_writer}
    if not is_writer:
        return
    if spec.trainer.lora is None:
        export_folder(weights, model, target)
        return
    source = ModelSource.resolve(spec.model.source, run)
    base = source.name if source.kind == "hf" else str(model.absolute())
    export_adapters(weights, spec.trainer.lora, base=base, target=target)
