"""Replay of steps of a finished run: its own trainer repeats them with samples that are generated again.

    checkpoint of j ──> Trainer (its real loops) <── slots as recorded, samples under the recorded versions
                          │
                          └─> θ_{j+1} ... θ_k, compared with the recorded digests; a checkpoint of k, with the run's

The trainer is the same class as in the run, with a queue that returns the recorded slots and a publisher that keeps
versions for the engine. A replay therefore supports everything that a run supports.

Invariants: the folder of the run is not changed. The samples of a step are generated while the trainer is idle, with as
many threads as a rollout has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.job import RLJobSpec
from asyncflow.api.placement import PROFILES
from asyncflow.data.sources import CACHE, open_training
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import CheckpointError
from asyncflow.identity import SampleKey, Version
from asyncflow.models.source import materialize_config, materialize_weights
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta, Slot, StepTotals
from asyncflow.replay.history import RecordedStep, ReplayPlan, RunHistory
from asyncflow.replay.samples import ReplayedSample, SampleMaker, Weights, columns_of
from asyncflow.roles.backend import backend_settings, kind_of_backend
from asyncflow.roles.rollout import engine_of, merge_of, settings_of
from asyncflow.roles.trainer import trainer_settings
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.membership import Directives
from asyncflow.training.checkpoint import Checkpoint, Checkpoints
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.report import TrainReport
from asyncflow.training.slice_files import SliceFiles
from asyncflow.training.trainer import Trainer
from asyncflow.weights.manifest import ManifestPart, entries_digest
from asyncflow.weights.probe import split_probe
from asyncflow.weights.sender import Copied, Tensors, copy_aside, entries_of
from asyncflow.weights.slices import Box

_NAME = "replay"
_KEPT = 1 << 20
"""Number of checkpoints to keep, so large that none is removed."""


@dataclass(frozen=True, kw_only=True)
class ReplayedStep:
    """A replayed step.

    slots: its samples in the order of accumulation; same: whether θ_step equals the published weights bit for bit, None
    if it was not published, or its digest is not recorded.
    """

    slots: Sequence[Sequence[ReplayedSample]]
    report: TrainReport
    same: bool | None

    @property
    def samples(self) -> list[ReplayedSample]:
        """All samples."""
        return [sample for slot in self.slots for sample in slot]


@dataclass(kw_only=True)
class _Versions:
    """Publisher that keeps versions for samples of later steps. needed: returns the versions needed after a step."""

    needed: Callable[[int], set[int]]
    copies: dict[int, Copied] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    announced: asyncio.Condition = field(default_factory=asyncio.Condition)

    def copy(self, version: Version, tensors: Tensors) -> Copied:
        copied, needed = copy_aside(version, tensors), self.needed(version.step)
        self.copies = {step: kept for step, kept in self.copies.items() if step in needed} | {version.step: copied}
        return copied

    def part(self, copied: Copied) -> ManifestPart:
        tensors = entries_of(copied, worker=_NAME)
        return ManifestPart(version=copied.version.packed, part=0, parts=1, worker=_NAME, address="", tensors=tensors)

    async def announce(self, copied: Copied, part: ManifestPart, *, timeout: float) -> bool:  # noqa: ARG002
        async with self.announced:
            self.digests[copied.version.step] = entries_digest(part.tensors)
            self.announced.notify_all()
        return True

    def held(self, version: Version) -> Weights | None:
        found = self.copies.get(version.step)
        return None if found is None else found.arena.arrays

    async def weights(self, step: int) -> Weights:
        """Return θ_step without its probe, once it is announced."""
        async with self.announced:
            await self.announced.wait_for(lambda: step in self.digests)
        return split_probe(self.copies[step].arena.arrays)[0]


@dataclass(kw_only=True)
class _Queue:
    """Queue that returns the recorded slots. make: generates samples; decided: see ``TrainerSettings``."""

    history: RunHistory
    make: Callable[[RecordedStep], Awaitable[dict[SampleKey, ReplayedSample]]]
    decided: str
    generated: dict[int, dict[SampleKey, ReplayedSample]] = field(default_factory=dict)

    async def begin(self, **_: object) -> None:
        pass

    async def slot(self, *, step: int, slot: int, **_: object) -> Slot:
        recorded = self.history.step(step)
        if step not in self.generated:
            self.generated[step] = await self.make(recorded)
        samples, last = recorded.samples, slot == len(recorded.slots) - 1
        totals = StepTotals(
            groups=len({sample.serial for sample in samples}),
            samples=len(samples),
            response_tokens=sum(sample.tokens for sample in samples),
        )
        rows = [_row(sample.key, step) for sample in recorded.slots[slot]]
        return Slot(step=step, slot=slot, rows=rows, last=last, totals=totals if last else None)

    async def fetch(self, rows: Sequence[LeasedRow], columns: Sequence[str], **_: object) -> dict[str, Jagged]:
        found = columns_of([self.generated[row.meta.step][row.meta.key] for row in rows], decided=self.decided)
        return {name: found[name] for name in columns}

    async def step_done(self, **_: object) -> None:
        pass

    async def sync(self, **_: object) -> None:
        pass

    async def commit(self, **_: object) -> None:
        pass


async def replay_steps(
    spec: RLJobSpec,
    *,
    run: Path,
    folder: Path,
    history: RunHistory,
    plan: ReplayPlan,
    target: Path,
    done: Callable[[int, int], None],
) -> list[ReplayedStep]:
    """Replay the steps of ``plan``, and write a checkpoint of the last one into ``target``/checkpoints.

    run: the run's folder; folder: the job's, base of relative paths; done: called after each step with its number and
    its number of samples. Raises ManifestError if model, data or engine have changed since the run, CheckpointError for
    a damaged checkpoint.
    """
    checkpoints, link = Checkpoints(target / "checkpoints", keep=_KEPT), None
    if plan.base:
        checkpoints.folder.mkdir(parents=True)
        base = Checkpoints(run / "checkpoints").at(plan.base).folder
        link = checkpoints.folder / base.name
        link.symlink_to(base.absolute())
    model = materialize_config(spec.model.source, run)
    tokenizer = Tokenizer.load(model)
    merge = merge_of(spec, model)
    engine = engine_of(spec, model, tokenizer)
    await engine.start()
    try:
        versions = _Versions(needed=partial(plan.after, history=history))

        async def weights(step: int) -> Weights:
            published = await versions.weights(step)
            return published if merge is None else merge(published)

        maker = SampleMaker(
            engine,
            prompts=open_training(spec.data, tokenizer, folder=folder, cache=target / CACHE),
            settings=settings_of(spec, tokenizer),
            weights=weights,
        )

        async def make(step: RecordedStep) -> dict[SampleKey, ReplayedSample]:
            with _threads(spec.rollout.threads, then=spec.trainer.threads):
                return await maker.make(step.samples)

        kind = kind_of_backend(spec, device=PROFILES[spec.trainer.accelerator.profile].device)
        backend = kind(backend_settings(spec, host="127.0.0.1"), group=SingleProcess())
        queue = _Queue(history=history, make=make, decided=algorithm_of(spec).writes)
        reports: list[TrainReport] = []

        async def report(step_report: TrainReport) -> None:
            reports.append(step_report)
            done(step_report.step, step_report.samples)

        settings = trainer_settings(spec, attempt=0)
        trainer = Trainer(
            queue=queue,
            sender=versions,
            backend=backend,
            group=SingleProcess(),
            checkpoints=checkpoints,
            report=report,
            directives=Directives,
            settings=replace(
                settings,
                schedule=replace(settings.schedule, steps=plan.steps[-1]),
                checkpoint_every=0,
                checkpoint_evaluated=False,
            ),
            folder=model,
            materialise=lambda: materialize_weights(spec.model.source, model) if backend.of_model else None,
        )
        await trainer.run()
        backend.close()
    finally:
        await engine.close()
        if link is not None:
            link.unlink()
    return [_again(each, queue.generated[each.step], history=history, digests=versions.digests) for each in reports]


def _again(
    report: TrainReport,
    generated: Mapping[SampleKey, ReplayedSample],
    *,
    history: RunHistory,
    digests: Mapping[int, str],
) -> ReplayedStep:
    recorded = history.step(report.step)
    published = history.digests.get(Version(recorded.attempt, report.step))
    return ReplayedStep(
        slots=[[generated[sample.key] for sample in slot] for slot in recorded.slots],
        report=report,
        same=None if published is None else digests.get(report.step) == published,
    )


def compare_checkpoints(run: Path, target: Path, *, step: int) -> dict[str, bool] | None:
    """Return for each file of the run's checkpoint of ``step`` whether the replay's file is equal; None without one.

    Older versions that only one of the two checkpoints carries are ignored.
    """
    found = Checkpoints(run / "checkpoints")
    if step not in found.steps():
        return None
    original, replayed = (_files(each.at(step)) for each in (found, Checkpoints(target / "checkpoints")))
    return {path: replayed[path] == digest for path, digest in original.items() if path in replayed}


def weights_gap(run: Path, target: Path, *, step: int) -> float | None:
    """Return the largest difference of a weight between the checkpoints of ``step``, written by any number of ranks.

    None if the run has no such checkpoint. Raises CheckpointError if the two have different tensors.
    """
    import torch

    found = Checkpoints(run / "checkpoints")
    if step not in found.steps():
        return None
    original, replayed = (_weights_of(each.at(step)) for each in (found, Checkpoints(target / "checkpoints")))
    if original.shapes != replayed.shapes:
        raise CheckpointError("its tensors differ from those of the replay", where=str(run / "checkpoints"))
    gap = 0.0
    for name, shape in original.shapes.items():
        one, other = torch.empty(shape, dtype=torch.float64), torch.empty(shape, dtype=torch.float64)
        original.read(name, Box.whole(shape), one)
        replayed.read(name, Box.whole(shape), other)
        gap = max(gap, float((one - other).abs().max()))
    return gap


def _weights_of(checkpoint: Checkpoint) -> SliceFiles:
    from asyncflow.training.torch.backend import WEIGHTS_FILE
    from asyncflow.training.torch.shards import saved_files

    return saved_files(checkpoint.folder, WEIGHTS_FILE)


def _files(checkpoint: Checkpoint) -> dict[str, str]:
    return {file.path: file.sha256 for file in checkpoint.manifest.files}


@contextmanager
def _threads(number: int, *, then: int) -> Iterator[None]:
    """Run the body with ``number`` threads, which determine the order of additions in an operation."""
    import torch

    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(then)


def _row(key: SampleKey, step: int) -> LeasedRow:
    meta = RowMeta(partition=TRAIN, serial=key.serial, sample=key.sample, step=step)
    return LeasedRow(row=0, meta=meta, attempt=0, lease="", until=0.0, unit=0, bytes={})
