"""The simulated driver: admission of prompts, finished groups, evaluations.

Invariants: the rules are those of ``flow``, the same objects as in ``driver``. Each prompt is trained once, in the step
that ``flow.assignment`` determines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.flow.admission import InFlight, admit
from asyncflow.flow.assignment import PromptAssignment
from asyncflow.flow.instance import Purpose
from asyncflow.flow.schedule import VersionWindow
from asyncflow.identity import SampleKey
from asyncflow.rollout.sampling import purpose_seed
from asyncflow.sim.recorder import TrackRecorder
from asyncflow.sim.rows import SimulatedGroup, SimulatedRow

if TYPE_CHECKING:
    from asyncflow.sim.run import World


class SimulatedDriver:
    """The simulated driver.

    reported: the newest reported step; opened: time of the first prompt, None before; evaluated: evaluated steps.
    """

    def __init__(self, world: World) -> None:
        scenario = world.scenario
        self.recorder = TrackRecorder("driver", 0, 0, now=world.agenda.now, keeps=world.keeps)
        self.reported = 0
        self.opened: float | None = None
        self.evaluated: set[int] = set()
        self.schedule = scenario.plan
        self.assignment = PromptAssignment(prompts_per_step=scenario.prompts_per_step, steps=scenario.steps)
        self._world = world
        self._policies = scenario.admission
        self._completion = scenario.schedule.fill == "completion"
        self._evaluations = self.schedule.evaluations() if scenario.evaluation is not None else []
        self._groups: dict[int, SimulatedGroup] = {}
        self._held: dict[int, list[SimulatedGroup]] = {}
        self._prompts_left: dict[int, int] = {}
        self._evaluated_from: dict[int, float] = {}
        self._lengths = scenario.models.engine.lengths
        self._seeds = {purpose: purpose_seed(world.seed, purpose) for purpose in ("train", "eval")}

    @property
    def over(self) -> bool:
        """True once every step is reported and every evaluation is complete."""
        return self.reported == self.schedule.steps and len(self.evaluated) == len(self._evaluations)

    def react(self) -> None:
        """Put the prompts and evaluations that may be put now."""
        world, newest = self._world, self._world.catalogue.newest
        if newest is None:
            self.recorder.turn(world.agenda.now, "idle", waits="version")
            return
        self._evaluate()
        assignment = self.assignment
        put: list[int] = []
        flow = InFlight(published=newest.step, dispatched=assignment.dispatched, running=assignment.running)
        while len(put) < admit(self._policies, flow) and (pair := assignment.issue()) is not None:
            put.append(pair[0])
            self._put(*pair)
        if put:
            assignment.mark_put(put)
            if self.opened is None:
                self.opened = world.agenda.now
                world.open()
        self._record()
        if world.catalogue.require(self._required()):
            world.wake_rollouts()

    def _record(self) -> None:
        """Record why no more prompts are dispatched, as ``driver.dispatch`` does."""
        waits = "admission" if self.schedule.lag else "version"
        self.recorder.turn(self._world.agenda.now, "idle", waits="dispatched" if self.assignment.full else waits)

    def report(self, step: int) -> None:
        """Record that the trainer has made a step."""
        self.reported = step
        self._world.agenda.wake(self)

    def done(self, row: SimulatedRow) -> None:
        """Record a finished sample."""
        group = row.group
        group.left -= 1
        if group.left:
            return
        if group.purpose == "eval":
            self._prompts_left[group.step] -= 1
            if not self._prompts_left[group.step]:
                now = self._world.agenda.now
                self.recorder.background("evaluation", self._evaluated_from[group.step], now, step=group.step)
                self.evaluated.add(group.step)
                self._world.agenda.wake(self)
        else:
            self._world.agenda.after(self._world.scenario.models.storage.decide_s, self._decide, group)

    def _put(self, serial: int, step: int) -> None:
        scenario = self._world.scenario
        group = self._group(serial, step, "train", self.schedule.window(step), scenario.group_size)
        self._groups[serial] = group
        self._offer(group)

    def _offer(self, group: SimulatedGroup) -> None:
        """Put a group into the queue, with the delay of the storage model."""
        pool, put_s = self._world.pools[group.purpose], self._world.scenario.models.storage.put_s
        if put_s:
            self._world.agenda.after(put_s, pool.put, group)
        else:
            pool.put(group)

    def _group(self, serial: int, step: int, purpose: Purpose, window: VersionWindow, size: int) -> SimulatedGroup:
        scenario, seed = self._world.scenario, self._seeds[purpose]
        group = SimulatedGroup(serial=serial, step=step, purpose=purpose, window=window, left=size)
        for sample in range(size):
            tokens = self._lengths.of(SampleKey(serial, sample), seed=seed, most=scenario.max_tokens)
            group.rows.append(SimulatedRow(group, sample, tokens=scenario.models.prompt_tokens, response_tokens=tokens))
        group.open = list(group.rows)
        return group

    def _decide(self, group: SimulatedGroup) -> None:
        """Pass a finished group to the trainer, together with the groups that must be complete with it."""
        assignment, schedule = self.assignment, self.schedule
        assignment.finish(group.serial)
        late = assignment.late(group.serial, alike=schedule.window) if self._completion else None
        if late is not None:
            step, serial = late
            assignment.exchange(group.serial, serial)
            self._groups[serial].step, group.step = group.step, step
        self._held.setdefault(group.step, []).append(group)
        for step in [step for step in self._held if assignment.complete_together(schedule.together(step))]:
            for each in self._held.pop(step):
                del self._groups[each.serial]
                self._world.trainer.offer(each)
        self._world.agenda.wake(self)

    def _evaluate(self) -> None:
        load = self._world.scenario.evaluation
        if load is None:
            return
        for place, step in enumerate(self._evaluations):
            if step in self._prompts_left or step > self.reported or self._world.catalogue.find(step) is None:
                continue
            self._prompts_left[step] = load.prompts
            self._evaluated_from[step] = self._world.agenda.now
            for prompt in range(load.prompts):
                serial = place * load.prompts + prompt
                group = self._group(serial, step, "eval", VersionWindow(step, step), load.group_size)
                self._offer(group)

    def _required(self) -> set[int]:
        """Return the steps of the versions that unfinished work needs."""
        catalogue = self._world.catalogue
        newest = -1 if catalogue.newest is None else catalogue.newest.step
        left = [
            step
            for step in self._evaluations
            if step not in self.evaluated and (step > newest or catalogue.find(step) is not None)
        ]
        unfinished = self.assignment.unfinished(trained_step=self.reported)
        return self.schedule.required(unfinished) | set(left)
