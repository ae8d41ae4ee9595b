"""A trainer as a class: what its loop does with a gradient."""

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import asyncflow  # noqa: E402
from asyncflow.api.load import load_job  # noqa: E402
from asyncflow.errors import Diverged, Refused  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"


class Steps:
    """Engines of a job with a batch for each step, which hold what was published."""

    def __init__(self, losses):
        self.job, self.state = load_job(EXAMPLE, ["trainer.external=true"]), None
        self.step, self.steps = 0, len(losses)
        self.losses, self.published = losses, []
        self._taken = False

    def get_experience_data(self):
        self._taken = not self._taken
        batch = SimpleNamespace(mask=torch.ones(1, 2, dtype=torch.bool), factor=self.losses[self.step])
        batch.to = lambda _: batch
        return batch if self._taken else None

    def start(self, model):
        self.weight_sync_notify(model)

    def weight_sync_notify(self, model, *, state=None, metrics=None):
        self.step += state is not None
        self.published.append((model.weight.item(), metrics))


class Linear(asyncflow.Trainer):
    def build(self):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def update(self, batch):
        return (self.model.weight * batch.factor).sum()


def test_a_step_without_a_finite_gradient_changes_no_weights():
    engines = Steps([float("nan"), 1.0, float("inf")])
    Linear(engines).fit()
    (start, _), (first, skipped), (second, moved), (third, _) = engines.published
    assert start == first == 1 != second == third
    assert skipped == {"skipped": 1}
    assert moved["skipped"] == 0
    assert moved["grad_norm"] == 0.5


def test_training_ends_after_three_steps_without_a_finite_gradient():
    engines = Steps([1.0, *[float("nan")] * 3, 1.0])
    with pytest.raises(Diverged, match="steps 2 to 4"):
        Linear(engines).fit()
    assert engines.step == 3


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda model: None, "update returned None"),
        (lambda model: model.weight.expand(2, 1), r"torch\.Size\(\[2, 1\]\)"),
    ],
    ids=["nothing", "losses of tokens"],
)
def test_what_is_no_sum_of_the_loss_is_refused(returned, said):
    class Wrong(Linear):
        def update(self, batch):
            return returned(self.model)

    with pytest.raises(Refused, match=rf"{said}\. Return the loss of the batch, summed over its tokens"):
        Wrong(Steps([1.0])).fit()
