"""Measured coefficients in place of computed ones: the other half of the hybrid cost model.

A probe measures one layout on one kind of device. Its coefficients, divided by those that ``costs`` computes for that
layout, are factors; every other layout's are multiplied by them.

Invariant: where nothing was measured all factors are 1, and the layout that was measured costs what was measured.
"""

from __future__ import annotations

import msgspec

from asyncflow.planner.layouts import EnginePlan, TrainerPlan
from asyncflow.planner.work import StepWork
from asyncflow.sim import EngineModel, LinkModel, Models, TrainerModel


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds divided by computed ones, by coefficient; see ``Engine`` and ``Training``."""

    token: float = 1.0
    share: float = 1.0
    prefill: float = 1.0
    recompute: float = 1.0
    swap: float = 1.0
    pull: float = 1.0
    training: float = 1.0
    optimizer: float = 1.0
    publish: float = 1.0

    def engine(self, computed: EnginePlan) -> EnginePlan:
        """Return an engine with its coefficients multiplied."""
        return msgspec.structs.replace(
            computed,
            token_s=computed.token_s * self.token,
            share_s=computed.share_s * self.share,
            prefill_s=computed.prefill_s * self.prefill,
            recompute_s=computed.recompute_s * self.recompute,
            swap_s=computed.swap_s * self.swap,
            pull_s=computed.pull_s * self.pull,
        )

    def trainer(self, computed: TrainerPlan) -> TrainerPlan:
        """Return a trainer with its coefficients multiplied."""
        cost = computed.cost
        scaled = msgspec.structs.replace(
            cost,
            compute_s=cost.compute_s * self.training,
            bubble_s=cost.bubble_s * self.training,
            reduce_s=cost.reduce_s * self.training,
            gather_s=cost.gather_s * self.training,
            exchange_s=cost.exchange_s * self.training,
            optimizer_s=cost.optimizer_s * self.optimizer,
            publish_s=cost.publish_s * self.publish,
        )
        return msgspec.structs.replace(computed, cost=scaled)


COMPUTED = Factors()
"""Nothing was measured."""


def models_of_split(work: StepWork, engine: EnginePlan, trainer: TrainerPlan, *, like: Models | None = None) -> Models:
    """Return the simulator's models of an engine and a trainer. like: those of a probe, for what no split changes.

    A rank of the simulator is a replica of the trainer (tp x pp devices); its seconds a token are such that a step
    whose samples are all there takes ``TrainerPlan.step_s``.
    """
    cost = trainer.cost
    computed = Models(
        engine=EngineModel(
            slots=engine.slots,
            token_s=engine.token_s,
            share_s=engine.share_s,
            prefill_s=engine.prefill_s,
            load_s=engine.swap_s,
            recompute_s=engine.recompute_s,
            lengths=work.responses.lengths,
        ),
        trainer=TrainerModel(
            token_s=(cost.step_s - cost.optimizer_s) / _tokens_of_rank(work, trainer),
            optimizer_s=cost.optimizer_s,
            copy_s=cost.publish_s,
            publish_s=cost.publish_s,
        ),
        link=LinkModel(pull_s=engine.pull_s),
        prompt_tokens=round(work.prompt),
    )
    return computed if like is None else msgspec.structs.replace(computed, storage=like.storage, reward=like.reward)


def factors(measured: Models, *, work: StepWork, engine: EnginePlan, trainer: TrainerPlan) -> Factors:
    """Return the factors of a probe. measured: what was fitted to it; engine, trainer: what is computed of its layout.

    A coefficient that was measured as 0, or is computed as 0, says nothing, and its factor is 1, but for ``share``: an
    engine may be as fast with many sequences as with one.
    """
    found, tokens = measured.trainer, _tokens_of_rank(work, trainer)
    slots, samples = max(1.0, tokens / work.pack), work.epochs * work.samples / trainer.layout.dp
    training_s = slots * found.slot_s + samples * found.sample_s + tokens * found.token_s
    return Factors(
        token=_ratio(measured.engine.token_s, engine.token_s),
        share=measured.engine.share_s / engine.share_s if measured.engine.token_s and engine.share_s else 1.0,
        prefill=_ratio(measured.engine.prefill_s, engine.prefill_s),
        recompute=_ratio(measured.engine.recompute_s, engine.recompute_s),
        swap=_ratio(measured.engine.load_s, engine.swap_s),
        pull=_ratio(measured.link.pull_s, engine.pull_s),
        training=_ratio(training_s, trainer.cost.step_s - trainer.cost.optimizer_s),
        optimizer=_ratio(found.optimizer_s, trainer.cost.optimizer_s),
        publish=_ratio(found.copy_s, trainer.cost.publish_s),
    )


def _tokens_of_rank(work: StepWork, trainer: TrainerPlan) -> float:
    """Return the tokens of a step that one replica of the trainer computes, over all epochs."""
    return work.epochs * work.samples * (work.prompt + work.responses.mean) / trainer.layout.dp


def _ratio(measured: float, computed: float) -> float:
    return measured / computed if measured > 0 and computed > 0 else 1.0
