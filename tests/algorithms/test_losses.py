from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncflow.algorithms.base import Algorithm, Tokens
from asyncflow.algorithms.cispo import Cispo
from asyncflow.algorithms.dpo import Dpo
from asyncflow.algorithms.gspo import Gspo
from asyncflow.algorithms.ipo import Ipo
from asyncflow.algorithms.loss import Aggregation, Loss, LossTotals
from asyncflow.algorithms.losses import Clip, KlName, KlTarget, PolicyTerms, kl_penalty, ppo_clip
from asyncflow.errors import ManifestError


def terms(ratio: float, advantage: float, clip: Clip) -> tuple[float, float, tuple[bool, bool, bool]]:
    """Loss, gradient by log-prob, and which clip was at work."""
    logprobs = torch.tensor([np.log(ratio) - 2], dtype=torch.float64, requires_grad=True)
    got = ppo_clip(logprobs, torch.full((1,), -2.0), torch.tensor([advantage], dtype=torch.float64), clip)
    (gradient,) = torch.autograd.grad(got.loss.sum(), logprobs)
    return got.loss.item(), gradient.item(), (bool(got.clipped_low), bool(got.clipped_high), bool(got.clipped_dual))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "which"),
    [
        (1.1, 2.0, -2.2, -2.2, (False, False, False)),
        (1.5, 2.0, -2.56, 0.0, (False, True, False)),
        (0.5, 2.0, -1.0, -1.0, (False, False, False)),
        (0.5, -2.0, 1.6, 0.0, (True, False, False)),
        (1.5, 0.5, -0.64, 0.0, (False, True, False)),
        (2.0, -2.0, 4.0, 4.0, (False, False, False)),
        (5.0, -2.0, 6.0, 0.0, (False, False, True)),
        (5.0, 0.0, 0.0, 0.0, (False, False, False)),
    ],
)
def test_clipped_loss(ratio: float, advantage: float, loss: float, gradient: float, which: tuple[bool, ...]) -> None:
    clip = Clip(low=0.2, high=0.28, dual=3.0)
    got_loss, got_gradient, got_which = terms(ratio, advantage, clip)
    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)
    assert got_which == which


def test_absurd_ratio_stays_finite() -> None:
    loss, gradient, _ = terms(1e300, -1.0, Clip())
    assert np.isfinite([loss, gradient]).all()


class Mean(Algorithm):
    def policy(self, tokens: Tokens, clip: Clip) -> PolicyTerms:
        terms = super().policy(tokens, clip)
        return terms._replace(loss=terms.loss.mean())


class Bare(Algorithm):
    def policy(self, tokens: Tokens, clip: Clip) -> PolicyTerms:
        return super().policy(tokens, clip).loss  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (Mean(), r"Mean\.policy returned loss of the shape \(\) for 2 tokens\. Return PolicyTerms with one value for"),
        (Bare(), r"Bare\.policy returned an object of the type Tensor for 2 tokens"),
    ],
)
def test_terms_that_are_not_one_for_each_token_are_refused(algorithm: Algorithm, said: str) -> None:
    values = torch.full((2,), -1.0)
    with pytest.raises(ManifestError, match=said):
        Loss(algorithm=algorithm).tokens(values, behaviour=values, advantages=values, reference=None, entropy=None)


@pytest.mark.parametrize("name", ["k3", "k3+"])
def test_an_absurd_divergence_stays_finite(name: KlName) -> None:
    logprobs = torch.tensor([-1000.0], requires_grad=True)
    got = kl_penalty(logprobs, torch.zeros(1), name)
    (gradient,) = torch.autograd.grad(got.sum(), logprobs)
    assert torch.isfinite(torch.cat([got, gradient])).all()


def measured(algorithm: Algorithm, ratios: list[float], advantages: list[float]) -> PolicyTerms:
    """Terms of three responses of two tokens each, whose advantages are given by response; pairs are by |advantage|."""
    logprobs = torch.tensor(ratios, dtype=torch.float64).log()
    each = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(2)
    sequences = torch.arange(3).repeat_interleave(2)
    tokens = Tokens(logprobs, torch.zeros(6), each, sequences, torch.zeros(6), each.abs().long() - 1)
    return algorithm.policy(tokens, Clip(low=0.2, high=0.28))


def test_weights_that_are_clipped_are_counted_where_they_matter() -> None:
    terms = measured(Cispo(), [0.5, 0.9, 1.2, 1.5, 1.5, 0.5], [1, -1, 0])
    assert terms.clipped_low.tolist() == [True, *[False] * 5]
    assert terms.clipped_high.tolist() == [*[False] * 3, True, False, False], "without advantage nothing is clipped"
    assert not terms.clipped_dual.any()
    assert terms.ratio.tolist() == pytest.approx([0.5, 0.9, 1.2, 1.5, 1.5, 0.5])


def test_the_tokens_of_a_response_have_one_ratio_and_are_clipped_together() -> None:
    terms = measured(Gspo(), [2.0, 1.0, 0.5, 1.0, 2.0, 0.5], [1, -1, -1])
    assert terms.ratio.tolist() == pytest.approx([2**0.5] * 2 + [2**-0.5] * 2 + [1.0] * 2)
    assert (terms.clipped_high.tolist(), terms.clipped_low.tolist()) == (
        [True, True, *[False] * 4],
        [False, False, True, True, False, False],
    )


@pytest.mark.parametrize(("algorithm", "margin"), [(Dpo(), np.log(8)), (Ipo(), np.log(8) / 2)])
def test_of_a_pair_the_margin_is_measured_and_whether_the_chosen_one_is_likelier(algorithm: Dpo, margin: float) -> None:
    for chosen, ahead in ((1, 1), (-1, 0)):
        terms = measured(algorithm, [2.0, 2.0, 0.5, 1.0, 1.0, 1.0], [chosen, -chosen, 2])
        assert terms.figures["pair_margin"].tolist() == pytest.approx([chosen * margin] * 4 + [0.0] * 2)
        assert terms.figures["pair_accuracy"].tolist() == [ahead] * 4 + [0] * 2
        assert not (terms.clipped_low | terms.clipped_high | terms.clipped_dual).any()
        assert terms.ratio.tolist() == pytest.approx([2.0, 2.0, 0.5, 1.0, 1.0, 1.0])


def test_bad_clips_are_refused() -> None:
    assert (Clip(low=0.0, high=0.0).low, Clip(dual=1.5).dual) == (0, 1.5)
    for bad in ({"low": 1.0}, {"high": -0.1}, {"dual": 1.0}):
        with pytest.raises(ManifestError):
            Clip(**bad)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("k1", 0.3, 1.0),
        ("k2", 0.045, 0.3),
        ("k3", np.exp(-0.3) - 0.7, 1 - np.exp(-0.3)),
        ("k3+", np.exp(-0.3) - 0.7, 0.3),
    ],
)
def test_divergence(name: KlName, value: float, gradient: float) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    got = kl_penalty(logprobs, torch.tensor([-1.3], dtype=torch.float64), name)
    assert got.item() == pytest.approx(value)
    assert float(torch.autograd.grad(got.sum(), logprobs)[0]) == pytest.approx(gradient)


def test_expected_k2_gradient_is_that_of_the_divergence() -> None:
    scores = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.2, -0.4, 0.9], dtype=torch.float64).log_softmax(0)
    policy = scores.log_softmax(0)
    true = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), scores, retain_graph=True)[0]
    for name in ("k2", "k3+"):
        expected = (policy.exp().detach() * kl_penalty(policy, reference, name)).sum()
        torch.testing.assert_close(torch.autograd.grad(expected, scores, retain_graph=True)[0], true)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ManifestError):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_only_a_lone_policy_term_can_be_silent() -> None:
    advantages = np.array([0.0, 1.0], dtype=np.float32)
    assert Loss().silent(advantages).tolist() == [True, False]
    assert not Loss(kl=0.1).silent(advantages).any()
    assert not Loss(entropy=0.1).silent(advantages).any()
    assert Loss(kl=0.1, penalised=True).silent(advantages).tolist() == [True, False], "the reward has it"


def test_log_probs_of_the_reference_are_asked_for_where_something_needs_them() -> None:
    losses = (Loss(), Loss(kl=0.1), Loss(kl=0.1, penalised=True), Loss(algorithm=Dpo()))
    assert [(loss.diverges, loss.compares, loss.references) for loss in losses] == [
        (False, False, False),
        (True, True, True),
        (False, False, True),
        (False, True, True),
    ]


def test_the_coefficient_is_adapted_by_the_divergence_that_it_weighs() -> None:
    metrics = {"kl": 0.11, "penalty_kl": 0.5}
    loss = Loss(kl=0.3, target=KlTarget(value=0.1, horizon=10.0))
    assert loss.after(metrics).kl == pytest.approx(0.3 * (1 + 0.1 / 10))
    assert replace(loss, penalised=True).after(metrics).kl == pytest.approx(0.3 * (1 + 0.2 / 10))
    assert replace(loss, target=None).after(metrics).kl == loss.after({}).kl == 0.3


def test_aggregation_weights_and_divisors() -> None:
    tokens, totals = np.array([4, 0, 2]), LossTotals(6, 2)
    expected = {"token-mean": 6, "token-sum": 1, "seq-mean-token-sum": 2, "seq-mean-token-mean": 2}
    for name, divisor in expected.items():
        assert Aggregation(name=name).divisor(totals) == divisor  # type: ignore[arg-type]
    assert Aggregation().weights(tokens).tolist() == [1, 1, 1]
    assert Aggregation(name="seq-mean-token-mean").weights(tokens).tolist() == [0.25, 1, 0.5]
    assert Aggregation(name="seq-mean-token-sum-norm", horizon=8).weights(tokens).tolist() == [0.125] * 3
    assert Aggregation().divisor(LossTotals(0, 0)) == 1
    with pytest.raises(ManifestError, match="longest response"):
        Aggregation(name="seq-mean-token-sum-norm")
