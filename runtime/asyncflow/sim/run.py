"""A simulated run: the world in which driver, trainer and rollouts meet, from the first event to the last.

Invariant: a run is a function of its scenario and its seed: no clock, no real randomness, and nothing that depends on
the order of a set.
"""

from __future__ import annotations

from collections import defaultdict

from asyncflow.errors import AsyncFlowError
from asyncflow.flow.instance import Purpose
from asyncflow.flow.stagger import Permits, Supply
from asyncflow.identity import Version
from asyncflow.sim.agenda import Agenda
from asyncflow.sim.catalogue import VersionList
from asyncflow.sim.driver import SimulatedDriver
from asyncflow.sim.recorder import TrackRecorder
from asyncflow.sim.result import Simulated
from asyncflow.sim.rollouts import SimulatedRollout
from asyncflow.sim.rows import RowPool, SimulatedRow
from asyncflow.sim.scenario import Happening, Scenario
from asyncflow.sim.trainer import SimulatedTrainer
from asyncflow.timeline.tracks import Mark, Timeline, Track

_BUSY = frozenset(("generate", "evaluation", "compute", "optimizer", "checkpoint"))
"""Kinds of spans that count as busy, as in the idle shares of a real run."""
_RECENT = 10
"""Steps by which the supply of a staggered update is judged."""
_PULSE_S = 0.5
"""Seconds after which permits are looked at again."""


def simulate(scenario: Scenario, *, seed: int, spans: bool = True) -> Simulated:
    """Return what a run of ``scenario`` would be.

    seed: as ``algorithm.seed``, for the lengths of responses; spans: whether there is to be a timeline, which takes
    time and memory. Raises AsyncFlowError where the run stands still, which says what waits for what.
    """
    return World(scenario, seed=seed, spans=spans).run()


class World:
    """All that a run consists of. keeps: whether recorders keep spans; mixes: whether responses may mix versions."""

    def __init__(self, scenario: Scenario, *, seed: int, spans: bool) -> None:
        self.scenario, self.seed, self.keeps = scenario, seed, spans
        self.mixes = scenario.schedule.swap_at == "token"
        self.agenda = Agenda()
        self.catalogue = VersionList(keep=scenario.keep)
        purposes: tuple[Purpose, ...] = ("train", "eval")
        self.pools = {purpose: RowPool(purpose, self.agenda) for purpose in purposes}
        self.driver = SimulatedDriver(self)
        self.trainer = SimulatedTrainer(self)
        self.rollouts: dict[int, SimulatedRollout] = {}
        self.load_s = scenario.models.engine.load_s
        if scenario.colocated is not None:
            self.load_s = scenario.colocated.to_generate_s
        self._permits = Permits(most=scenario.stagger)
        self._pulses = False
        self._attempts: defaultdict[int, int] = defaultdict(int)
        self._units = [0.0] * scenario.models.storage.units
        self._dead: list[TrackRecorder] = []
        self._marks: list[Mark] = []
        self._closed = 0.0
        self._spent: dict[str, dict[tuple[str, str], float]] = {}
        self._idle: dict[str, float] = {}
        self._redone = 0

    def run(self) -> Simulated:
        """Run to the end."""
        scenario, agenda = self.scenario, self.agenda
        agenda.tell(self.driver)
        agenda.at(scenario.models.start.trainer_s, self.trainer.start)
        for index in range(scenario.rollouts):
            self._join(index)
        for happening in scenario.happenings:
            agenda.at(happening.at, self._happen, happening)
        if not agenda.run(over=lambda: self.driver.over):
            raise AsyncFlowError(
                f"the simulated run stands still at {agenda.now:.3f} s in step {self.trainer.step + 1}: "
                f"{self.driver.assignment.running} prompts are out, {len(self.rollouts)} rollouts are there",
                where="sim",
                hint="Nothing is planned any more. Are there rollouts, and may prompts be put by this schedule?",
            )
        return self._result()

    # What the parts tell each other

    def publish(self, version: Version) -> None:
        """Make a version known to all."""
        self.catalogue.publish(version)
        self.agenda.tell(self.driver)
        self.tell_rollouts()

    def tell_rollouts(self) -> None:
        """Have all rollouts look."""
        for rollout in self.rollouts.values():
            self.agenda.tell(rollout)

    def open(self) -> None:
        """Count time from now on: the first prompt is put."""
        for recorder in self._recorders():
            recorder.reset(self.agenda.now)

    def close(self) -> None:
        """Count no more: the last step is made."""
        now = self._closed = self.agenda.now
        spent: defaultdict[str, defaultdict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
        shares: defaultdict[str, list[float]] = defaultdict(list)
        for recorder in self._recorders():
            counted = recorder.counted(now)
            for what, seconds in counted.items():
                spent[recorder.role][what] += seconds
            total = sum(counted.values())
            if total > 0 and recorder.role in ("trainer", "rollout"):
                busy = sum(seconds for (kind, _), seconds in counted.items() if kind in _BUSY)
                shares[recorder.role].append(1 - busy / total)
        self._spent = {role: dict(each) for role, each in spent.items()}
        self._idle = {role: sum(each) / len(each) for role, each in shares.items()}

    def quiet(self) -> None:
        """Have the trainer look whether the devices are free that it shares."""
        if self.scenario.colocated is not None:
            self.agenda.tell(self.trainer)

    @property
    def generating(self) -> bool:
        """True while a rollout has something to do, or to load."""
        return not all(rollout.resting for rollout in self.rollouts.values())

    def pull_s(self, version: Version) -> float:
        """Return the seconds in which the next that asks gets a version."""
        if self.scenario.colocated is not None:
            return 0.0
        return self.scenario.models.link.seconds(self.catalogue.place(version))

    def written_at(self, row: SimulatedRow) -> float:
        """Return when a sample that has its reward is complete in the queue."""
        storage = self.scenario.models.storage
        return self._moved_at(row.group.serial, [row]) + storage.write_s

    def fetched_at(self, ranks: list[list[SimulatedRow]]) -> float:
        """Return when a slot that is decided now is with the trainer."""
        storage = self.scenario.models.storage
        if not storage.byte_s:
            return self.agenda.now + storage.slot_s
        by_unit: defaultdict[int, list[SimulatedRow]] = defaultdict(list)
        for rank in ranks:
            for row in rank:
                by_unit[row.group.serial % storage.units].append(row)
        return max(self._moved_at(unit, rows) for unit, rows in by_unit.items()) + storage.slot_s

    def _moved_at(self, serial: int, rows: list[SimulatedRow]) -> float:
        storage, now = self.scenario.models.storage, self.agenda.now
        if not storage.byte_s:
            return now
        unit = serial % storage.units
        seconds = storage.byte_s * storage.token_bytes * sum(row.response_tokens for row in rows)
        self._units[unit] = max(now, self._units[unit]) + seconds
        return self._units[unit]

    # Permits of a staggered update

    def permit_wanted(self, rollout: SimulatedRollout, version: Version) -> None:
        """Take in that a rollout wants to change the weights of ``version``."""
        self._permits.ask(rollout.worker, version=version.packed, now=self.agenda.now)
        self._grant()
        self._pulse()

    def permit_over(self, rollout: SimulatedRollout) -> None:
        """Take in that a rollout has changed its weights, or does not want to any more."""
        self._permits.end(rollout.worker, now=self.agenda.now)
        self._grant()

    def _grant(self) -> None:
        by_worker = {rollout.worker: rollout for rollout in self.rollouts.values()}
        for worker in self._permits.grant(self._supply(), now=self.agenda.now):
            if worker in by_worker:
                by_worker[worker].permitted()

    def _pulse(self) -> None:
        if not self._pulses:
            self._pulses = True
            self.agenda.after(_PULSE_S, self._beat)

    def _beat(self) -> None:
        self._pulses = False
        if not self.driver.over:
            self._grant()
            self._pulse()

    def _supply(self) -> Supply:
        recent = self.trainer.figures[-_RECENT:]
        worked = sum(step.wall_s - step.wait_s for step in recent)
        paces = [step.wall_s for step in self.trainer.figures[1:]][-_RECENT:]
        rates = {each.worker: each.delivered / each.busy_s for each in self.rollouts.values() if each.busy_s > 0}
        return Supply(
            rates=rates,
            need=sum(step.samples for step in recent) / worked if worked > 0 else None,
            ready=self.trainer.ready(),
            version_s=sum(paces) / len(paces) * self.scenario.schedule.sync_every if paces else None,
        )

    # Processes that come and go

    def _join(self, index: int) -> None:
        rollout = SimulatedRollout(self, index, self._attempts[index])
        self._attempts[index] += 1
        self.rollouts[index] = rollout
        self.agenda.after(self.scenario.models.start.rollout_s, rollout.start)

    def _happen(self, happening: Happening) -> None:
        start = self.scenario.models.start
        if happening.what == "join":
            index = max(self.rollouts, default=-1) + 1
            self._note("join", f"rollout-{index}")
            self._join(index)
            return
        rollout = self.rollouts.get(happening.index)
        if rollout is None:
            return
        self._note(happening.what, f"rollout-{happening.index}")
        del self.rollouts[happening.index]
        killed = happening.what == "kill"
        held = rollout.leave(killed=killed)
        self._permits.leave(rollout.worker)
        self._dead.append(rollout.recorder)
        self._redone += sum(tokens for _, tokens in held) if killed else 0
        for row, tokens in held:
            if killed:
                row.forget()
            else:
                row.mark(tokens, row.newest)
                row.made = tokens
            row.began = row.ends = 0.0
        self.agenda.after(start.detect_s if killed else 0.0, self._give_back, [row for row, _ in held])
        if killed:
            self.agenda.after(start.restart_s, self._join, happening.index)
        self._grant()

    def _give_back(self, rows: list[SimulatedRow]) -> None:
        for purpose, pool in self.pools.items():
            if mine := [row for row in rows if row.work.purpose == purpose]:
                pool.give_back(mine)

    def _note(self, what: str, of: str) -> None:
        self._marks.append(Mark(at=self.agenda.now, what=what, of=of))

    # The end

    def _recorders(self) -> list[TrackRecorder]:
        return [
            self.driver.recorder,
            self.trainer.recorder,
            *(rollout.recorder for rollout in self.rollouts.values()),
            *self._dead,
        ]

    def _result(self) -> Simulated:
        opened = self.driver.opened or 0.0
        return Simulated(
            steps=self.trainer.figures,
            wall_s=self._closed - opened,
            ended=self.agenda.now,
            spent=self._spent,
            idle=self._idle,
            samples=sum(step.samples for step in self.trainer.figures),
            redone=self._redone,
            timeline=self._timeline(opened) if self.keeps else None,
        )

    def _timeline(self, opened: float) -> Timeline:
        now = self.agenda.now
        tracks: list[Track] = []
        for recorder in sorted(self._recorders(), key=lambda each: (each.role, each.index, each.attempt)):
            recorder.finish(now)
            if (track := recorder.track()) is not None:
                tracks.append(track)
        return Timeline(tracks=tracks, marks=self._marks, begin=opened, end=self._closed)
