"""Decisions of one rollout instance: when it claims, holds, starts and swaps, for each ``swapAt``.

    GENERATE(v) --staged(v+1)--> GENERATE(v, staged) --nothing left for v--> SWAP --> GENERATE(v+1)

*quota*: every row names one version. The instance works for its version until there is nothing to claim for it; a claim
that gives rows of another version is the sign to finish what runs, load that version and begin them. It may be an older
one: the rows of an instance that died. Where no claim gives any, it loads a version newer than all before, so that rows
of that find it ready; one that it left for rows of an older version waits for rows.
*sequence*: rows take any version that is new enough. As soon as a newer one is staged nothing is begun any more; what
runs ends under the version it began with, then the instance swaps.
*token*: as *sequence*, but training rows that run are carried over: they go on under the newer version, at once.
*staggered*, with either of these: while other instances change weights, this one goes on as if nothing were staged,
until it has a permit (``flow.stagger``), or has nothing to do.

In all, a version is not left while its evaluation still has rows to claim, and rows of an evaluation that nobody
served in time are claimed by an instance that has nothing else to do (sequence: by any), which goes back for them.

Invariants: a row is made under versions of its window alone; no swap while a sequence runs, so no sequence mixes
versions, but in *token*, where those of training rows go forward; in *sequence* and *token* training rows never begin
under a version older than one loaded before; whatever is held is begun, given back, or waits for a swap that is due.
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
"""Share of the slots that evaluation may take from training."""


@dataclass(frozen=True, slots=True)
class Work:
    """One row: any name of it that is unique here, what it is for, and the version steps that may begin it."""

    id: Hashable
    purpose: Purpose
    window: VersionWindow


@dataclass(frozen=True, slots=True)
class Ask:
    """Claim to make: ``version`` is the step of the loaded weights, ``accept`` are others that could be loaded."""

    version: int
    accept: tuple[int, ...]
    rows: int


class Instance:
    """The decisions of one instance; the caller tells what happened and then asks what to do.

    slots: sequences that the engine runs at once, and so the most rows that it asks for: what it held beyond them would
    wait here while others have free slots; as groups are claimed whole, few slots wait for a claim all the same.
    staggered: whether it leaves a version for a newer one only with a permit.
    """

    def __init__(self, *, swap_at: SwapAt, slots: int, staggered: bool = False) -> None:
        self._back = swap_at == "quota"
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
        self._dry: set[Purpose] = set()
        self._draining = False
        self.current: Version | None = None

    @property
    def running(self) -> int:
        """Sequences begun and not ended."""
        return len(self._running)

    @property
    def evaluating(self) -> bool:
        """True while all sequences that run, at least one, are of evaluations."""
        return bool(self._running) and all(work.purpose == "eval" for work in self._running.values())

    @property
    def held(self) -> int:
        """Rows leased and not begun."""
        return len(self._held)

    @property
    def idle(self) -> bool:
        """True while there is no row here, and the last claim of training rows has found none."""
        return not self.works() and "train" in self._dry

    @property
    def wants_permit(self) -> bool:
        """True while it generates with one version, a newer one is staged, and it has no permit to change to that."""
        return self._newer_staged() and not self._forward()

    @property
    def has_permit(self) -> bool:
        """True from when it may change to what is staged until it has."""
        return self._has_permit

    def take_permit(self) -> None:
        """Take in that it may change to what is staged."""
        self._has_permit = True

    def know(self, *, staged: Version | None, in_memory: Iterable[int], available: Iterable[int]) -> None:
        """Take in what can be loaded: the newest version staged, the steps in host memory, and those to be had."""
        self._staged = staged
        self._in_memory = frozenset(in_memory)
        self._available = self._in_memory | frozenset(available)

    def loaded(self, version: Version) -> None:
        """Take in that the engine has swapped to ``version``."""
        if self._running and not self._carries_to(version.step):
            raise ValueError(f"{len(self._running)} sequences ran while {version} was loaded")
        self.current = version
        self._newest = version if self._newest is None else max(self._newest, version)
        self._dry.clear()
        self._has_permit = not self._staggered

    def take(self, works: Iterable[Work]) -> list[Work]:
        """Hold rows that a claim gave, not ready yet; gives those that this instance will never serve."""
        never = []
        for work in works:
            self._dry.discard(work.purpose)
            if self._cannot_be_served(work):
                never.append(work)
            else:
                self._held[work.id] = work
                self._unready.add(work.id)
        return never

    def ready(self, ids: Iterable[Hashable]) -> None:
        """Take in that these rows have been fetched and can begin."""
        self._unready.difference_update(ids)

    def release(self, work: Hashable) -> None:
        """Take in that a row is no longer here: its sequence ended, or its lease is lost."""
        self._held.pop(work, None)
        self._unready.discard(work)
        self._running.pop(work, None)

    def parked(self, purpose: Purpose) -> None:
        """Take in that a claim found no rows ready."""
        self._dry.add(purpose)

    def works(self) -> list[Work]:
        """Return the rows that are here, begun or not."""
        return [*self._held.values(), *self._running.values()]

    def drain(self) -> None:
        """Claim, begin and swap nothing any more."""
        self._draining = True

    def admit(self) -> list[Work]:
        """Begin what may begin now; the caller starts exactly these."""
        if self.current is None or self._draining:
            return []
        target = self._target()
        begun = [
            work
            for work in self._held.values()
            if work.id not in self._unready and self._suits(work) and not self._better_at(target, work)
        ][: max(0, self._slots - len(self._running))]
        for work in begun:
            del self._held[work.id]
            self._running[work.id] = work
        return begun

    def swap(self) -> int | None:
        """Return the step to load now, None for no swap. Until it is ``loaded``, or that has failed, admit nothing."""
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
        leaving = self.current is None or "eval" in self._dry or self._misfit() is not None
        return target if leaving and not due else None

    def ask(self, purpose: Purpose) -> Ask | None:
        """Return what to claim for ``purpose``, None for nothing now."""
        if self.current is None or self._draining or self._misfit() is not None:
            return None
        accept, room = self._claim_train() if purpose == "train" else self._claim_eval()
        if accept is None:
            return None
        return Ask(self.current.step, tuple(sorted(accept - {self.current.step})), room) if room > 0 else None

    def want(self, versions: Collection[Version], *, required: Collection[int]) -> int | None:
        """Return the step to pull next out of what others offer, None for nothing.

        versions: those that can be had; required: the steps that unfinished work needs.
        """
        steps = {version.step for version in versions}
        misfit = self._misfit()
        if misfit is not None and (step := self._serving(misfit)) in steps and step not in self._in_memory:
            return step
        newer = [version for version in versions if self._newest is None or version > self._newest]
        if not newer:
            return None
        if self._newest is None:
            return max(newer).step
        pinned = [version for version in newer if version.step in required]
        return min(pinned).step if pinned else max(newer).step

    def waits(self, target: int | None, *, required: Collection[int]) -> bool:
        """Return whether this instance has work of which none runs because other weights must be loaded first.

        target: what ``want`` gives now; required: as for ``want``. Whether those weights are still being received or
        are here already makes no difference, nor do they as long as claims find rows for the loaded ones. In
        ``sequence`` no step is required, so any newer version is needed; in ``token`` none is, since nothing that could
        begin waits for it.
        """
        if self.current is None or self._running or self._draining:
            return False
        other = target is not None and target != self.current.step and "train" in self._dry
        needed = other and not self._carries and (target in required or not self._back)
        return needed or self._misfit() is not None

    def _claim_train(self) -> tuple[frozenset[int] | None, int]:
        """Return the versions that a claim of training rows accepts (None: no claim) and the room for them."""
        room = self._slots - len(self.works())
        if not self._back:
            held_up = self._behind() or (self._forward() and not self._carries)
            return None if held_up else frozenset(), room
        if "eval" not in self._dry:
            return frozenset(), room
        return self._in_memory if self.works() else self._loadable(), room

    def _claim_eval(self) -> tuple[frozenset[int] | None, int]:
        """Return the same for evaluation rows, which training rows that only wait for a swap do not keep out."""
        held = sum(1 for work in self._held.values() if work.purpose == "eval")
        mine = held + sum(1 for work in self._running.values() if work.purpose == "eval")
        share = self._slots if mine == len(self.works()) else self._eval_slots
        room = min(share - mine, self._slots - len(self._running) - held)
        if (self._carries and self._forward()) or (self._back and not mine and "eval" not in self._dry):
            room = max(1, room)  # the swap waits for a claim that finds none, however full the instance is
        if not self._back and self._forward():
            return None if "eval" in self._dry else frozenset(), room
        return self._loadable() if not self._back or not self.works() else frozenset(), room

    def _loadable(self) -> frozenset[int]:
        """Return the steps that are here, and older ones that can be had; newer than any loaded come by themselves."""
        assert self._newest is not None
        newest = self._newest.step
        older = frozenset(step for step in self._available if step <= newest)
        return older if self.wants_permit else self._in_memory | older

    def _newer_staged(self) -> bool:
        """Return whether a version newer than the loaded one is staged."""
        return self._staged is not None and (self.current is None or self._staged > self.current)

    def _forward(self) -> bool:
        """Return whether it leaves the loaded version for a newer one that is staged."""
        free = self._has_permit or self.current is None or self._behind() or not self.works()
        return free and self._newer_staged()

    def _ahead(self, step: int) -> bool:
        """Return whether version ``step`` is the one staged, and none newer was loaded."""
        return (
            self._staged is not None
            and self._staged.step == step
            and (self._newest is None or self._staged >= self._newest)
        )

    def _carries_to(self, step: int) -> bool:
        """Return whether all that runs may go on under version ``step``."""
        fits = (work.purpose == "train" and _within(work, step) for work in self._running.values())
        return self._carries and self._forward() and self._ahead(step) and all(fits)

    def _behind(self) -> bool:
        """Return whether the loaded version is older than one loaded before."""
        return self.current is not None and self._newest is not None and self.current < self._newest

    def _cannot_be_served(self, work: Work) -> bool:
        """Return whether a training row needs a version older than those still to come, or newer than the newest.

        The second happens where weights of a trainer that began again were loaded while the row was claimed.
        """
        newest = self._newest
        return not self._back and work.purpose == "train" and newest is not None and not _within(work, newest.step)

    def _suits(self, work: Work) -> bool:
        """Return whether ``work`` may begin under the loaded version."""
        if self.current is None or (work.purpose == "train" and not self._back and self._behind()):
            return False
        return _within(work, self.current.step)

    def _better_at(self, target: int | None, work: Work) -> bool:
        """Return whether ``work`` should wait for the version that comes next."""
        if target is None or not _within(work, target):
            return False
        return work.purpose == "eval" or self._back or (self._ahead(target) and not self._carries)

    def _misfit(self) -> Work | None:
        """Return the row held longest of those that need another version than the loaded one."""
        return next((work for work in self._held.values() if not self._suits(work)), None)

    def _serving(self, work: Work) -> int:
        """Return the version step to load for ``work``."""
        if self._staged is not None and _within(work, self._staged.step):
            return self._staged.step
        if work.purpose == "train" and not self._back and self._newest is not None and self._behind():
            return self._newest.step
        return max((step for step in self._available if _within(work, step)), default=work.window.oldest)

    def _target(self) -> int | None:
        """Return the version step that this instance goes to next, None where it stays."""
        misfit = self._misfit()
        if misfit is not None:
            return self._serving(misfit)
        if self._staged is not None and self._forward() and (not self._back or self._free_for(self._staged)):
            return self._staged.step
        return None

    def _free_for(self, staged: Version) -> bool:
        """Return whether no weights are loaded, or there is no work and ``staged`` is newer than all that were.

        A version that it left for rows of an older one is not enough: it would go to and fro for each of them, where
        prompts come one by one.
        """
        if self._newest is None:
            return True
        return self.idle and staged > self._newest


def _within(work: Work, step: int) -> bool:
    return work.window.oldest <= step <= work.window.newest
