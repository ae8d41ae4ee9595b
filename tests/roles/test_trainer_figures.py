"""Figures that Prometheus scrapes of a trainer are those that it reports."""

from asyncflow.roles.trainer import count_step
from asyncflow.telemetry.metrics import TrainerMetrics
from asyncflow.training.report import StepTally, describe

STEP = {"attempt": 0, "ranks": 1, "step": 3, "published": True, "spent": {}, "publication_s": None, "busy_s": 0.0}


def test_figures_of_a_correction_are_scraped_by_their_names() -> None:
    metrics = TrainerMetrics()
    figures = {"loss": -0.5, "correction_ess": 0.875, "correction_k3": 0.01}
    count_step(metrics, describe(StepTally(), figures, **STEP, started=0.0, ended=1.0))  # type: ignore[arg-type]
    value = metrics.registry.get_sample_value
    assert value("asyncflow_trainer_loss") == -0.5
    assert value("asyncflow_trainer_correction", {"figure": "ess"}) == 0.875
    assert value("asyncflow_trainer_correction", {"figure": "k3"}) == 0.01
    assert value("asyncflow_trainer_correction", {"figure": "max"}) is None
