"""Decisions of one rollout instance: when it claims rows, holds them, starts them and swaps, for each ``swapAt``.

    GENERATE(v) --staged(v+1)--> GENERATE(v, staged) --nothing left for v--> SWAP --> GENERATE(v+1)

*quota*: every row names one version. The instance claims rows of its loaded version as long as there are any. If a
claim returns rows of another version, the instance finishes the running sequences, loads that version and starts those
rows. That version may be older, for example if the rows come from an instance that died. If a claim returns no rows,
the instance loads a staged version that is newer than all versions loaded before. It returns to a version that it left
for an older one only when there are rows for it.
*sequence*: a row takes any version that is new enough. Once a newer version is staged, the instance starts no further
sequences; the running ones end under the version they started with, then the instance swaps.
*token*: as *sequence*, but running training rows are carried over: they continue under the newer version immediately.
*staggered*, with *sequence* or *token*: the instance ignores the staged version until it has a permit
(``flow.stagger``) or has nothing to do.

For each ``swapAt``, the instance keeps a version while its evaluation still has rows to claim. Evaluation rows that no
instance served in time are claimed by an instance without other work (*sequence*, *token*: by any instance), which
loads the older version for them.

Invariants:
A row is generated only under versions of its window.
The instance does not swap while a sequence runs, so no sequence mixes versions, except under *token*, where running
training rows move to a newer version.
Under *sequence* and *token*, a training row never starts under a version older than one that was loaded before.
Every held row is started, given back, or waits for a swap that is due.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from asyncflow.flow.schedule import VersionWindow
from asyncflow.identity import Version

SwapAt = Literal["quota", "sequence", "token"]
Purpose = Literal["train", "eval"]

_EVAL_SHARE = 0.25
"""Share of the slots that evaluation may use while there is training work."""


@dataclass(frozen=True, slots=True)
class Work:
    """One row: an id that is unique in the instance, its purpose, and the versions (steps) under which it may start."""

    id: Hashable
    purpose: Purpose
    window: VersionWindow


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim to make. version: step of the loaded weights; accept: steps of other versions that could be loaded."""

    version: int
    accept: tuple[int, ...]
    rows: int


class Instance:
    """The decisions of one instance; the caller reports events and then requests decisions.

    slots: most sequences that the engine runs at the same time. The instance requests training rows only for free
    slots, because further rows would wait here while other instances have free slots. Groups are claimed whole, so few
    slots stay free between claims all the same.
    staggered: whether the instance changes to a newer version only with a permit.
    """

    def __init__(self, *, swap_at: SwapAt, slots: int, staggered: bool = False) -> None:
        self._quota = swap_at == "quota"
        self._carries = swap_at == "token"
        self._has_permit = not staggered
        self._staggered = staggered
        self._slots = slots
        self._eval_slots = max(1, int(slots * _EVAL_SHARE))
        self._held: dict[Hashable, Work] = {}
        self._unready: set[Hashable] = set()
        self._running: dict[Hashable, Work] = {}
        self._in_memory: frozenset[int] = frozenset()
        self._available: frozenset[int] = frozenset()
        self._staged: Version | None = None
        self._newest: Version | None = None
        self._exhausted: set[Purpose] = set()
        self._draining = False
        self.current: Version | None = None

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._running)

    @property
    def evaluating(self) -> bool:
        """True while at least one sequence runs and all running sequences are evaluations."""
        return bool(self._running) and all(work.purpose == "eval" for work in self._running.values())

    @property
    def held(self) -> int:
        """Number of leased rows that have not started."""
        return len(self._held)

    @property
    def idle(self) -> bool:
        """True while the instance has no rows and its last claim of training rows found none."""
        return not self.works() and "train" in self._exhausted

    @property
    def wants_permit(self) -> bool:
        """True while a version newer than the loaded one is staged and the instance must not change to it yet."""
        return self._newer_staged() and not self._forward()

    @property
    def has_permit(self) -> bool:
        """True while the instance may change to the staged version; always True without stagger."""
        return self._has_permit

    def take_permit(self) -> None:
        """Record the permit to change to the staged version."""
        self._has_permit = True

    def update_versions(self, *, staged: Version | None, in_memory: Iterable[int], available: Iterable[int]) -> None:
        """Record the versions that can be loaded: the newest staged one, the steps in host memory, further steps."""
        self._staged = staged
        self._in_memory = frozenset(in_memory)
        self._available = self._in_memory | frozenset(available)

    def loaded(self, version: Version) -> None:
        """Record that the engine has swapped to ``version``."""
        if self._running and not self._carries_to(version.step):
            raise ValueError(f"{len(self._running)} sequences ran while {version} was loaded")
        self.current = version
        self._newest = version if self._newest is None else max(self._newest, version)
        self._exhausted.clear()
        self._has_permit = not self._staggered

    def hold(self, works: Iterable[Work]) -> list[Work]:
        """Hold claimed rows, which are not ready yet. Return the rows that this instance will never serve."""
        never = []
        for work in works:
            self._exhausted.discard(work.purpose)
            if self._cannot_be_served(work):
                never.append(work)
            else:
                self._held[work.id] = work
                self._unready.add(work.id)
        return never

    def ready(self, ids: Iterable[Hashable]) -> None:
        """Record that these rows have been fetched and can start."""
        self._unready.difference_update(ids)

    def release(self, work: Hashable) -> None:
        """Remove a row: its sequence ended, or its lease is lost."""
        self._held.pop(work, None)
        self._unready.discard(work)
        self._running.pop(work, None)

    def claim_was_empty(self, purpose: Purpose) -> None:
        """Record that a claim found no ready rows."""
        self._exhausted.add(purpose)

    def works(self) -> list[Work]:
        """Return the held and the running rows."""
        return [*self._held.values(), *self._running.values()]

    def drain(self) -> None:
        """Stop claiming, starting and swapping permanently."""
        self._draining = True

    def admit(self) -> list[Work]:
        """Return the rows that start now, and count them as running; the caller must start exactly these."""
        if self.current is None or self._draining:
            return []
        target = self._target()
        started = [
            work
            for work in self._held.values()
            if work.id not in self._unready and self._suits(work) and not self._better_at(target, work)
        ][: max(0, self._slots - len(self._running))]
        for work in started:
            del self._held[work.id]
            self._running[work.id] = work
        return started

    def swap(self) -> int | None:
        """Return the step to load now, None for no swap. Call ``admit`` only after it is ``loaded`` or has failed."""
        target = self._target()
        if target is None or self._draining:
            return None
        carries = self._carries_to(target)
        if self._running and not carries:
            return None
        due = any(
            self._suits(work) and not self._better_at(target, work)
            for work in self._held.values()
            if work.purpose == "eval" or not (carries and _within(work, target))
        )
        leaving = self.current is None or "eval" in self._exhausted or self._mismatched() is not None
        return target if leaving and not due else None

    def next_claim(self, purpose: Purpose) -> Claim | None:
        """Return the claim to make for ``purpose``, None if there is nothing to claim now."""
        if self.current is None or self._draining or self._mismatched() is not None:
            return None
        accept, room = self._claim_train() if purpose == "train" else self._claim_eval()
        if accept is None:
            return None
        return Claim(self.current.step, tuple(sorted(accept - {self.current.step})), room) if room > 0 else None

    def next_pull(self, versions: Collection[Version], *, required: Collection[int]) -> int | None:
        """Return the step to pull next, None for nothing.

        versions: the available versions; required: the steps of the versions that unfinished work needs.
        """
        steps = {version.step for version in versions}
        mismatched = self._mismatched()
        if mismatched is not None and (step := self._version_for(mismatched)) in steps and step not in self._in_memory:
            return step
        newer = [version for version in versions if self._newest is None or version > self._newest]
        if not newer:
            return None
        if self._newest is None:
            return max(newer).step
        pinned = [version for version in newer if version.step in required]
        return min(pinned).step if pinned else max(newer).step

    def waits(self, target: int | None, *, required: Collection[int]) -> bool:
        """Return whether nothing runs because other weights must be loaded first.

        target: result of ``next_pull`` now; required: as for ``next_pull``. The target counts only after a claim of
        training rows for the loaded version found none; it makes no difference whether the target has been received
        already. Under ``quota`` the target must be required. Under ``sequence`` no step is ever required, so any newer
        version counts. Under ``token`` none counts, since no row waits for it.
        """
        if self.current is None or self._running or self._draining:
            return False
        other = target is not None and target != self.current.step and "train" in self._exhausted
        needed = other and not self._carries and (target in required or not self._quota)
        return needed or self._mismatched() is not None

    def _claim_train(self) -> tuple[frozenset[int] | None, int]:
        """Return the versions that a claim of training rows accepts (None: no claim), and the number of rows."""
        room = self._slots - len(self.works())
        if not self._quota:
            blocked = self._behind() or (self._forward() and not self._carries)
            return None if blocked else frozenset(), room
        if "eval" not in self._exhausted:
            return frozenset(), room
        return self._in_memory if self.works() else self._loadable(), room

    def _claim_eval(self) -> tuple[frozenset[int] | None, int]:
        """Return the same for evaluation rows; held training rows do not use up their room."""
        held = sum(1 for work in self._held.values() if work.purpose == "eval")
        own = held + sum(1 for work in self._running.values() if work.purpose == "eval")
        share = self._slots if own == len(self.works()) else self._eval_slots
        room = min(share - own, self._slots - len(self._running) - held)
        if (self._carries and self._forward()) or (self._quota and not own and "eval" not in self._exhausted):
            room = max(1, room)  # the swap waits for a claim that finds no rows, even if the instance is full
        if not self._quota and self._forward():
            return None if "eval" in self._exhausted else frozenset(), room
        return self._loadable() if not self._quota or not self.works() else frozenset(), room

    def _loadable(self) -> frozenset[int]:
        """Return the steps in memory, and available ones not newer than all loaded ones (newer: ``next_pull``)."""
        assert self._newest is not None
        newest = self._newest.step
        older = frozenset(step for step in self._available if step <= newest)
        return older if self.wants_permit else self._in_memory | older

    def _newer_staged(self) -> bool:
        """Return whether a version newer than the loaded one is staged."""
        return self._staged is not None and (self.current is None or self._staged > self.current)

    def _forward(self) -> bool:
        """Return whether the instance is to change to a staged version that is newer than the loaded one."""
        free = self._has_permit or self.current is None or self._behind() or not self.works()
        return free and self._newer_staged()

    def _is_next(self, step: int) -> bool:
        """Return whether version ``step`` is the staged one, and no newer one was loaded before."""
        return (
            self._staged is not None
            and self._staged.step == step
            and (self._newest is None or self._staged >= self._newest)
        )

    def _carries_to(self, step: int) -> bool:
        """Return whether all running sequences may continue under version ``step``."""
        fits = (work.purpose == "train" and _within(work, step) for work in self._running.values())
        return self._carries and self._forward() and self._is_next(step) and all(fits)

    def _behind(self) -> bool:
        """Return whether the loaded version is older than one loaded before."""
        return self.current is not None and self._newest is not None and self.current < self._newest

    def _cannot_be_served(self, work: Work) -> bool:
        """Return whether a training row cannot start under the newest loaded version, outside quota.

        It may need an older version, which is not loaded again. It may need a newer one if a restarted trainer's
        weights were loaded while the row was claimed.
        """
        newest = self._newest
        return not self._quota and work.purpose == "train" and newest is not None and not _within(work, newest.step)

    def _suits(self, work: Work) -> bool:
        """Return whether ``work`` may start under the loaded version."""
        if self.current is None or (work.purpose == "train" and not self._quota and self._behind()):
            return False
        return _within(work, self.current.step)

    def _better_at(self, target: int | None, work: Work) -> bool:
        """Return whether ``work`` should wait for the version ``target``, which is loaded next."""
        if target is None or not _within(work, target):
            return False
        return work.purpose == "eval" or self._quota or (self._is_next(target) and not self._carries)

    def _mismatched(self) -> Work | None:
        """Return the first held row that cannot start under the loaded version."""
        return next((work for work in self._held.values() if not self._suits(work)), None)

    def _version_for(self, work: Work) -> int:
        """Return the version step to load for ``work``."""
        if self._staged is not None and _within(work, self._staged.step):
            return self._staged.step
        if work.purpose == "train" and not self._quota and self._newest is not None and self._behind():
            return self._newest.step
        return max((step for step in self._available if _within(work, step)), default=work.window.oldest)

    def _target(self) -> int | None:
        """Return the step of the version to change to next, None to keep the loaded one."""
        mismatched = self._mismatched()
        if mismatched is not None:
            return self._version_for(mismatched)
        if self._staged is not None and self._forward() and (not self._quota or self._free_for(self._staged)):
            return self._staged.step
        return None

    def _free_for(self, staged: Version) -> bool:
        """Return whether no weights are loaded, or the instance is idle and ``staged`` is the newest version so far.

        A version that it left for rows of an older one does not count: if prompts arrive one by one, the instance would
        swap twice for each of them.
        """
        if self._newest is None:
            return True
        return self.idle and staged > self._newest


def _within(work: Work, step: int) -> bool:
    return work.window.oldest <= step <= work.window.newest
