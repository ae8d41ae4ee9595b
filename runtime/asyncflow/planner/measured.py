"""Measured coefficients that replace computed ones: the other half of the hybrid cost model.

A probe measures one layout on one kind of device. Its coefficients, divided by the coefficients that ``costs`` computes
for the same layout, are factors. The coefficients of all other layouts are multiplied by them.

Invariant: without a measurement all factors are 1, and the predicted cost of the measured layout is the measured cost.
"""

from __future__ import annotations

import msgspec

from asyncflow.planner.layouts import EnginePlan, TrainerPlan
from asyncflow.planner.work import StepWork
from asyncflow.sim import EngineModel, LinkModel, Models, TrainerModel


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Measured seconds divided by computed ones, by coefficient; see ``EnginePlan`` and ``TrainingCost``."""

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
        """Return an engine with scaled coefficients."""
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
        """Return a trainer with scaled coefficients."""
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
"""Factors without a measurement."""


def models_of_split(work: StepWork, engine: EnginePlan, trainer: TrainerPlan, *, like: Models | None = None) -> Models:
    """Return the simulator's models of an engine and a trainer. like: models of a probe, for the other components.

    A rank of the simulator is a replica of the trainer (tp x pp devices). Its seconds per token are chosen so that a
    step takes ``TrainerPlan.step_s`` if all its samples are available.
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
    """Return the factors of a probe. measured: models fitted to it; engine, trainer: computed plans of its layout.

    If a coefficient is measured or computed as 0, its factor is 1. Only ``share`` may be measured as 0: an engine may
    be as fast with many sequences as with one.
    """
    model, tokens = measured.trainer, _tokens_of_rank(work, trainer)
    slots, samples = max(1.0, tokens / work.pack), work.epochs * work.samples / trainer.layout.dp
    training_s = slots * model.slot_s + samples * model.sample_s + tokens * model.token_s
    return Factors(
        token=_ratio(measured.engine.token_s, engine.token_s),
        share=measured.engine.share_s / engine.share_s if measured.engine.token_s and engine.share_s else 1.0,
        prefill=_ratio(measured.engine.prefill_s, engine.prefill_s),
        recompute=_ratio(measured.engine.recompute_s, engine.recompute_s),
        swap=_ratio(measured.engine.load_s, engine.swap_s),
        pull=_ratio(measured.link.pull_s, engine.pull_s),
        training=_ratio(training_s, trainer.cost.step_s - trainer.cost.optimizer_s),
        optimizer=_ratio(model.optimizer_s, trainer.cost.optimizer_s),
        publish=_ratio(model.copy_s, trainer.cost.publish_s),
    )


def _tokens_of_rank(work: StepWork, trainer: TrainerPlan) -> float:
    """Return the number of tokens of a step that one replica of the trainer computes, over all epochs."""
    return work.epochs * work.trained / trainer.layout.dp


def _ratio(measured: float, computed: float) -> float:
    return measured / computed if measured > 0 and computed > 0 else 1.0
