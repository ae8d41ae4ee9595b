"""Numbers as people read them. Pure; an absent number is a dash."""

from __future__ import annotations

from collections.abc import Mapping

from asyncflow.api.status import DriverStatus, SetState
from asyncflow.plan.describe import ABSENT


def amount(number: float | None) -> str:
    """Return a number in about three digits: ``7``, ``0.31``, ``12.4k``, ``3.10M``."""
    if number is None:
        return ABSENT
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}" if number == int(number) or abs(number) >= 100 else f"{number:.3g}"


def failures(counts: Mapping[str, int]) -> str:
    """Return counts by what failed, the most frequent first: ``12 raised, 3 timeout``; ``none`` without any."""
    by_count = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {failure}" for failure, count in by_count) or "none"


def share(part: float | None) -> str:
    """Return a share of one in percent."""
    return ABSENT if part is None else f"{100 * part:.0f}%"


def evaluated(status: DriverStatus) -> list[str]:
    """Return the results of the last evaluation: a line for the main set, and one for each set that has a name."""
    main = SetState(
        accuracy=status.eval or 0.0,
        greedy=status.eval_greedy,
        reward=status.eval_reward,
        pass_at=status.eval_pass_at,
    )
    return [_set_result(main), *(f"{name}: {_set_result(each)}" for name, each in status.eval_sets.items())]


def _set_result(result: SetState) -> str:
    reward = "" if result.reward in (None, result.accuracy) else f"  reward {score(result.reward)}"
    chances = "".join(f"  pass@{k} {score(passing)}" for k, passing in result.pass_at.items())
    return f"accuracy {score(result.accuracy)}  greedy {score(result.greedy)}{reward}{chances}"


def score(value: float | None) -> str:
    """Return a reward or an accuracy with three decimals."""
    return ABSENT if value is None else f"{value:.3f}"
