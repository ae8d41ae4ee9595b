"""Whether this process may use processor time that others leave idle.

Invariant: it does not where that is taken from itself: on a single core, or out of a quota, which once used up stops
the whole container (``resources.limits.cpu`` of a pod, ``CPUQuota`` of a service).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

BUSY_WAIT_ENV: Final = "ASYNCFLOW_BUSY_WAIT"
"""Variable that has this process never use such time where it is ``off``."""
_CGROUPS: Final = Path("/sys/fs/cgroup")
_MINE: Final = Path("/proc/self/cgroup")
_NO_QUOTA: Final = frozenset(("max", "-1"))


@cache
def may_look_on() -> bool:
    """Tell whether this process may look for what it waits for instead of sleeping."""
    return os.environ.get(BUSY_WAIT_ENV) != "off" and len(os.sched_getaffinity(0)) > 1 and not has_quota()


def has_quota(*, mine: Path = _MINE, cgroups: Path = _CGROUPS) -> bool:
    """Tell whether the processor time of one of this process's cgroups is limited, as far as they can be read."""
    said = (_lines(file)[:1] for file in _quota_files(mine, cgroups))
    return any(word not in _NO_QUOTA for lines in said for line in lines for word in line.split()[:1])


def _quota_files(mine: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the files that would say so: of each cgroup up to the root, which is a container's own."""
    for line in _lines(mine):
        _, _, said = line.partition(":")
        controllers, _, path = said.partition(":")
        if not controllers:
            folder, name = cgroups, "cpu.max"
        elif "cpu" in controllers.split(","):
            folder, name = cgroups / controllers, "cpu.cfs_quota_us"
        else:
            continue
        own = Path(path.lstrip("/"))
        for cgroup in (own, *own.parents):
            yield folder / cgroup / name


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
