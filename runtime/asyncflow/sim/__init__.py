"""Runs in virtual time: discrete events over the policies of ``flow``, with engines, links and stores as models."""

from asyncflow.rollout.lengths import Lengths
from asyncflow.sim.models import (
    Colocation,
    EngineModel,
    LinkModel,
    Models,
    RewardTimes,
    StartModel,
    StorageModel,
    TrainerModel,
)
from asyncflow.sim.result import Simulated, SimulatedStep
from asyncflow.sim.run import simulate
from asyncflow.sim.scenario import (
    EvaluationLoad,
    RolloutEvent,
    Scenario,
    engine_model,
    models_of,
    not_simulated,
    scenario_of,
)

__all__ = [
    "Colocation",
    "EngineModel",
    "EvaluationLoad",
    "Lengths",
    "LinkModel",
    "Models",
    "RewardTimes",
    "RolloutEvent",
    "Scenario",
    "Simulated",
    "SimulatedStep",
    "StartModel",
    "StorageModel",
    "TrainerModel",
    "engine_model",
    "models_of",
    "not_simulated",
    "scenario_of",
    "simulate",
]
