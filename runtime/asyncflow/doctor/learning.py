"""Findings about learning: rewards, groups, log-probs, clipping, entropy, divergence, gradients, lengths.

They apply only to a model that is trained on its own responses. The responses of the simulated engine are artificial,
and the counting trainer has no loss, so such runs get none of these findings.
"""

from __future__ import annotations

import math
import statistics
from itertools import takewhile

from asyncflow.doctor.evidence import Evidence
from asyncflow.doctor.finding import Words, percent

RECENT = 10
"""Number of most recent steps that are examined."""
FEWEST = 5
"""Minimum number of steps for such a finding; fewer could be chance."""
EQUAL_GROUPS = 0.8
"""Share of samples without an advantage: above it four fifths of the generated tokens train nothing."""
SOLVED = 0.9
"""Share of the passing reward above which equal groups are regarded as groups with only right answers."""
GAP_GROWS, GAP_SEEN = 3.0, 0.05
"""Growth of the gap's 99th percentile from the first to the last third of the steps, and the minimum gap examined."""
GAP_LARGE = 0.2
"""Gap as large as the usual clip range: the ratio leaves the range before any training."""
CLIPPED, CLIP_WELL = 0.2, 0.1
"""Share of clipped tokens, and the recommended share. Usual runs have 0.001 to 0.1; a token is clipped only if the
update would move it further outside the range."""
ENTROPY_LEFT = 0.1
"""Remaining share of the initial entropy below which it has collapsed."""
KL_OF_STEP = 0.1
"""Divergence, in nats per token, of the trained policy from the sampling policy; usual runs have 0.0001 to 0.01."""
KL_OVER_TARGET = 3.0
NORM_GROWS = 10.0
"""Growth of the gradient's norm over its previous median, and over maxGradNorm."""
CUT = 0.3
"""Share of responses that maxTokens truncates."""
FEWEST_RESPONSES = 64
EFFECTIVE = 0.3
"""Effective share of the tokens under importance weights."""


def constant_reward(evidence: Evidence) -> Words | None:
    """Find a mean reward that has stopped changing, and is below the passing reward."""
    rewards = evidence.values("reward")
    same = list(takewhile(lambda reward: reward == rewards[-1], reversed(rewards)))
    if not evidence.learns or len(same) < FEWEST or rewards[-1] >= _passes(evidence):
        return None
    silent, of = evidence.values("silent_samples", len(same)), evidence.spec.algorithm.samples_per_step
    if silent and min(silent) < of:
        return None
    no_advantage = f", and all {of} samples of each step have the advantage 0" if silent else ""
    return Words(
        f"the reward is always {rewards[-1]:g}",
        f"the mean reward of each of the last {len(same)} steps (of {len(rewards)}) is {rewards[-1]:g}{no_advantage}: "
        "good and bad responses cannot be distinguished",
        f"compare responses with answers (asyncflow samples DIR): reward.function ({_functions(evidence)}) or its "
        "extractor does not fit them, or the prompts are too hard; at least one sample of a group of "
        f"{evidence.spec.algorithm.group_size} must get a different reward",
    )


def equal_groups(evidence: Evidence) -> Words | None:
    """Find groups whose samples have equal rewards although the task is not solved."""
    silent, rewards = evidence.values("silent_samples", RECENT), evidence.values("reward", RECENT)
    if not evidence.learns or len(silent) < FEWEST or constant_reward(evidence) is not None:
        return None
    of, equal = evidence.spec.algorithm.samples_per_step, statistics.median(silent)
    share, reward = equal / of, statistics.fmean(rewards)
    if share < EQUAL_GROUPS or reward >= SOLVED * _passes(evidence):
        return None
    size = evidence.spec.algorithm.group_size
    return Words(
        f"{percent(share)} of the samples are in groups with equal rewards",
        f"in the median of the last {len(silent)} steps {equal:.0f} of {of} samples have the advantage 0, at a mean "
        f"reward of {reward:.3g}: the gradient comes from {of - equal:.0f} samples",
        f"{_more_samples(reward, size)}exclude such groups (algorithm.filterZeroVariance: drop, which draws "
        f"{1 / max(1 - share, 1e-3):.1f} times as many), or use easier prompts",
    )


def logprob_gap(evidence: Evidence) -> Words | None:
    """Find log-probs of the engine that differ from those of the trainer."""
    thirds = evidence.thirds("logprob_gap_p99")
    if not evidence.learns or thirds is None:
        return None
    first, last = thirds
    grows = last > GAP_GROWS * first and last > GAP_SEEN
    if not grows and last <= GAP_LARGE:
        return None
    was = f"from {first:.3g} to {last:.3g}" if grows else f"{last:.3g}"
    return Words(
        "the log-probs of the engine drift away from the trainer's" if grows else "the log-probs of the engine are off",
        f"the 99th percentile of |engine - trainer| under the same weights is {was}: a token's ratio is off by a "
        f"factor of {math.exp(last):.2f} before anything is trained, and the clip range is "
        f"[{1 - evidence.spec.algorithm.clip.low:g}, {1 + evidence.spec.algorithm.clip.high:g}]",
        f"use one precision (rollout.engine.dtype: {evidence.spec.rollout.engine.dtype}, trainer.backend."
        f"precision: {evidence.spec.trainer.backend.precision}), check the engine's own kernels and "
        "asyncflow_rollout_probe_gap (a loaded model that is not the published one); until then use algorithm.old: "
        "recompute with algorithm.correction: {kind: truncate, high: 2}",
    )


def clip_fraction(evidence: Evidence) -> Words | None:
    """Find a large share of clipped ratios."""
    low, high = evidence.values("clip_low", RECENT), evidence.values("clip_high", RECENT)
    if not evidence.learns or min(len(low), len(high)) < FEWEST:
        return None
    below, above = statistics.fmean(low), statistics.fmean(high)
    if (share := below + above) < CLIPPED:
        return None
    algorithm, by = evidence.spec.algorithm, CLIP_WELL / share
    updates = algorithm.epochs * algorithm.mini_batches
    fewer = f", or fewer updates a step than {updates} (epochs, miniBatches)" if updates > 1 else ""
    return Words(
        f"{percent(share)} of the tokens are clipped",
        f"in the last {len(low)} steps {percent(below)} of the ratios were clipped below and {percent(above)} above: "
        "within a step the policy moves further than the clip range allows",
        f"algorithm.learningRate from {algorithm.learning_rate:g} to about {algorithm.learning_rate * by:.1g} "
        f"(x {CLIP_WELL:g} / {share:.2g}){fewer}{_fresher(evidence, ', or ')}",
    )


def entropy_collapse(evidence: Evidence) -> Words | None:
    """Find a policy whose entropy has collapsed without a rising reward."""
    name = "entropy" if any(evidence.values("entropy")) else "surprise"
    thirds, rewards = evidence.thirds(name), evidence.thirds("reward")
    if not evidence.learns or thirds is None or rewards is None or not thirds[0] > 0:
        return None
    (first, last), (before, now) = thirds, rewards
    if last > ENTROPY_LEFT * first or now > before + 0.02 * abs(before) or now >= SOLVED * _passes(evidence):
        return None
    what = "mean entropy" if name == "entropy" else "mean negative log-prob"
    bonus = evidence.spec.algorithm.entropy
    return Words(
        "the entropy has collapsed, and the reward has not risen",
        f"the {what} of a token fell from {first:.3g} to {last:.3g} nats ({percent(last / first)} of it is left), and "
        f"the reward went from {before:.3g} to {now:.3g}: responses of a group are alike, without exploration",
        f"restart from an earlier checkpoint with a third of the learning rate "
        f"({evidence.spec.algorithm.learning_rate / 3:.1g}) and algorithm.entropy: {max(1e-3, 3 * bonus):g}",
    )


def kl_runaway(evidence: Evidence) -> Words | None:
    """Find a policy that diverges from the sampling policy, or from the reference."""
    recent, algorithm = evidence.values("approx_kl", FEWEST), evidence.spec.algorithm
    if not evidence.learns or len(recent) < FEWEST:
        return None
    step, target = statistics.median(recent), algorithm.kl.target
    if step > KL_OF_STEP:
        return Words(
            "the policy diverges from the sampling policy",
            f"their KL divergence is {step:.3g} nats a token in the median of the last {FEWEST} steps; more than "
            f"{KL_OF_STEP:g} is a lot: gradients come from samples that the policy would no longer generate",
            f"algorithm.learningRate from {algorithm.learning_rate:g} to about "
            f"{algorithm.learning_rate * math.sqrt(KL_OF_STEP / 10 / step):.1g} (the divergence grows with its "
            f"square){_fresher(evidence, ', and ')}",
        )
    distances = evidence.values("penalty_kl" if algorithm.kl.place == "reward" else "kl", FEWEST)
    if (
        target is None
        or len(distances) < FEWEST
        or (far := statistics.median(distances)) <= KL_OVER_TARGET * target.value
    ):
        return None
    coefficient = algorithm.kl.coefficient
    return Words(
        "the policy diverges from the reference",
        f"the KL divergence is {far:.3g} nats a token in the median of the last {FEWEST} steps, "
        f"{far / target.value:.1f} times algorithm.kl.target.value ({target.value:g})",
        f"start with algorithm.kl.coefficient: {coefficient * far / target.value:.2g} instead of {coefficient:g}, or "
        f"use a horizon below {algorithm.kl.target.horizon if algorithm.kl.target else 0:g}",
    )


def gradient_norm(evidence: Evidence) -> Words | None:
    """Find a norm of the gradient that has exploded, and remains large."""
    norms = evidence.values("grad_norm")
    if not evidence.learns or len(norms) < 3 * FEWEST:
        return None
    before, now = statistics.median(norms[:-FEWEST]), statistics.median(norms[-FEWEST:])
    most = evidence.spec.algorithm.max_grad_norm
    if now <= NORM_GROWS * before or now <= NORM_GROWS * most:
        return None
    clipped = (
        f", and is clipped to {most:g}, so a step moves in the direction of its largest terms only" if most else ""
    )
    return Words(
        "the gradient explodes",
        f"its norm is {now:.3g} in the median of the last {FEWEST} steps, {now / max(before, 1e-9):.0f} times that of "
        f"the previous steps ({before:.3g}){clipped}",
        f"restart from an earlier checkpoint with a third of the learning rate "
        f"({evidence.spec.algorithm.learning_rate / 3:.1g})" + ("" if most else " and algorithm.maxGradNorm: 1"),
    )


def skipped_steps(evidence: Evidence) -> Words | None:
    """Find steps whose gradient was not finite."""
    skipped = [int(step["step"]) for step in evidence.steps if step.get("skipped")]
    if not skipped:
        return None
    named = ", ".join(map(str, skipped[:5])) + (", ..." if len(skipped) > 5 else "")
    return Words(
        f"{len(skipped)} of {len(evidence.steps)} steps did not update the weights",
        f"the gradient of step {named} was not finite, so the update was skipped: their "
        f"{len(skipped) * evidence.spec.algorithm.samples_per_step} samples were not trained",
        f"algorithm.learningRate from {evidence.spec.algorithm.learning_rate:g} to a third of it, "
        f"algorithm.maxGradNorm: 1 if it is off ({evidence.spec.algorithm.max_grad_norm:g} now), and float32 "
        f"instead of {evidence.spec.trainer.backend.precision}",
    )


def cut_responses(evidence: Evidence) -> Words | None:
    """Find responses that are truncated at maxTokens."""
    ended = {
        name: count
        for life in evidence.lives.values()
        for name, count in life.figures.items()
        if life.role == "rollout" and name.startswith("sequences_total")
    }
    counts = {name: evidence.figure("rollout", name) for name in ended}
    whole, cut = sum(counts.values()), counts.get("sequences_total{length}", 0.0)
    if not evidence.learns or whole < FEWEST_RESPONSES or cut / whole < CUT:
        return None
    most = evidence.spec.sampling.max_tokens
    return Words(
        f"{percent(cut / whole)} of the responses are truncated",
        f"{cut:.0f} of {whole:.0f} responses reached sampling.maxTokens ({most}) before they were complete: their "
        "reward is that of an incomplete response",
        f"sampling.maxTokens: {2 * most}, at twice the memory of a slot's cache; or train shorter responses (the "
        "reward component length)",
    )


def few_effective(evidence: Evidence) -> Words | None:
    """Find importance weights that leave only a small share of the tokens effective."""
    shares = evidence.values("correction_ess", RECENT)
    if len(shares) < FEWEST or (share := statistics.median(shares)) >= EFFECTIVE:
        return None
    correction = evidence.spec.algorithm.correction
    masks = correction is not None and correction.kind == "mask"
    bounds = "wider bounds (algorithm.correction)" if masks else "a smaller bound (algorithm.correction.high)"
    return Words(
        f"importance weights leave {percent(share)} of the tokens effective",
        f"(Σw)² / (n Σw²) is {share:.2g} in the median of the last {len(shares)} steps: the variance of the gradient "
        f"is that of {percent(share)} of the samples",
        f"{fresher}, or {bounds}" if (fresher := _fresher(evidence, "")) else bounds,
    )


def _fresher(evidence: Evidence, word: str) -> str:
    """Return the advice for fresher samples, after ``word``; "" if all samples are fresh."""
    schedule = evidence.spec.schedule
    if not schedule.lag:
        return ""
    if schedule.swap_at != "quota" and schedule.max_staleness > schedule.sync_every:
        return f"{word}schedule.maxStaleness below {schedule.max_staleness}"
    if schedule.sync_every > 1:
        return f"{word}schedule.syncEvery and maxStaleness below {schedule.sync_every}"
    return f"{word}schedule: {{mode: sync}}"


def _passes(evidence: Evidence) -> float:
    """Return the reward of a right response."""
    return evidence.spec.evaluation.pass_reward if evidence.spec.evaluation is not None else 1.0


def _functions(evidence: Evidence) -> str:
    return ", ".join(part.function for part in evidence.spec.reward.parts)


def _more_samples(right: float, size: int) -> str:
    """Return the advice for a larger group, for rewards of 0 and 1: p^n + (1 - p)^n of the groups are equal by chance.

    It is "" if a larger group would not help: few groups of this size are equal by chance, so the cause is different.
    """

    def alike(samples: int) -> float:
        return right**samples + (1 - right) ** samples

    if not 0.0 < right < 1.0 or alike(size) <= 0.5:
        return ""
    for samples in range(size + 1, 8 * size + 1):
        if alike(samples) <= 0.5:
            return (
                f"algorithm.groupSize {samples} instead of {size} (at {right:.2g} right answers "
                f"{percent(alike(samples))} instead of {percent(alike(size))} of independent groups are equal), "
            )
    return ""
