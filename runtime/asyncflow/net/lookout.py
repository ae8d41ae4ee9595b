"""How a process waits for what may come at once: it looks again and again for a moment before it sleeps.

Where a core is idle, to fall asleep and to be woken costs both sides more than a short wait; where none is, whoever
else can run goes before each further look. So wait MPI's progress engines, and Go's scheduler before it parks a thread.

Who asked for something looks for longer: the first to answer after a pause needs milliseconds, and who sleeps then is
woken on the core of who answers, where both stay for as long, taking turns (a virtual core that has gone idle seems to
be taken). With a look of 3 ms a burst of small calls took 0.57 to 0.79 of the time.

Invariant: a wait costs ``LOOKS`` looks at most (about 0.2 ms of processor time, only what others leave idle), and one
look where the last sleep was longer than ``SOON_S``: who is seldom called sleeps at once. The first wait for an answer
costs ``ANSWER_S``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final, TypeVar

from asyncflow.net.processor import may_look_on

T = TypeVar("T")

LOOKS: Final = 100
SOON_S: Final = 0.0005
ANSWER_S: Final = 0.003


class Lookout:
    """A place where a process waits. looks: how often it looks before it sleeps; clock: seconds that only grow."""

    def __init__(self, *, looks: int | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._looks = looks if looks is not None else LOOKS if may_look_on() else 0
        self._clock = clock
        self._soon = False
        self._asked = False

    def expect(self) -> None:
        """Note that something was asked for, and that the next wait is for it."""
        self._asked = self._looks > 0

    def wait(self, look: Callable[[], T], sleep: Callable[[], T]) -> T:
        """Return what ``look`` finds, or what ``sleep`` waits for; both give something false where there is nothing."""
        if found := look():
            return found
        for _ in self._turns():
            os.sched_yield()
            if found := look():
                return found
        begun = self._clock()
        found = sleep()
        self._soon = self._clock() - begun < SOON_S
        return found

    def _turns(self) -> Iterable[object]:
        """Return something for each look that comes before the sleep."""
        if not self._asked:
            return range(self._looks if self._soon else 0)
        self._asked = False
        until = self._clock() + ANSWER_S
        return iter(lambda: self._clock() < until, False)
