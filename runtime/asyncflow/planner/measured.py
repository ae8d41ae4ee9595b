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
            optimizer_s=cost.optimizer_s * self.optimizer,
            publish_s=cost.publish_s * self.publish,
        )
        return msgspec.structs.replace(computed, cost=scaled)


COMPUTED = Factors()
"""Nothing was measured."""


def models_of_split(work: StepWork, engine: EnginePlan, trainer: TrainerPlan) -> Models:
    """Return the simulator's models of an engine and a trainer.

    A rank of the simulator is a replica of the trainer (tp x pp devices); its seconds a token are such that a step
    whose samples are all there takes ``TrainerPlan.step_s``.
    """
    cost, layout = trainer.cost, trainer.layout
    tokens = work.epochs * work.samples * (work.prompt + work.responses.mean) / layout.dp
    return Models(
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
            token_s=(cost.step_s - cost.optimizer_s) / tokens,
            optimizer_s=cost.optimizer_s,
            copy_s=cost.publish_s,
            publish_s=cost.publish_s,
        ),
        link=LinkModel(pull_s=engine.pull_s),
        prompt_tokens=round(work.prompt),
    )


def factors(measured: Models, computed: Models) -> Factors:
    """Return the factors of a probe. measured: what was fitted to it; computed: ``models_of_split`` of its layout.

    A coefficient that was measured as 0, or is computed as 0, tells nothing, and its factor is 1: but for ``share_s``,
    which is 0 where one sequence is as slow as many.
    """
    slots = measured.trainer.slot_s + measured.trainer.sample_s
    engine, trainer = measured.engine, measured.trainer
    mean = computed.prompt_tokens + 1
    token_s = trainer.token_s + slots / mean if slots else trainer.token_s
    return Factors(
        token=_ratio(engine.token_s, computed.engine.token_s),
        share=engine.share_s / computed.engine.share_s if engine.token_s and computed.engine.share_s else 1.0,
        prefill=_ratio(engine.prefill_s, computed.engine.prefill_s),
        recompute=_ratio(engine.recompute_s, computed.engine.recompute_s),
        swap=_ratio(engine.load_s, computed.engine.load_s),
        pull=_ratio(measured.link.pull_s, computed.link.pull_s),
        training=_ratio(token_s, computed.trainer.token_s),
        optimizer=_ratio(trainer.optimizer_s, computed.trainer.optimizer_s),
        publish=_ratio(trainer.copy_s, computed.trainer.copy_s),
    )


def _ratio(measured: float, computed: float) -> float:
    return measured / computed if measured > 0 and computed > 0 else 1.0
