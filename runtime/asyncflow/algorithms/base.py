"""An algorithm: one small class in a file of its own, which a manifest names and an entry point finds.

    driver   group of one prompt -> rewards shaped -> samples that go no further, and why -> one advantage a sample
    trainer  with ``whole_step``: all samples of D_k -> one advantage a token (``credit``)
             tokens of a pack -> policy loss of each (``policy``); ``Loss`` adds correction, KL, entropy, and averages

Everything that it needs is said by its class attributes, so that driver, queue and trainer ask it instead of its name.

Invariants: no method keeps state, so that whoever asks, and however often, gets the same; nothing here loads torch,
whose tensors have the methods that ``policy`` needs. What the driver decides of a group depends on that group alone,
and what ``policy`` computes of a token on its own response alone, or with ``pairs`` on its pair; only ``credit`` sees
all of D_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from asyncflow.algorithms.advantages import AdvantageName, group_advantages, turn_advantages
from asyncflow.algorithms.losses import Clip, PolicyTerms, ppo_clip
from asyncflow.api.check import Problem, place_of, refusal
from asyncflow.api.job import RLJobSpec
from asyncflow.api.learning import AlgorithmSpec
from asyncflow.plugins import NoOptions, load_plugin, read_options

if TYPE_CHECKING:
    from torch import Tensor

ALGORITHMS: Final = "asyncflow.algorithms"
"""The group of entry points."""
OUTCOME: Final = "outcome"
"""The column in the place of ``advantage`` where the trainer makes advantages: the reward that they are made of."""
_FEWEST_SHUFFLED: Final = 2
_DEFAULTS: Final = AlgorithmSpec(steps=1)
NAME: Final = "spec.algorithm.name"
OPTIONS: Final = "spec.algorithm.options"


class Group(NamedTuple):
    """The n samples of one prompt that have a reward.

    serial: of the prompt; samples: number of each in the group, int64[n]; rewards: as they were judged, float64[n];
    lengths: tokens of each response, observations too, int64[n]; cut: whether a response ended because it was too long,
    bool[n]; turns: the rewards of the turns of each, float64[turns], which add up to the sample's; () where nobody asks
    for them.
    """

    serial: int
    samples: NDArray[np.int64]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]
    cut: NDArray[np.bool_]
    turns: Sequence[NDArray[np.float64]] = ()

    def permuted(self, order: NDArray[np.int64]) -> Group:
        """Return the group as if each sample had been judged for another one, by their indices [n]."""
        return self._replace(rewards=self.rewards[order], lengths=self.lengths[order], cut=self.cut[order])


class Tokens(NamedTuple):
    """N target tokens of a pack, each field [N]; only ``logprobs`` has a gradient.

    old: log-probs under the old policy; advantages: of each token, or its sample; counted: 1 where the token counts in
    the loss, else 0; sequences: number of the response that it belongs to, int64, each below N; reference: log-probs
    under θ_0, None where nothing needs them; pairs: number of its pair, int64, each below N, None without ``pairs``.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    counted: Tensor
    sequences: Tensor
    reference: Tensor | None = None
    pairs: Tensor | None = None

    def summed(self, values: Tensor) -> Tensor:
        """Return for each token the sum of ``values`` over the counted tokens of its response, [N]."""
        return values.new_zeros(len(values)).index_add(0, self.sequences, values * self.counted)[self.sequences]

    def lengths(self) -> Tensor:
        """Return for each token how many tokens of its response count, at least 1, [N]."""
        return self.summed(self.counted).clamp(min=1)


class StepSamples(NamedTuple):
    """The samples of D_k that one rank has: n of them, with N response tokens one after another.

    serials, samples: their keys, int64[n]; rewards: float64[n], shaped; offsets: where the tokens of each begin, and
    the end, int64[n + 1]; counted: tokens that the policy chose, bool[N]; penalty: what each token costs, its KL from
    the reference times the coefficient, float64[N], 0 where the KL is not in the reward.
    """

    serials: NDArray[np.int64]
    samples: NDArray[np.int64]
    rewards: NDArray[np.float64]
    offsets: NDArray[np.int64]
    counted: NDArray[np.bool_]
    penalty: NDArray[np.float64]

    @property
    def of_token(self) -> NDArray[np.int64]:
        """The index of the sample that each token belongs to, int64[N]."""
        return np.repeat(np.arange(len(self.serials)), np.diff(self.offsets))

    def summed(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each sample the sum of ``values`` [N] over its counted tokens, float64[n]."""
        weights = np.where(self.counted, values, 0.0)
        sums = np.bincount(self.of_token, weights=weights, minlength=len(self.serials))
        return sums.astype(np.float64)


Everywhere = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Gathers an array [m, columns] of every rank, whose m differ, into one; collective."""
Own = TypeVar("Own", bound=Struct)


class Algorithm(Generic[Own]):
    """The base of all algorithms: the clipped policy gradient with advantages relative to the group.

    Options: shape of ``spec.algorithm.options``, each field with a default. fewest: samples with a reward that a group
    needs to go further. whole_step: its advantages need all of D_k, so that the trainer cannot begin before (the driver
    then hands on the shaped rewards in their place). filters: a group may lose samples that others are compared with.
    reference: it needs the log-probs of θ_0 whatever the KL. critic: it needs values. pairs: the samples of a group
    with the same |advantage| are one pair, whose loss is of both, so they stay together in one pack. ignores: fields of
    ``spec.algorithm`` that it does not use, which are refused where they are given. figures: names of what ``policy``
    measures.
    """

    Options: ClassVar[type[Struct]] = NoOptions
    fewest: ClassVar[int] = 2
    batch_wide: ClassVar[bool] = False
    filters: ClassVar[bool] = False
    reference: ClassVar[bool] = False
    critic: ClassVar[bool] = False
    pairs: ClassVar[bool] = False
    ignores: ClassVar[tuple[str, ...]] = ()
    figures: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        options: Own | None = None,
        *,
        estimator: AdvantageName = "grpo",
        longest: int = 0,
        seed: int = 0,
        penalised: bool = False,
        by_turn: bool = False,
    ) -> None:
        """Make one. estimator: the advantage within a group; longest: most tokens of a response; seed: of the job;
        penalised: whether the KL from the reference is in the reward; by_turn: whether each turn of a sample has an
        advantage.
        """
        self.options: Own = options if options is not None else self.Options()  # type: ignore[assignment]
        self.estimator = estimator
        self.by_turn = by_turn
        self.longest = longest
        self.seed = seed
        self.whole_step = self.batch_wide or penalised

    @property
    def writes(self) -> str:
        """Column that the driver writes: ``advantage``, or ``outcome`` where the trainer makes advantages of it."""
        return OUTCOME if self.whole_step or self.critic else "advantage"

    @property
    def compares(self) -> bool:
        """True where what a sample earns is relative to the others of its group."""
        return self.fewest > 1

    def problems(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Yield what in a manifest cannot be with this algorithm; an algorithm adds its own demands."""
        name = spec.algorithm.name
        if spec.algorithm.group_size < self.fewest:
            why = f"{name} compares a sample with the others of its group, and needs {self.fewest}"
            yield wrong(spec, "algorithm.group_size", why, f"Give at least {self.fewest}")
        if spec.algorithm.group_size == 1 and spec.algorithm.filter_zero_variance == "drop":
            why = "a sample alone never varies, so that every group would be dropped"
            yield wrong(spec, "algorithm.filter_zero_variance", why, "Give keep, or a groupSize of at least 2")
        if self.whole_step and spec.schedule.mode == "periodic":
            why = "the advantages need all samples of a step, and the mode periodic trains them as they arrive"
            yield wrong(spec, "schedule.mode", why, "Give mode: sync or async")
        if spec.reward.shuffle and spec.algorithm.group_size < _FEWEST_SHUFFLED:
            why = "rewards are permuted within a group, and a group of 1 has one order"
            yield wrong(spec, "reward.shuffle", why, "Give a groupSize of at least 2")
        if spec.algorithm.credit == "turn":
            yield from self._problems_of_turns(spec)
        for field in self.ignores:
            if attrgetter(field)(spec.algorithm) != attrgetter(field)(_DEFAULTS):
                yield wrong(spec, f"algorithm.{field}", f"{name} does not use it", "Leave it out")
        if spec.critic is not None and not self.critic:
            fix = "Leave it out, or take the algorithm ppo"
            yield Problem(place=("spec", "critic"), reason=f"{name} has no critic", fix=fix)
        if self.filters and spec.algorithm.kl.place == "reward":
            why = f"{name} leaves out samples of a group before the trainer adds the KL to its rewards"
            yield wrong(spec, "algorithm.kl.place", why, "Give place: loss")

    def _problems_of_turns(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Yield what keeps turns from having advantages of their own."""
        why = None
        if spec.environment is None:
            why = "without an environment a sample has one turn"
        elif self.writes == OUTCOME or self.pairs:
            why = f"{spec.algorithm.name} makes its advantages of the rewards of whole samples"
        elif spec.trainer.external:
            why = "a trainer of one's own is handed one advantage a sample"
        elif spec.reward.shuffle:
            why = "rewards are permuted by the sample, and samples have turns of their own"
        if why is not None:
            yield wrong(spec, "algorithm.credit", why, "Give credit: sample")

    def shaped(self, group: Group) -> NDArray[np.float64]:
        """Return the rewards that count, float64[n]; groups are filtered by those that were judged."""
        return group.rewards

    def excluded(self, group: Group) -> Mapping[int, str]:  # noqa: ARG002
        """Return the indices of samples that the trainer shall not see, with the reason, which begins ``filtered``."""
        return {}

    def advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return one advantage for each sample of a group, float32[n], out of the shaped rewards [n]."""
        return group_advantages(rewards, name=self.estimator)

    def turn_advantages(self, group: Group, shaped: NDArray[np.float64]) -> list[NDArray[np.float32]]:
        """Return the advantages of the turns of each sample, float32[turns]; shaping goes with the last turn."""
        rewards = [turns.copy() for turns in group.turns]
        for turns, change in zip(rewards, shaped - group.rewards, strict=True):
            turns[-1] += change
        return turn_advantages(rewards, compare=self.advantages)

    def credit(self, step: StepSamples, everywhere: Everywhere) -> NDArray[np.float32]:
        """Return the advantage of each token, float32[N]: what ``whole_step`` is for. Collective.

        Here that of its sample, whose reward is less by the penalties of its tokens.
        """
        net = step.rewards - step.summed(step.penalty)
        own = np.column_stack([step.serials, step.samples, net]).reshape(-1, 3)
        table = everywhere(own)
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        found = np.zeros(len(net), np.float32)
        for serial in np.unique(step.serials):
            group = table[table[:, 0] == serial]
            mine = step.serials == serial
            if len(group) >= self.fewest:
                advantages = self.advantages(group[:, 2])
                found[mine] = advantages[np.searchsorted(group[:, 1], step.samples[mine])]
        return found[step.of_token]

    def policy(self, tokens: Tokens, clip: Clip) -> PolicyTerms:
        """Return the policy loss of each token, and what is measured of it."""
        return ppo_clip(tokens.logprobs, tokens.old, tokens.advantages, clip)


def wrong(spec: RLJobSpec, field: str, why: str, fix: str) -> Problem:
    """Return the problem with a field of ``spec``, by its dotted attributes."""
    value = attrgetter(field)(spec)
    return Problem(place=("spec", *place_of(field)), value=value, reason=why, fix=fix)


def algorithm_of(spec: RLJobSpec) -> Algorithm[Any]:
    """Return the algorithm that a manifest names, as it is asked for there.

    Raises ManifestError where none is installed by that name, for options that it does not know, and with everything
    in the manifest that cannot be with it.
    """
    chosen = spec.algorithm
    kind = load_plugin(ALGORITHMS, chosen.name, kind=Algorithm, where=NAME)
    algorithm: Algorithm[Any] = kind(
        read_options(chosen.options, kind.Options, where=OPTIONS),
        estimator=chosen.advantage,
        longest=spec.sampling.max_tokens,
        seed=chosen.seed,
        penalised=chosen.kl.place == "reward" and chosen.kl.coefficient > 0,
        by_turn=chosen.credit == "turn",
    )
    if problems := list(algorithm.problems(spec)):
        raise refusal(problems, source=f"the algorithm {chosen.name}")
    return algorithm
