"""The base class of algorithms. Each algorithm is one small class in its own file, found by name as an entry point.

    driver   rewards of one group -> shaped rewards -> excluded samples, with the reason -> one advantage per sample
    trainer  with ``whole_step``: all samples of D_k -> one advantage per token (``credit``)
             tokens of a pack -> policy loss per token (``policy``); ``Loss`` adds correction, KL, entropy, and averages

Class attributes declare everything that an algorithm needs, so driver, queue and trainer read them and never test the
algorithm's name.

Invariants: methods keep no state, so repeated calls return the same result. This module does not import torch; it only
uses methods of the tensors passed to ``policy``. The driver's decisions about a group depend on that group alone. The
result of ``policy`` for a token depends on the token's response alone, or with ``pairs`` on its pair. Only ``credit``
sees all of D_k.
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
"""Name of the entry point group."""
OUTCOME: Final = "outcome"
"""The column that replaces ``advantage`` if the trainer computes advantages: the reward to compute them from."""
_FEWEST_SHUFFLED: Final = 2
_DEFAULTS: Final = AlgorithmSpec(steps=1)
NAME: Final = "spec.algorithm.name"
OPTIONS: Final = "spec.algorithm.options"


class Group(NamedTuple):
    """The n samples of one prompt that have a reward.

    serial: the prompt's serial.
    samples: number of each sample in the group, int64[n].
    rewards: rewards before shaping, float64[n].
    lengths: tokens of each response, including observations, int64[n].
    cut: whether the response was truncated because it was too long, bool[n].
    turns: rewards of the turns of each sample, float64[turns], whose sum is the sample's reward; () if not needed.
    """

    serial: int
    samples: NDArray[np.int64]
    rewards: NDArray[np.float64]
    lengths: NDArray[np.int64]
    cut: NDArray[np.bool_]
    turns: Sequence[NDArray[np.float64]] = ()

    def permuted(self, order: NDArray[np.int64]) -> Group:
        """Return the group with rewards, lengths and cuts reordered by the sample indices ``order`` [n]."""
        return self._replace(rewards=self.rewards[order], lengths=self.lengths[order], cut=self.cut[order])


class Tokens(NamedTuple):
    """N tokens of a pack that count in the loss, each field [N]; only ``logprobs`` has a gradient.

    old: log-probs under the old policy.
    advantages: advantage of each token, or of its sample.
    sequences: number of the token's response, int64, each below N.
    reference: log-probs under θ_0, None if not needed.
    pairs: number of the token's pair, int64, each below N; None without ``pairs``.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    sequences: Tensor
    reference: Tensor | None = None
    pairs: Tensor | None = None

    def summed(self, values: Tensor) -> Tensor:
        """Return for each token the sum of ``values`` over the tokens of its response, [N]."""
        return values.new_zeros(len(values)).index_add(0, self.sequences, values)[self.sequences]

    def lengths(self) -> Tensor:
        """Return for each token the number of tokens in its response, [N]."""
        return self.summed(self.old.new_ones(len(self.old)))


class StepSamples(NamedTuple):
    """The n samples of D_k that one rank has, with N response tokens in consecutive order.

    serials, samples: keys of the samples, int64[n].
    rewards: shaped rewards, float64[n].
    offsets: start of each sample's tokens, and the end of the last, int64[n + 1].
    counted: whether the policy chose the token, bool[N].
    penalty: KL of each token from the reference times the coefficient, float64[N]; 0 if the KL is not in the reward.
    """

    serials: NDArray[np.int64]
    samples: NDArray[np.int64]
    rewards: NDArray[np.float64]
    offsets: NDArray[np.int64]
    counted: NDArray[np.bool_]
    penalty: NDArray[np.float64]

    @property
    def of_token(self) -> NDArray[np.int64]:
        """The index of each token's sample, int64[N]."""
        return np.repeat(np.arange(len(self.serials)), np.diff(self.offsets))

    def summed(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each sample the sum of ``values`` [N] over its counted tokens, float64[n]."""
        weights = np.where(self.counted, values, 0.0)
        sums = np.bincount(self.of_token, weights=weights, minlength=len(self.serials))
        return sums.astype(np.float64)


AllGather = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Collective: concatenates the arrays [m, columns] of all ranks into one; m may differ between ranks."""
Own = TypeVar("Own", bound=Struct)


class Algorithm(Generic[Own]):
    """The base of all algorithms: the clipped policy gradient with advantages relative to the group.

    Options: structure of ``spec.algorithm.options``; each field has a default.
    min_samples: number of samples with a reward that a group needs to be trained.
    batch_wide: the advantages need all of D_k. This sets ``whole_step``: the trainer waits for all samples of a step,
        and the driver passes it shaped rewards in place of advantages.
    filters: the algorithm may exclude samples of a group that still count in the comparison with the other samples.
    reference: the algorithm needs log-probs under θ_0 even without a KL term.
    critic: the algorithm needs values.
    pairs: two samples of a group with the same |advantage| are a pair with a joint loss, kept together in one pack.
    ignores: fields of ``spec.algorithm`` that the algorithm does not use; setting one is refused.
    figures: names of the values that ``policy`` measures.
    """

    Options: ClassVar[type[Struct]] = NoOptions
    min_samples: ClassVar[int] = 2
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
        """Create an algorithm from its options and settings of the job.

        estimator: advantage within a group; longest: most tokens of a response; seed: the job's seed; penalised:
        whether the KL from the reference is in the reward; by_turn: whether each turn of a sample has its own
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
        """The column that the driver writes: ``outcome`` if the trainer computes advantages, else ``advantage``."""
        return OUTCOME if self.whole_step or self.critic else "advantage"

    @property
    def compares(self) -> bool:
        """True if a sample's advantage is relative to the other samples of its group."""
        return self.min_samples > 1

    def problems(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Yield the fields of a manifest that conflict with this algorithm; subclasses add their own checks."""
        name = spec.algorithm.name
        if spec.algorithm.group_size < self.min_samples:
            why = f"{name} compares the samples of a group, and needs at least {self.min_samples}"
            yield field_problem(spec, "algorithm.group_size", why, f"Set groupSize to at least {self.min_samples}")
        if spec.algorithm.group_size == 1 and spec.algorithm.filter_zero_variance == "drop":
            why = "the reward of a single sample has no variance, so every group would be dropped"
            yield field_problem(
                spec, "algorithm.filter_zero_variance", why, "Set it to keep, or groupSize to at least 2"
            )
        if self.whole_step and spec.schedule.mode == "periodic":
            why = "the advantages need all samples of a step, and the mode periodic trains them as they arrive"
            yield field_problem(spec, "schedule.mode", why, "Set mode: sync or async")
        if spec.reward.shuffle and spec.algorithm.group_size < _FEWEST_SHUFFLED:
            why = "rewards are permuted within a group, and a group of 1 has one order"
            yield field_problem(spec, "reward.shuffle", why, "Set groupSize to at least 2")
        if spec.algorithm.credit == "turn":
            yield from self._problems_of_turns(spec)
        if spec.trainer.external:
            yield from self._problems_of_external_trainer(spec)
        for field in self.ignores:
            if attrgetter(field)(spec.algorithm) != attrgetter(field)(_DEFAULTS):
                yield field_problem(spec, f"algorithm.{field}", f"{name} does not use it", "Leave it out")
        if spec.critic is not None and not self.critic:
            fix = "Leave it out, or set algorithm.name: ppo"
            yield Problem(place=("spec", "critic"), reason=f"{name} has no critic", fix=fix)
        if self.filters and spec.algorithm.kl.place == "reward":
            why = f"{name} leaves out samples of a group before the trainer adds the KL to its rewards"
            yield field_problem(spec, "algorithm.kl.place", why, "Set place: loss")

    def _problems_of_turns(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Yield the reason why turns cannot have their own advantages, if there is one."""
        why = None
        if spec.environment is None:
            why = "without an environment a sample has one turn"
        elif self.writes == OUTCOME or self.pairs:
            why = f"{spec.algorithm.name} computes its advantages from the rewards of whole samples"
        elif spec.trainer.external:
            why = "an external trainer receives one advantage per sample"
        elif spec.reward.shuffle:
            why = "rewards are permuted between samples, which may differ in their number of turns"
        if why is not None:
            yield field_problem(spec, "algorithm.credit", why, "Set credit: sample")

    def _problems_of_external_trainer(self, spec: RLJobSpec) -> Iterator[Problem]:
        """Yield the fields of the algorithm that an external trainer cannot follow."""
        why = "the advantages are then computed by the job's own trainer, and trainer.external is true"
        if self.batch_wide or self.critic:
            yield field_problem(spec, "algorithm.name", why, "Set grpo, and compute them in your loop")
        elif self.whole_step:
            yield field_problem(spec, "algorithm.kl.place", why, "Set place: loss")
        for field in ("epochs", "mini_batches"):
            if getattr(spec.algorithm, field) > 1:
                own = "an external trainer makes its updates itself"
                yield field_problem(spec, f"algorithm.{field}", own, "Leave it at 1")

    def shaped(self, group: Group) -> NDArray[np.float64]:
        """Return the shaped rewards, float64[n]; groups are filtered by the rewards before shaping."""
        return group.rewards

    def excluded(self, group: Group) -> Mapping[int, str]:  # noqa: ARG002
        """Return the indices of samples to exclude from training, with a reason that starts with ``filtered``."""
        return {}

    def advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return one advantage for each sample of a group, float32[n], from the shaped rewards [n]."""
        return group_advantages(rewards, name=self.estimator)

    def turn_advantages(self, group: Group, shaped: NDArray[np.float64]) -> list[NDArray[np.float32]]:
        """Return the advantages of each sample's turns, float32[turns]; shaping changes the reward of the last turn."""
        rewards = [turns.copy() for turns in group.turns]
        for turns, change in zip(rewards, shaped - group.rewards, strict=True):
            turns[-1] += change
        return turn_advantages(rewards, compare=self.advantages)

    def credit(self, step: StepSamples, all_gather: AllGather) -> NDArray[np.float32]:
        """Return the advantage of each token, float32[N], if ``whole_step``. Collective.

        By default a token has the advantage of its sample, after the penalties of the tokens are subtracted from the
        sample's reward.
        """
        net = step.rewards - step.summed(step.penalty)
        table = all_gather(np.column_stack([step.serials, step.samples, net]).reshape(-1, 3))
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        found = np.zeros(len(net), np.float32)
        for serial in np.unique(step.serials):
            group = table[table[:, 0] == serial]
            own_rows = step.serials == serial
            if len(group) >= self.min_samples:
                advantages = self.advantages(group[:, 2])
                found[own_rows] = advantages[np.searchsorted(group[:, 1], step.samples[own_rows])]
        return found[step.of_token]

    def policy(self, tokens: Tokens, clip: Clip) -> PolicyTerms:
        """Return the policy loss of each token, and the measured figures."""
        return ppo_clip(tokens.logprobs, tokens.old, tokens.advantages, clip)


def field_problem(spec: RLJobSpec, field: str, why: str, fix: str) -> Problem:
    """Return the problem with a field of ``spec``, named by its dotted attributes."""
    value = attrgetter(field)(spec)
    return Problem(place=("spec", *place_of(field)), value=value, reason=why, fix=fix)


def algorithm_of(spec: RLJobSpec) -> Algorithm[Any]:
    """Return the algorithm that a manifest names, with the manifest's options and settings.

    Raises ManifestError if no algorithm of that name is installed, if it does not know one of the options, or if other
    fields of the manifest conflict with it.
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
