"""Numbers as people read them. Pure; an absent number is a dash."""

from __future__ import annotations

from collections.abc import Mapping

from asyncflow.api.status import DriverStatus, SetState

ABSENT = "–"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def duration(seconds: float | None) -> str:
    """Return seconds as ``45s``, ``2m13s``, ``3h07m`` or ``2d04h``."""
    if seconds is None:
        return ABSENT
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"


def amount(number: float | None, unit: str = "") -> str:
    """Return a number in about three digits: ``7``, ``0.31``, ``12.4k``, ``3.10M``."""
    if number is None:
        return ABSENT
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{suffix}{unit}"
    text = f"{number:.0f}" if number == int(number) or abs(number) >= 100 else f"{number:.3g}"
    return f"{text}{unit}"


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
