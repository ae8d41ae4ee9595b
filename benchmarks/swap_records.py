"""Records of publications, transfers and swaps in the logs of a run. The functions are pure: text in, records out.

Invariant: a stall is assigned to the version whose swap ended it. The times of swaps back to an older version, for rows
of a lost rollout, are added to the next version that is new to the instance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

_LINE = re.compile(r"^(\S+Z) INFO \S+ (\S+): (.*)$", re.MULTILINE)
_VERSION = r"θ(\d+)(?:@\d+)?"
_PUBLISHED = re.compile(rf"weights {_VERSION}: part \d+ of \d+ published")
_PULLED = re.compile(rf"weights: {_VERSION}: (\d+) bytes in ([\d.]+) s")
_SWAPPED = re.compile(
    rf"swapped to {_VERSION} in ([\d.]+) s; in ([\d.]+) s since the last: stalled ([\d.]+) s, idle ([\d.]+) s"
)
_WORKER = re.compile(r"worker (\S+), pid (\d+)")


@dataclass(frozen=True, kw_only=True)
class VersionChange:
    """The change of one instance to one version.

    staged, swapped: unix seconds; transfer_s, swap_s: seconds of the transfer and of loading; since_s: seconds since
    the previous change, of which stall_s were without a running sequence because of weights, and idle_s for any reason.
    """

    version: int
    nbytes: int
    transfer_s: float
    staged: float
    swapped: float
    swap_s: float
    since_s: float
    stall_s: float
    idle_s: float


def published(driver_log: str) -> dict[int, float]:
    """Return the time of the first publication of each version."""
    found: dict[int, float] = {}
    for at, words in _lines(driver_log):
        if match := _PUBLISHED.match(words):
            found.setdefault(int(match[1]), at)
    return found


def changes(rollout_log: str) -> list[VersionChange]:
    """Return the changes of one instance in order, without the first load."""
    pulls: dict[int, tuple[float, int, float]] = {}
    found: list[VersionChange] = []
    newest, carried = -1, (0.0, 0.0, 0.0)
    for at, words in _lines(rollout_log):
        if match := _PULLED.match(words):
            pulls.setdefault(int(match[1]), (at, int(match[2]), float(match[3])))
        elif match := _SWAPPED.match(words):
            version, swap_s = int(match[1]), float(match[2])
            lap = tuple(float(match[group]) for group in (3, 4, 5))
            since_s, stall_s, idle_s = (old + new for old, new in zip(carried, lap, strict=True))
            carried = (since_s, stall_s, idle_s)
            if version <= newest:
                continue
            carried = (0.0, 0.0, 0.0)
            if newest >= 0:
                staged, nbytes, transfer_s = pulls[version]
                found.append(
                    VersionChange(
                        version=version,
                        nbytes=nbytes,
                        transfer_s=transfer_s,
                        staged=staged,
                        swapped=at,
                        swap_s=swap_s,
                        since_s=since_s,
                        stall_s=stall_s,
                        idle_s=idle_s,
                    )
                )
            newest = version
    return found


def worker_of(log: str) -> str:
    """Return the worker id of the last process that wrote to ``log``."""
    return str(_WORKER.findall(log)[-1][0])


def _lines(text: str) -> list[tuple[float, str]]:
    return [(datetime.fromisoformat(match[1]).timestamp(), match[3]) for match in _LINE.finditer(text)]
