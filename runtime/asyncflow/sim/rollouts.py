"""One simulated rollout: the decisions of ``flow.instance``, an engine, and pulls of versions.

It does the same as ``rollout.worker``, in the same order: inform the instance of the versions that can be loaded, start
the admitted rows, swap weights when the instance requires it, and claim the rows that it requests.

Invariants: there is at most one open claim per purpose. No sequence starts while weights are loaded. One version is
pulled at a time. Every second is attributed to one of the same kinds of spans as in a real rollout.
"""

from __future__ import annotations

import heapq
import math
import random
from typing import TYPE_CHECKING, Final

from asyncflow.flow.claims import EMPTY_CLAIM_S, claims_more, rows_at_once
from asyncflow.flow.instance import Instance, Purpose
from asyncflow.flow.versions import next_version
from asyncflow.identity import Version
from asyncflow.sim.engine import Engine
from asyncflow.sim.recorder import TrackRecorder
from asyncflow.sim.rows import SimulatedRow
from asyncflow.timeline.tracks import Kind

if TYPE_CHECKING:
    from asyncflow.sim.run import World

_PURPOSES: Final[tuple[Purpose, ...]] = ("train", "eval")


class SimulatedRollout:
    """One life of one rollout. delivered: number of delivered samples; worker: its unique name among all lives."""

    def __init__(self, world: World, index: int, attempt: int) -> None:
        scenario = world.scenario
        self.index, self.attempt = index, attempt
        self.worker = f"rollout-{index}.{attempt}"
        self.delivered = 0
        self.recorder = TrackRecorder("rollout", index, attempt, now=world.agenda.now, keeps=world.keeps)
        self._world = world
        self._agenda = world.agenda
        self._model = scenario.models.engine
        self._engine = Engine(self._model)
        self._staggered = scenario.schedule.update == "staggered"
        self.instance = Instance(
            swap_at=scenario.schedule.swap_at,
            slots=self._model.slots,
            staggered=self._staggered,
        )
        self._copies: set[Version] = set()
        self._latest_load: Version | None = None
        self._pulling: Version | None = None
        self._pull = 0
        self._awaited_step: int | None = None
        self._loading: Version | None = None
        self._wanted: int | None = None
        self._permit_requested = self._permit_held = False
        self._claiming: set[Purpose] = set()
        self._claims = 0
        self._end_number = 0
        self._backlog: dict[SimulatedRow, None] = {}
        self._scoring = 0
        self._scores_since = 0.0
        self._started_step = -1
        self._reward_workers = [0.0] * scenario.models.reward.workers
        self.up = False

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one sequence ran."""
        spent = self.recorder.spent(self._agenda.now)
        return spent.get(("generate", ""), 0.0) + spent.get(("evaluation", ""), 0.0)

    @property
    def is_idle(self) -> bool:
        """True while it neither generates, nor changes weights, nor has rows."""
        instance = self.instance
        return not (instance.running or instance.held or self._loading or self._claiming)

    def start(self) -> None:
        """Start to work."""
        self.up = True
        self._agenda.wake(self)

    def react(self) -> None:
        """Do everything that is possible now."""
        if not self.up:
            return
        if self._loading is None and self._awaited_step is None:
            self._run_instance()
        else:
            self._fetch()
        self._claim()
        if self._staggered:
            self._permits()

    def granted(self, purpose: Purpose, rows: list[SimulatedRow]) -> None:
        """Receive the rows of a claim; they can start after the delay of a claim."""
        self._claiming.add(purpose)
        self._agenda.after(self._world.scenario.models.storage.claim_s, self._receive, purpose, rows)

    def permitted(self) -> None:
        """Receive a permit to change weights, or return it if it is no longer needed."""
        self._permit_requested = False
        if self.instance.wants_permit:
            self.instance.take_permit()
            self._permit_held = True
            self._agenda.wake(self)
        else:
            self._world.permit_over(self)

    def leave(self, *, killed: bool) -> list[tuple[SimulatedRow, int]]:
        """End; return the rows that it held, each with its number of generated tokens."""
        self.up = False
        now = self._agenda.now
        self.recorder.finish(now, killed=killed)
        for pool in self._world.pools.values():
            pool.withdraw(self)
        generated = {row: self._engine.generated(row, now) for row in self._engine.rows()}
        held = [*(work.id for work in self.instance.works()), *self._backlog]
        self._backlog.clear()
        return [(row, generated.get(row, row.generated)) for row in held if isinstance(row, SimulatedRow)]

    def _run_instance(self) -> None:
        instance, now = self.instance, self._agenda.now
        steps = [version.step for version in self._copies]
        available = [version.step for version in self._world.catalogue.available]
        instance.update_versions(staged=self._staged, in_memory=steps, available=available)
        self._fetch()
        started = instance.admit()
        for work in started:
            row = work.id
            assert isinstance(row, SimulatedRow)
            assert instance.current is not None
            self._start_row(row, instance.current.step, now)
        if (step := instance.swap()) is not None:
            self._swap(step)
        if started:
            self._started_step = started[-1].id.group.step  # type: ignore[attr-defined]
            self._schedule_end()
        self._record()

    def _start_row(self, row: SimulatedRow, version: int, now: float) -> None:
        mixes = self._world.mixes and row.work.purpose == "train"
        if row.generated and not (row.newest <= version if mixes else row.oldest == row.newest == version):
            row.forget()
        row.mark(row.generated, version)
        self._engine.start(row, now)

    def _record(self) -> None:
        """Record its activity, as ``rollout.worker`` does."""
        instance, now, version = self.instance, self._agenda.now, self.instance.current
        loaded = -1 if version is None else version.step
        if version is None:
            self.recorder.turn(now, "starting")
        elif self._loading is not None:
            self.recorder.turn(now, "swap", version=self._loading.step)
        elif instance.running:
            kind: Kind = "evaluation" if instance.evaluating else "generate"
            self.recorder.turn(now, kind, step=self._started_step, version=loaded)
        elif self._awaited_step is not None:
            self.recorder.turn(now, "swap", version=self._awaited_step)
        else:
            self.recorder.turn(now, "idle", waits=self._waits_for(), version=loaded)

    def _waits_for(self) -> str:
        """Return the reason why no sequence runs."""
        instance = self.instance
        if instance.waits(self._wanted, required=self._world.catalogue.required):
            return "weights"
        if instance.wants_permit:
            return "permit"
        if instance.held or self._claiming:
            return "fetch"
        if self._scoring:
            return "reward"
        return "delivery" if self._backlog else "claim"

    @property
    def _staged(self) -> Version | None:
        newer = [version for version in self._copies if self._latest_load is None or version > self._latest_load]
        return max(newer, default=None)

    # Weights

    def _fetch(self) -> None:
        """Start to pull the next version."""
        catalogue = self._world.catalogue
        self._wanted = self.instance.next_pull(catalogue.available, required=catalogue.required)
        target = next_version(
            catalogue,
            held=self._copies,
            unfinished=self._pulling,
            asked=[] if self._awaited_step is None else [self._awaited_step],
            wanted=self._wanted,
        )
        if target is not None and target != self._pulling:
            self._pulling = target
            self._pull += 1
            seconds = self._world.pull_s(target)
            self._agenda.after(seconds, self._pulled, self._pull, target, self._agenda.now)

    def _pulled(self, pull: int, version: Version, started: float) -> None:
        if pull != self._pull or not self.up:
            return
        now, catalogue = self._agenda.now, self._world.catalogue
        self.recorder.background("receive", started, now, version=version.step)
        self._pulling = None
        self._copies = {each for each in self._copies if catalogue.holds(each) or each == self._latest_load} | {version}
        if self._awaited_step == version.step:
            self._awaited_step = None
            self._load(version)
        self._agenda.wake(self)

    def _swap(self, step: int) -> None:
        version = max((each for each in self._copies if each.step == step), default=None)
        if version is not None:
            self._load(version)
        else:
            self._awaited_step = step
            self._fetch()

    def _load(self, version: Version) -> None:
        now = self._agenda.now
        self._latest_load = self._loading = version
        keeps_prefix = self._world.scenario.schedule.prefix == "keep"
        seconds = self._world.load_s + (0.0 if keeps_prefix else self._engine.recompute_s(now))
        self._engine.stop(now)
        self._end_number += 1
        self._agenda.after(seconds, self._loaded, version)

    def _loaded(self, version: Version) -> None:
        if not self.up:
            return
        now = self._agenda.now
        for row in self._engine.rows():
            row.mark(self._engine.generated(row, now), version.step)
        self._engine.resume(now)
        self._loading = None
        self.instance.loaded(version)
        self._world.wake_colocated_trainer()
        self._schedule_end()
        self._agenda.wake(self)

    def _permits(self) -> None:
        """Return a used permit, and request the next one."""
        instance = self.instance
        if self._permit_held and not instance.has_permit:
            self._permit_held = False
            self._world.permit_over(self)
        if not (self._permit_requested or self._permit_held) and instance.wants_permit:
            assert instance.current is not None
            self._permit_requested = True
            self._world.permit_wanted(self, instance.current)

    # Rows

    def _claim(self) -> None:
        """Make the claims that the instance requests now."""
        for purpose in _PURPOSES:
            if purpose in self._claiming:
                continue
            pool = self._world.pools[purpose]
            claims = claims_more(backlog=len(self._backlog), slots=self._model.slots)
            wanted, parked = self.instance.next_claim(purpose) if claims else None, pool.parked(self)
            if wanted is None:
                if parked is not None:
                    pool.withdraw(self)
                continue
            if parked is not None and (parked.version, parked.accept) == (wanted.version, wanted.accept):
                continue
            if parked is not None:
                pool.withdraw(self)
            if rows := pool.claim(self, wanted, most=rows_at_once(wanted.rows, slots=self._model.slots)):
                self.granted(purpose, rows)
            elif purpose == "train":
                self.instance.claim_was_empty(purpose)
            else:
                self._claims += 1
                self._agenda.after(EMPTY_CLAIM_S, self._parked, self._claims)

    def _parked(self, claim: int) -> None:
        if self.up and claim == self._claims and self._world.pools["eval"].parked(self) is not None:
            self.instance.claim_was_empty("eval")
            self._agenda.wake(self)

    def _receive(self, purpose: Purpose, rows: list[SimulatedRow]) -> None:
        self._claiming.discard(purpose)
        if not self.up:
            self._world.pools[purpose].give_back(rows)
            return
        if refused := self.instance.hold(row.work for row in rows):
            self._world.pools[purpose].give_back([work.id for work in refused])  # type: ignore[misc]
        self.instance.ready(rows)
        self._agenda.wake(self)

    def _schedule_end(self) -> None:
        """Schedule the end of the next sequence."""
        self._end_number += 1
        if (ends := self._engine.next_end) is not None:
            self._agenda.at(ends, self._ended, self._end_number)

    def _ended(self, number: int) -> None:
        if number != self._end_number or not self.up:
            return
        now = self._agenda.now
        for row in self._engine.ended(now):
            self.instance.release(row)
            self._backlog[row] = None
            row.mark(row.response_tokens, row.newest)
            self._score(row, now)
        self._schedule_end()
        self._agenda.wake(self)
        self._world.wake_colocated_trainer()

    def _score(self, row: SimulatedRow, now: float) -> None:
        """Compute the reward of a sample, after earlier ones if all reward workers are busy."""
        reward = self._world.scenario.models.reward
        if not reward.seconds:
            self._write(row)
            return
        draw = random.Random(f"{self._world.seed}.{row.group.purpose}.{row.group.serial}.{row.sample}")
        ends = max(now, self._reward_workers[0]) + reward.seconds * math.exp(reward.sigma * draw.gauss(0, 1))
        heapq.heapreplace(self._reward_workers, ends)
        if not self._scoring:
            self._scores_since = now
        self._scoring += 1
        self._agenda.at(ends, self._scored, row)

    def _scored(self, row: SimulatedRow) -> None:
        if not self.up:
            return
        self._scoring -= 1
        if not self._scoring:
            self.recorder.background("reward", self._scores_since, self._agenda.now)
        self._write(row)

    def _write(self, row: SimulatedRow) -> None:
        """Write a sample to the queue."""
        written = self._world.written_at(row)
        if written > self._agenda.now:
            self._agenda.at(written, self._settle, row)
        else:
            self._settle(row)

    def _settle(self, row: SimulatedRow) -> None:
        if not self.up:
            return
        del self._backlog[row]
        self.delivered += 1
        self._world.driver.done(row)
        self._agenda.wake(self)
