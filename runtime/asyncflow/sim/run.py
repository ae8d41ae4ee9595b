"""A simulated run: the world that connects driver, trainer and rollouts, from the first event to the last.

Invariant: a run is a function of its scenario and its seed: it uses no clock, no true randomness, and no set order.
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
from asyncflow.sim.scenario import RolloutEvent, Scenario
from asyncflow.sim.trainer import SimulatedTrainer
from asyncflow.timeline.tracks import Mark, Timeline, Track

_BUSY = frozenset(("generate", "evaluation", "compute", "optimizer", "checkpoint"))
"""Kinds of spans that count as busy, as in the idle shares of a real run."""
_RECENT = 10
"""Number of recent steps from which the supply of a staggered update is computed."""
_POLL_S = 0.5
"""Interval at which waiting rollouts are checked for permits."""


def simulate(scenario: Scenario, *, seed: int, spans: bool = True) -> Simulated:
    """Return the result of a simulated run of ``scenario``.

    seed: as ``algorithm.seed``, for the lengths of responses; spans: whether to record a timeline, which costs time and
    memory. Raises AsyncFlowError if the run deadlocks, with the state in which it did.
    """
    return World(scenario, seed=seed, spans=spans).run()


class World:
    """All parts of a run. keeps: whether recorders keep spans; mixes: whether responses may mix versions."""

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
        self._polling = False
        self._attempts: defaultdict[int, int] = defaultdict(int)
        self._units = [0.0] * scenario.models.storage.units
        self._ended_recorders: list[TrackRecorder] = []
        self._marks: list[Mark] = []
        self._closed = 0.0
        self._spent: dict[str, dict[tuple[str, str], float]] = {}
        self._idle: dict[str, float] = {}
        self._redone = 0

    def run(self) -> Simulated:
        """Run to the end."""
        scenario, agenda = self.scenario, self.agenda
        agenda.wake(self.driver)
        agenda.at(scenario.models.start.trainer_s, self.trainer.start)
        for index in range(scenario.rollouts):
            self._join(index)
        for event in scenario.events:
            agenda.at(event.at, self._handle, event)
        if not agenda.run(over=lambda: self.driver.over):
            raise AsyncFlowError(
                f"the simulated run stands still at {agenda.now:.3f} s in step {self.trainer.step + 1}: "
                f"{self.driver.assignment.running} prompts are out, {len(self.rollouts)} rollouts exist",
                where="sim",
                hint="No event is left. Are there rollouts, and does the schedule admit prompts?",
            )
        return self._result()

    # Interaction between the parts

    def publish(self, version: Version) -> None:
        """Add a version, and wake all parts that depend on it."""
        self.catalogue.publish(version)
        self.agenda.wake(self.driver)
        self.wake_rollouts()

    def wake_rollouts(self) -> None:
        """Wake all rollouts."""
        for rollout in self.rollouts.values():
            self.agenda.wake(rollout)

    def open(self) -> None:
        """Start the measured window: the first prompt is put."""
        for recorder in self._recorders():
            recorder.reset(self.agenda.now)

    def close(self) -> None:
        """End the measured window: the last step is made."""
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

    def wake_colocated_trainer(self) -> None:
        """Wake a trainer that shares its devices, to check whether they are free."""
        if self.scenario.colocated is not None:
            self.agenda.wake(self.trainer)

    @property
    def generating(self) -> bool:
        """True while a rollout generates, loads weights or has rows."""
        return not all(rollout.is_idle for rollout in self.rollouts.values())

    def pull_s(self, version: Version) -> float:
        """Return the seconds of the next pull of a version."""
        if self.scenario.colocated is not None:
            return 0.0
        return self.scenario.models.link.seconds(self.catalogue.count_pull(version))

    def written_at(self, row: SimulatedRow) -> float:
        """Return the time at which a sample with its reward is complete in the queue."""
        storage = self.scenario.models.storage
        return self._moved_at(row.group.serial, [row]) + storage.write_s

    def fetched_at(self, ranks: list[list[SimulatedRow]]) -> float:
        """Return the time at which the trainer has received a slot that is decided now."""
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
        """Handle the request of a rollout to change the weights of ``version``."""
        self._permits.ask(rollout.worker, version=version.packed, now=self.agenda.now)
        self._grant()
        self._start_polling()

    def permit_over(self, rollout: SimulatedRollout) -> None:
        """Handle that a rollout has changed its weights, or no longer wants to."""
        self._permits.end(rollout.worker, now=self.agenda.now)
        self._grant()

    def _grant(self) -> None:
        by_worker = {rollout.worker: rollout for rollout in self.rollouts.values()}
        for worker in self._permits.grant(self._supply(), now=self.agenda.now):
            if worker in by_worker:
                by_worker[worker].permitted()

    def _start_polling(self) -> None:
        if not self._polling:
            self._polling = True
            self.agenda.after(_POLL_S, self._poll_permits)

    def _poll_permits(self) -> None:
        self._polling = False
        if not self.driver.over:
            self._grant()
            self._start_polling()

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

    # Rollouts that start and end

    def _join(self, index: int) -> None:
        rollout = SimulatedRollout(self, index, self._attempts[index])
        self._attempts[index] += 1
        self.rollouts[index] = rollout
        self.agenda.after(self.scenario.models.start.rollout_s, rollout.start)

    def _handle(self, event: RolloutEvent) -> None:
        start = self.scenario.models.start
        if event.what == "join":
            index = max(self.rollouts, default=-1) + 1
            self._mark("join", f"rollout-{index}")
            self._join(index)
            return
        rollout = self.rollouts.get(event.index)
        if rollout is None:
            return
        self._mark(event.what, f"rollout-{event.index}")
        del self.rollouts[event.index]
        killed = event.what == "kill"
        held = rollout.leave(killed=killed)
        self._permits.leave(rollout.worker)
        self._ended_recorders.append(rollout.recorder)
        self._redone += sum(tokens for _, tokens in held) if killed else 0
        for row, tokens in held:
            if killed:
                row.forget()
            else:
                row.mark(tokens, row.newest)
                row.generated = tokens
            row.started = row.ends = 0.0
        self.agenda.after(start.detect_s if killed else 0.0, self._give_back, [row for row, _ in held])
        if killed:
            self.agenda.after(start.restart_s, self._join, event.index)
        self._grant()

    def _give_back(self, rows: list[SimulatedRow]) -> None:
        for purpose, pool in self.pools.items():
            if own_rows := [row for row in rows if row.work.purpose == purpose]:
                pool.give_back(own_rows)

    def _mark(self, what: str, of: str) -> None:
        self._marks.append(Mark(at=self.agenda.now, what=what, of=of))

    # The end

    def _recorders(self) -> list[TrackRecorder]:
        return [
            self.driver.recorder,
            self.trainer.recorder,
            *(rollout.recorder for rollout in self.rollouts.values()),
            *self._ended_recorders,
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
