"""Each algorithm, from rewards to the gradient, is what its paper says, however a step is streamed and split.

What is compared with is written from the papers: padded, one batch, float64, no code of the project. The model is a
table of logits by the token before, so that packs of the project's own packing have a real gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import logsigmoid

from asyncflow.algorithms.base import Algorithm, AllGather, Group, StepSamples
from asyncflow.algorithms.cispo import Cispo
from asyncflow.algorithms.correction import Correction
from asyncflow.algorithms.dapo import Dapo, DapoOptions
from asyncflow.algorithms.dpo import Dpo, DpoOptions
from asyncflow.algorithms.grpo import Grpo
from asyncflow.algorithms.gspo import Gspo
from asyncflow.algorithms.ipo import Ipo
from asyncflow.algorithms.loss import Aggregation, AggregationName, Loss, LossTotals
from asyncflow.algorithms.losses import Clip, KlName, kl_penalty
from asyncflow.algorithms.pf_ppo import PfPpo, PfPpoOptions
from asyncflow.algorithms.reinforce import ReinforceOptions, ReinforcePlusPlus
from asyncflow.training.packing import pack_samples

GROUPS, SIZE, LONGEST, WORDS = 6, 4, 9, 12
CLIP = Clip(low=0.2, high=0.28)
DTYPE = torch.float64
ROUNDED = 1e-7
"""Advantages travel as float32, so a loss in which they cancel has this error, whatever it is small in relation to."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors as small as these only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Step:
    """D_k: rewards [n]; prompts, responses, old, proximal and masks as lists of n; [n] is by group, then sample.

    old: log-probs of the policy that sampled; proximal: of the trainer's before the step; both stay as they are.
    """

    rewards: np.ndarray
    prompts: list[np.ndarray]
    responses: list[np.ndarray]
    old: list[np.ndarray]
    proximal: list[np.ndarray]
    masks: list[np.ndarray]
    policy: np.ndarray
    reference: np.ndarray

    @property
    def serials(self) -> np.ndarray:
        return np.repeat(np.arange(GROUPS), SIZE)

    @property
    def cut(self) -> np.ndarray:
        """Return whether a response was cut off: those of the greatest length, bool[n]."""
        return np.array([len(response) == LONGEST for response in self.responses])


def step_of(seed: int = 0) -> Step:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LONGEST + 1, GROUPS * SIZE)
    prompts = [rng.integers(0, WORDS, 3) for _ in range(GROUPS)]
    policy = rng.normal(size=(WORDS, WORDS))
    responses = [rng.integers(0, WORDS, n) for n in lengths]
    rewards = rng.integers(0, 3, GROUPS * SIZE).astype(float)
    rewards[:SIZE] = 1.0
    rewards[SIZE : 2 * SIZE] = [0, 1, 1, 2]
    masks = [rng.random(n) < 0.8 for n in lengths]
    for mask in masks:
        mask[-1] = True
    behind = policy + rng.normal(scale=0.4, size=policy.shape)
    reference = policy + rng.normal(scale=0.3, size=policy.shape)
    between = policy + rng.normal(scale=0.2, size=policy.shape)
    whole = [np.r_[prompts[i // SIZE][-1], response] for i, response in enumerate(responses)]

    def chosen(table: np.ndarray) -> list[np.ndarray]:
        norm = table - np.log(np.exp(table).sum(1, keepdims=True))
        return [norm[tokens[:-1], tokens[1:]] for tokens in whole]

    every = [prompts[i // SIZE] for i in range(len(rewards))]
    return Step(rewards, every, responses, chosen(behind), chosen(between), masks, policy, reference)


# --- what the papers say ---------------------------------------------------------------------------------------------


@dataclass
class Padded:
    """One padded batch: log-probs of policy and its entropy (with gradient), of the others, and the mask, [n, longest].

    old: of the policy that sampled; proximal: of the trainer's before the step.
    """

    step: Step
    table: Tensor
    lp: Tensor
    entropy: Tensor
    old: Tensor
    proximal: Tensor
    ref: Tensor
    mask: Tensor


def padded(step: Step) -> Padded:
    n = len(step.rewards)
    table = torch.tensor(step.policy, requires_grad=True)
    lp, entropy, old, proximal, ref, mask = (torch.zeros(n, LONGEST, dtype=DTYPE) for _ in range(6))
    for i in range(n):
        tokens = torch.from_numpy(np.r_[step.prompts[i][-1], step.responses[i]])
        length = len(tokens) - 1
        for into, weights in ((lp, table), (ref, torch.from_numpy(step.reference))):
            chosen = weights.log_softmax(-1)[tokens[:-1], tokens[1:]]
            into[i, :length] = chosen
        entropy[i, :length] = Categorical(logits=table[tokens[:-1]]).entropy()
        old[i, :length] = torch.from_numpy(step.old[i])
        proximal[i, :length] = torch.from_numpy(step.proximal[i])
        mask[i, :length] = torch.from_numpy(step.masks[i].astype(float))
    return Padded(step, table, lp, entropy, old, proximal, ref, mask)


def by_group(step: Step, of: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([of(part) for part in step.rewards.reshape(GROUPS, SIZE)]))


def standardised(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if np.ptp(rewards) else np.zeros(len(rewards))


def against_the_others(rewards: np.ndarray) -> np.ndarray:
    return np.array([reward - np.delete(rewards, i).mean() for i, reward in enumerate(rewards)])


def averaged(tokens: Tensor, mask: Tensor, how: str) -> Tensor:
    sums, counts = (tokens * mask).sum(1), mask.sum(1)
    alive = counts > 0
    return {
        "token-mean": lambda: sums.sum() / mask.sum(),
        "token-sum": lambda: sums.sum(),
        "seq-mean-token-sum": lambda: sums[alive].mean(),
        "seq-mean-token-mean": lambda: (sums[alive] / counts[alive]).mean(),
        "seq-mean-token-sum-norm": lambda: (sums[alive] / LONGEST).mean(),
    }[how]()


def surrogate(p: Padded, advantages: Tensor) -> Tensor:
    ratio = (p.lp - p.old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP.low, 1 + CLIP.high) * advantages)


def grpo(p: Padded, how: str) -> Tensor:
    return averaged(surrogate(p, by_group(p.step, standardised)[:, None]), p.mask, how)


def leave_one_out(p: Padded, how: str) -> Tensor:
    return averaged(surrogate(p, by_group(p.step, against_the_others)[:, None]), p.mask, how)


def dr_grpo(p: Padded, how: str) -> Tensor:
    return averaged(surrogate(p, by_group(p.step, lambda r: r - r.mean())[:, None]), p.mask, how)


def dual_clip(p: Padded, how: str, *, most: float) -> Tensor:
    """arXiv 1912.09729, equation 5: for negative advantages max(min(r A, clip(r) A), c A)."""
    advantages = by_group(p.step, standardised)[:, None]
    objective = -surrogate(p, advantages)
    bounded = torch.where(advantages < 0, torch.max(objective, most * advantages), objective)
    assert ((bounded > objective) & (p.mask > 0)).any()
    return averaged(-bounded, p.mask, how)


def kl_in_loss(p: Padded, how: str, *, name: KlName) -> Tensor:
    """0.3 * an estimate of KL(policy || reference), http://joschu.net/blog/kl-approx.html, beside the policy loss."""
    away = p.lp - p.ref
    k3 = torch.expm1(-away) + away
    estimate = {
        "k1": away,
        "k2": away**2 / 2,
        "k3": k3,
        "k3+": k3.detach() + away.detach() * (p.lp - p.lp.detach()),
    }[name]
    tokens = surrogate(p, by_group(p.step, standardised)[:, None]) + 0.3 * estimate
    return averaged(tokens, p.mask, how)


def entropy_bonus(p: Padded, how: str) -> Tensor:
    tokens = surrogate(p, by_group(p.step, standardised)[:, None]) - 0.05 * p.entropy
    return averaged(tokens, p.mask, how)


def importance(p: Padded, of: Tensor, correction: Correction) -> Tensor:
    """The weight of each token, [n, longest], by the ratio of the policy ``of`` to the one that sampled."""
    away = ((of - p.old) * p.mask).detach()
    if correction.level != "token":
        away = away.sum(1, keepdim=True).expand(-1, LONGEST)
    if correction.level == "geometric":
        away = away / p.mask.sum(1, keepdim=True)
    ratio = away.exp()
    within = (ratio >= correction.low) & (ratio <= correction.high)
    assert 0 < within[p.mask > 0].double().mean() < 1
    if correction.kind == "mask":
        return torch.where(within, ratio, 0)
    return ratio.clamp(correction.low, correction.high)


def decoupled(p: Padded, how: str, *, correction: Correction) -> Tensor:
    """AReaL, arXiv 2505.24298, equation 5: clipped around the policy before the step, weighted by how far that is."""
    proximal = replace(p, old=p.proximal)
    tokens = surrogate(proximal, by_group(p.step, standardised)[:, None])
    return averaged(importance(p, p.proximal, correction) * tokens, p.mask, how)


def rejected(p: Padded, how: str, *, correction: Correction) -> Tensor:
    """The ratio of the loss is the weight already: where it is out of bounds, tokens are left out of the sum."""
    tokens = surrogate(p, by_group(p.step, standardised)[:, None])
    return averaged((importance(p, p.lp, correction) > 0) * tokens, p.mask, how)


def gspo(p: Padded, how: str) -> Tensor:
    advantages = by_group(p.step, standardised)
    s = (((p.lp - p.old) * p.mask).sum(1) / p.mask.sum(1)).exp()
    return -torch.min(s * advantages, s.clamp(1 - CLIP.low, 1 + CLIP.high) * advantages).mean()


def cispo(p: Padded, how: str) -> Tensor:
    weight = (p.lp - p.old).exp().clamp(1 - CLIP.low, 1 + CLIP.high).detach()
    return averaged(-weight * by_group(p.step, standardised)[:, None] * p.lp, p.mask, how)


def dapo(p: Padded, how: str, *, overlong_filter: bool = False) -> Tensor:
    """Groups of equal rewards are not trained; a soft punishment over the last 4 tokens, at most 0.5.

    With the filter the loss of responses that were cut off is masked; the others are compared with them all the same.
    """
    lengths = np.array([len(response) for response in p.step.responses])
    shaped = p.step.rewards - 0.5 * np.clip(lengths - (LONGEST - 4), 0, 4) / 4
    advantages = by_group(replace(p.step, rewards=shaped), standardised)
    varied = by_group(p.step, lambda r: np.full(SIZE, float(np.ptp(r) > 0)))
    kept = torch.tensor([not (overlong_filter and length == LONGEST) for length in lengths], dtype=DTYPE)
    assert overlong_filter == bool((varied > kept).any())
    return averaged(surrogate(p, advantages[:, None]), p.mask * (varied * kept)[:, None], how)


def kl_in_reward(p: Padded, how: str) -> Tensor:
    """0.3 * k1 of the old policy, taken from the reward of the response."""
    cost = 0.3 * ((p.old - p.ref) * p.mask).sum(1).detach().numpy()
    advantages = by_group(replace(p.step, rewards=p.step.rewards - cost), standardised)
    return averaged(surrogate(p, advantages[:, None]), p.mask, how)


def reinforce(p: Padded, how: str, *, discount: float, kl: float, baseline: bool) -> Tensor:
    advantages = torch.zeros_like(p.old)
    rewards = by_group(p.step, lambda r: r - r.mean() if baseline else r)
    for i in range(len(rewards)):
        after = rewards[i].item()
        for t in reversed(p.mask[i].nonzero()[:, 0].tolist()):
            after -= kl * (p.old[i, t] - p.ref[i, t]).item()
            advantages[i, t] = after
            after *= discount
    chosen = advantages[p.mask > 0]
    advantages = (advantages - chosen.mean()) / (chosen.std() + 1e-8)
    return averaged(surrogate(p, advantages), p.mask, how)


def filtered(p: Padded, how: str, *, kept: Tensor) -> Tensor:
    """The samples of which ``kept`` [n] is true, with the advantages that they have in the whole group."""
    return averaged(surrogate(p, by_group(p.step, standardised)[:, None]), p.mask * kept[:, None], how)


def pairs_of(rewards: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    for g in range(GROUPS):
        ranked = sorted(range(g * SIZE, (g + 1) * SIZE), key=lambda i: -rewards[i])
        for n in range(most):
            if rewards[ranked[n]] > rewards[ranked[-1 - n]]:
                yield ranked[n], ranked[-1 - n]


def dpo(p: Padded, how: str, *, most: int = 1) -> Tensor:
    h = ((p.lp - p.ref) * p.mask).sum(1)
    return torch.stack([-logsigmoid(0.3 * (h[w] - h[v])) for w, v in pairs_of(p.step.rewards, most)]).mean()


def ipo(p: Padded, how: str) -> Tensor:
    h = ((p.lp - p.ref) * p.mask).sum(1) / p.mask.sum(1)
    return torch.stack([(h[w] - h[v] - 1 / 0.6).square() for w, v in pairs_of(p.step.rewards, 1)]).mean()


# --- what the project does -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """The samples that the driver lets the trainer see: indices, and the advantage (or shaped reward) of each."""

    indices: list[int]
    advantages: dict[int, float]


def decided(step: Step, algorithm: Algorithm[Any]) -> Chosen:
    indices, advantages = [], {}
    for serial in range(GROUPS):
        own = list(range(serial * SIZE, (serial + 1) * SIZE))
        rewards = step.rewards[own]
        if algorithm.filters and not np.ptp(rewards):
            continue
        lengths = np.array([len(step.responses[i]) for i in own])
        group = Group(serial, np.arange(SIZE), rewards, lengths, step.cut[own])
        shaped, left = algorithm.shaped(group), algorithm.excluded(group)
        values = shaped if algorithm.whole_step else algorithm.advantages(shaped)
        for j in set(range(SIZE)) - left.keys():
            indices.append(own[j])
            advantages[own[j]] = float(values[j])
    return Chosen(indices, advantages)


def together(ranks: int) -> list[AllGather]:
    """Collective gathers for threads that stand for ranks."""
    barrier, given = threading.Barrier(ranks, timeout=20), [np.zeros(0)] * ranks

    def gather_of(rank: int) -> AllGather:
        def gather(array: np.ndarray) -> np.ndarray:
            given[rank] = array
            barrier.wait()
            whole = np.concatenate(given)
            barrier.wait()
            return whole

        return gather

    return [gather_of(rank) for rank in range(ranks)]


def credited(step: Step, loss: Loss, chosen: Chosen, shares: Sequence[Sequence[int]]) -> dict[int, np.ndarray]:
    """The advantage of each token of each sample, as each rank computes those of its share."""
    normal = torch.from_numpy(step.reference).log_softmax(-1).numpy()
    found: dict[int, np.ndarray] = {}

    def rank(own: Sequence[int], all_gather: AllGather) -> None:
        lengths = [len(step.responses[i]) for i in own]
        costs = []
        for i in own:
            tokens = np.r_[step.prompts[i][-1], step.responses[i]]
            pair = torch.from_numpy(step.old[i]), torch.from_numpy(normal[tokens[:-1], tokens[1:]])
            costs.append(loss.kl * loss.penalised * kl_penalty(*pair, loss.kl_name).numpy())
        samples = StepSamples(
            serials=step.serials[list(own)],
            samples=np.array(own) % SIZE,
            rewards=np.array([chosen.advantages[i] for i in own]),
            offsets=np.r_[0, np.cumsum(lengths)],
            counted=np.concatenate([step.masks[i] for i in own]),
            penalty=np.concatenate(costs),
        )
        credit = loss.algorithm.credit(samples, all_gather)
        found.update(zip(own, np.split(credit, np.cumsum(lengths)[:-1]), strict=True))

    threads = [
        threading.Thread(target=rank, args=(own, all_gather))
        for own, all_gather in zip(shares, together(len(shares)), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def streamed(
    step: Step, loss: Loss, slots: Sequence[Sequence[int]], chosen: Chosen, **layout: Any
) -> tuple[float, np.ndarray]:
    """Loss and gradient, each slot computed at once in packs of its own."""
    table, reference = torch.tensor(step.policy, requires_grad=True), torch.from_numpy(step.reference)
    token_advantages = credited(step, loss, chosen, slots) if loss.algorithm.whole_step else None
    total, tokens, sequences = 0.0, 0, 0
    for slot in slots:
        lengths = np.array([step.masks[i].sum() for i in slot])
        tokens, sequences = tokens + int(lengths.sum()), sequences + int((lengths > 0).sum())
        weights = loss.aggregation.weights(lengths)
        pairs = [(step.serials[i], abs(chosen.advantages[i])) for i in slot]
        packs = pack_samples(
            [step.prompts[i] for i in slot],
            [step.responses[i] for i in slot],
            pairs if loss.algorithm.pairs else [step.serials[i] for i in slot],
            whole=loss.algorithm.pairs,
            **layout,
        )
        for whole in packs:
            counted = [step.masks[slot[s]][o] for s, o in zip(whole.samples, whole.offsets, strict=True)]
            pack = whole.targeting(np.array(counted, np.bool_))
            own = [slot[s] for s in pack.samples]
            places = list(zip(own, pack.offsets, strict=True))
            before = torch.from_numpy(pack.ids[pack.rows])
            targets = torch.from_numpy(pack.targets)
            values = [chosen.advantages[i] if token_advantages is None else token_advantages[i][o] for i, o in places]
            normal = table.log_softmax(-1)[before]
            terms = loss.tokens(
                normal.gather(-1, targets[:, None])[:, 0],
                behaviour=torch.tensor([step.old[i][o] for i, o in places], dtype=DTYPE),
                before=torch.tensor([step.proximal[i][o] for i, o in places], dtype=DTYPE),
                advantages=torch.tensor(values, dtype=DTYPE),
                reference=reference.log_softmax(-1)[before, targets] if loss.compares else None,
                entropy=-(normal.exp() * normal).sum(-1) if loss.entropy else None,
                sequences=torch.from_numpy(np.unique(pack.samples, return_inverse=True)[1]),
                pairs=torch.from_numpy(
                    np.unique([pairs[s] for s in pack.samples], axis=0, return_inverse=True)[1].reshape(-1)
                ),
            )
            value = (terms.total * torch.from_numpy(weights[pack.samples])).sum()
            value.backward()
            total += value.item()
    divisor = loss.aggregation.divisor(LossTotals(tokens, sequences))
    assert table.grad is not None
    return total / divisor, table.grad.numpy() / divisor


def cuts(chosen: Chosen, algorithm: Algorithm[Any]) -> Iterator[tuple[str, list[list[int]], dict[str, Any]]]:
    rng = np.random.default_rng(1)
    by_serial: dict[int, list[int]] = {}
    for i in chosen.indices:
        by_serial.setdefault(i // SIZE, []).append(i)
    groups = [by_serial[serial] for serial in rng.permutation(sorted(by_serial))]
    yield "one slot", [chosen.indices], {"layout": "separate", "budget": 4096}
    yield "a slot for each group, shuffled", groups, {"layout": "separate", "budget": 20}
    yield "shared prompts", [chosen.indices], {"layout": "shared-prompt", "budget": 30}
    if not algorithm.pairs:
        some = rng.permutation(chosen.indices).tolist()
        yield "samples in any order", [some[:7], some[7:8], some[8:]], {"layout": "separate", "budget": 16}


def options(**more: Any) -> dict[str, Any]:
    return {"clip": CLIP, **more}


AVERAGES: tuple[AggregationName, ...] = get_args(AggregationName)
DIVERGENCES: tuple[KlName, ...] = get_args(KlName)
KINDS, LEVELS = ("truncate", "mask"), ("token", "sequence", "geometric")
CORRECTIONS = [Correction(kind=kind, level=level, low=0.8, high=1.1) for kind in KINDS for level in LEVELS]

CASES: dict[str, tuple[Callable[[Padded, str], Tensor], Loss, AggregationName]] = {
    **{f"grpo, {how}": (grpo, Loss(**options()), how) for how in AVERAGES},
    **{f"cispo, {how}": (cispo, Loss(**options(algorithm=Cispo())), how) for how in AVERAGES},
    **{f"rloo, {how}": (leave_one_out, Loss(**options(algorithm=Grpo(estimator="rloo"))), how) for how in AVERAGES},
    **{f"dr. grpo, {how}": (dr_grpo, Loss(**options(algorithm=Grpo(estimator="dr-grpo"))), how) for how in AVERAGES},
    **{f"entropy, {how}": (entropy_bonus, Loss(**options(entropy=0.05)), how) for how in AVERAGES},
    **{f"dual clip, {how}": (
        partial(dual_clip, most=1.5), Loss(clip=replace(CLIP, dual=1.5)), how) for how in AVERAGES},
    **{f"kl in the loss, {name}, {how}": (
        partial(kl_in_loss, name=name), Loss(**options(kl=0.3, kl_name=name)), how)
        for name in DIVERGENCES for how in AVERAGES},
    **{f"decoupled, {each.kind} {each.level}, {how}": (
        partial(decoupled, correction=each), Loss(**options(old="recompute", correction=each)), how)
        for each in CORRECTIONS for how in AVERAGES},
    **{f"rejected by {each.level}, {how}": (
        partial(rejected, correction=each), Loss(**options(correction=each)), how)
        for each in CORRECTIONS if each.kind == "mask" for how in AVERAGES},
    "gspo": (gspo, Loss(**options(algorithm=Gspo())), "seq-mean-token-mean"),
    "dapo": (dapo, Loss(**options(algorithm=Dapo(
        DapoOptions(overlong_buffer=4, overlong_penalty=0.5), longest=LONGEST))), "token-mean"),
    "dapo, overlong filter": (partial(dapo, overlong_filter=True), Loss(**options(algorithm=Dapo(
        DapoOptions(overlong_buffer=4, overlong_penalty=0.5, overlong_filter=True), longest=LONGEST))), "token-mean"),
    **{f"kl in the reward, {how}": (kl_in_reward, Loss(**options(
        algorithm=Grpo(penalised=True), kl=0.3, kl_name="k1", penalised=True)), how) for how in AVERAGES},
    **{f"reinforce++, {how}": (partial(reinforce, discount=1.0, kl=0.2, baseline=False), Loss(**options(
        algorithm=ReinforcePlusPlus(penalised=True), kl=0.2, kl_name="k1", penalised=True)), how) for how in AVERAGES},
    **{f"reinforce++, discount and baseline, {how}": (
        partial(reinforce, discount=0.9, kl=0.0, baseline=True),
        Loss(**options(algorithm=ReinforcePlusPlus(ReinforceOptions(discount=0.9, baseline="group")))), how)
        for how in AVERAGES},
    "dpo": (dpo, Loss(algorithm=Dpo(DpoOptions(beta=0.3))), "seq-mean-token-sum"),
    "dpo, two pairs": (partial(dpo, most=2), Loss(algorithm=Dpo(DpoOptions(beta=0.3, pairs=2))),
                       "seq-mean-token-sum"),
    "ipo": (ipo, Loss(algorithm=Ipo(DpoOptions(beta=0.3))), "seq-mean-token-sum"),
}  # fmt: skip


def assert_as_in_the_paper(
    step: Step, loss: Loss, chosen: Chosen, expected_of: Callable[[Padded, str], Tensor], how: AggregationName
) -> None:
    loss = replace(loss, aggregation=Aggregation(name=how, horizon=LONGEST))
    whole = padded(step)
    expected = expected_of(whole, how)
    expected.backward()
    assert whole.table.grad is not None
    gradient = whole.table.grad.numpy()
    for what, slots, layout in cuts(chosen, loss.algorithm):
        got, slope = streamed(step, loss, slots, chosen, **layout)
        assert got == pytest.approx(expected.item(), rel=1e-6, abs=ROUNDED), what
        assert np.linalg.norm(slope - gradient) < 1e-6 * np.linalg.norm(gradient), what


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_paper_however_a_step_is_cut(name: str) -> None:
    expected_of, loss, how = CASES[name]
    step = step_of()
    assert_as_in_the_paper(step, loss, decided(step, loss.algorithm), expected_of, how)


@pytest.mark.parametrize("how", AVERAGES)
@pytest.mark.parametrize("chosen_by", ["best-worst", "best-random"])
def test_policy_filtration_keeps_the_best_and_others_of_a_prompt(chosen_by: Any, how: AggregationName) -> None:
    """Whatever the rewards of 0 and 1 of a whole batch are: the filter looks at one prompt."""
    rng = np.random.default_rng(4)
    step = replace(step_of(), rewards=np.concatenate([rng.permutation(SIZE) for _ in range(GROUPS)]).astype(float))
    algorithm = PfPpo(PfPpoOptions(filter=chosen_by, keep=2), seed=3)
    chosen = decided(step, algorithm)
    kept = torch.zeros(len(step.rewards), dtype=DTYPE)
    kept[chosen.indices] = 1
    beside = [step.rewards[i] for i in chosen.indices if step.rewards[i] < SIZE - 1]
    assert kept[torch.from_numpy(step.rewards == SIZE - 1)].all()
    assert kept.sum() == 2 * GROUPS
    assert len(beside) == GROUPS
    assert set(beside) == {0.0} if chosen_by == "best-worst" else len(set(beside)) > 1
    assert_as_in_the_paper(step, Loss(clip=CLIP, algorithm=algorithm), chosen, partial(filtered, kept=kept), how)
