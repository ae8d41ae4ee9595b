"""The simulated trainer: slots of a step as they become ready, its loops, publications and checkpoints.

It does the same as ``training.trainer``: the next slot is decided and fetched while the current one is computed; the
whole of D_k is collected first if the schedule requires it; a publication runs concurrently with the next step, which
changes the weights only after they are copied.

Invariants: steps are made in order, each from exactly the groups that belong to it. Versions are published in order.
Every second is attributed to one of the same kinds of spans as in a real trainer.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from asyncflow.flow.slots import SlotRequest, next_slot, weight_of
from asyncflow.identity import Version
from asyncflow.sim.recorder import TrackRecorder
from asyncflow.sim.result import SimulatedStep
from asyncflow.sim.rows import SimulatedGroup, SimulatedRow

if TYPE_CHECKING:
    from asyncflow.sim.run import World


class DealtSlot(NamedTuple):
    """One micro-batch of each rank. last: whether it completes the step."""

    ranks: list[list[SimulatedRow]]
    last: bool


class SimulatedTrainer:
    """The gang. step: the last completed step; figures: of all completed steps."""

    def __init__(self, world: World) -> None:
        scenario = world.scenario
        self.step = 0
        self.figures: list[SimulatedStep] = []
        self.recorder = TrackRecorder("trainer", 0, 0, now=world.agenda.now, keeps=world.keeps)
        self._world = world
        self._agenda = world.agenda
        self._model = scenario.models.trainer
        self._request = SlotRequest(
            scenario.ranks, scenario.slot_tokens, groups=scenario.whole_groups, shared=scenario.shared_prompt
        )
        self._whole = scenario.schedule.whole_steps or scenario.whole_steps
        self._ready: defaultdict[int, list[SimulatedGroup]] = defaultdict(list)
        self._accepting = self._fetching = self._computing = self._exhausted = self._owns_devices = False
        self._start_step()
        self._since = (0.0, self._spent())
        self._copied_at = self._announced_at = 0.0

    def start(self) -> None:
        """Publish θ_0 and start."""
        self._publish(0)
        self._agenda.at(self._announced_at, self._started)

    def offer(self, group: SimulatedGroup) -> None:
        """Receive a group that can be trained."""
        self._ready[group.step].append(group)
        self._agenda.wake(self)

    def ready(self) -> int:
        """Return the number of samples that can be trained and are not yet in a slot."""
        return sum(len(group.rows) for groups in self._ready.values() for group in groups)

    def react(self) -> None:
        """Fetch the next slot, and compute a fetched one."""
        if not self._accepting:
            return
        self._fetch()
        if self._computing or not self._slots or (self._whole and not self._slots[-1].last):
            return
        if self._world.scenario.colocated is not None and not self._owns_devices:
            if self._world.generating:
                return
            self._owns_devices = True
            self._computing = True
            seconds = self._world.scenario.colocated.to_train_s
            self.recorder.turn(self._agenda.now, "swap", step=self.step + 1, version=self.step)
            self._agenda.after(seconds, self._devices_ready)
            return
        self._compute()

    def _devices_ready(self) -> None:
        self._computing = False
        self._agenda.wake(self)

    def _started(self) -> None:
        self._since = (self._agenda.now, self._spent())
        self._wait_for_slot()

    def _wait_for_slot(self) -> None:
        self._accepting = True
        self.recorder.turn(self._agenda.now, "idle", waits="claim", step=self.step + 1, version=self.step)
        self._agenda.wake(self)

    def _start_step(self) -> None:
        self._bound = 0
        self._fetching = self._computing = self._exhausted = self._owns_devices = False
        self._slots: list[DealtSlot] = []
        self._carry: list[SimulatedRow] = []
        self._rows: list[SimulatedRow] = []
        self._loads = [0] * self._world.scenario.ranks
        self._slot_count = 0

    def _fetch(self) -> None:
        """Decide and fetch the next slot: one in advance, or all slots of a step that is collected whole."""
        if self._fetching or self._exhausted or (self._slots and not self._whole):
            return
        if (slot := self._decide()) is not None:
            self._fetching, self._exhausted = True, slot.last
            now, fetched = self._agenda.now, self._world.fetched_at(slot.ranks)
            if fetched > now:
                self.recorder.background("fetch", now, fetched, step=self.step + 1)
            self._agenda.at(fetched, self._fetched, slot)

    def _fetched(self, slot: DealtSlot) -> None:
        self._fetching = False
        self._slots.append(slot)
        self._agenda.wake(self)

    def _decide(self) -> DealtSlot | None:
        scenario, ready = self._world.scenario, self._ready[self.step + 1]
        room = scenario.prompts_per_step - self._bound
        if (self._whole and len(ready) < room) or (room and not ready and not self._carry):
            return None
        if self._whole:
            ready.sort(key=_serial)
        chosen = next_slot(
            self._carry,
            (group.rows for group in ready[:room]),
            self._request,
            before=self._loads,
            complete=len(ready) >= room,
        )
        selected = {row for rank in chosen for row in rank}
        opened_groups = [group for group in ready if not selected.isdisjoint(group.rows)]
        self._bound += len(opened_groups)
        self._ready[self.step + 1] = [group for group in ready if group not in opened_groups]
        opened = [*self._carry, *(row for group in opened_groups for row in group.rows)]
        self._carry = [row for row in opened if row not in selected]
        self._loads = [load + self._weight(rows) for load, rows in zip(self._loads, chosen, strict=True)]
        return DealtSlot(chosen, last=not self._carry and self._bound == scenario.prompts_per_step)

    def _weight(self, rows: list[SimulatedRow]) -> int:
        return weight_of(rows, shared=self._request.shared)

    def _compute(self) -> None:
        self._computing = True
        slot = self._slots.pop(0)
        model = self._model
        self._slot_count += 1
        self._rows += [row for rank in slot.ranks for row in rank]
        samples = max(map(len, slot.ranks))
        tokens = max(map(self._weight, slot.ranks))
        seconds = model.slot_s + model.sample_s * samples + model.token_s * tokens
        self.recorder.turn(self._agenda.now, "compute", step=self.step + 1, version=self.step)
        self._agenda.after(seconds * self._world.scenario.passes, self._computed, slot.last)

    def _computed(self, last: bool) -> None:
        self._computing = False
        if last:
            self._accepting = False
            self.recorder.turn(self._agenda.now, "publish", step=self.step + 1, version=self.step)
            self._agenda.at(self._copied_at, self._optimize)
        elif self._slots:
            self._agenda.wake(self)
        else:
            self._wait_for_slot()

    def _optimize(self) -> None:
        self.recorder.turn(self._agenda.now, "optimizer", step=self.step + 1, version=self.step)
        self._agenda.after(self._model.optimizer_s, self._optimized)

    def _optimized(self) -> None:
        self.step += 1
        if not self._world.driver.schedule.publishes(self.step):
            self._report()
            return
        self.recorder.turn(self._agenda.now, "publish", step=self.step, version=self.step - 1)
        self._agenda.at(self._announced_at, self._published)

    def _published(self) -> None:
        self._publish(self.step)
        self._report()

    def _publish(self, step: int) -> None:
        now, colocated = self._agenda.now, self._world.scenario.colocated
        self._copied_at = now + (0.0 if colocated is not None else self._model.copy_s)
        self._announced_at = now + (0.0 if colocated is not None else max(self._model.copy_s, self._model.publish_s))
        self.recorder.background("publish", now, self._announced_at, step=step, version=step)
        self._agenda.at(self._announced_at, self._world.publish, Version(0, step))

    def _report(self) -> None:
        now, scenario = self._agenda.now, self._world.scenario
        (since, before), spent = self._since, self._spent()
        self._since = (now, spent)
        seconds = {each: value - before.get(each, 0.0) for each, value in spent.items()}
        lag = self.step - 1
        starts, ends = [lag - row.oldest for row in self._rows], [lag - row.newest for row in self._rows]
        response = sum(row.response_tokens for row in self._rows)
        self.figures.append(
            SimulatedStep(
                step=self.step,
                ended=now,
                wall_s=now - since,
                wait_s=seconds.get(("idle", "claim"), 0.0),
                compute_s=seconds.get(("compute", ""), 0.0),
                optimizer_s=seconds.get(("optimizer", ""), 0.0),
                publish_s=seconds.get(("publish", ""), 0.0),
                checkpoint_s=seconds.get(("checkpoint", ""), 0.0),
                samples=len(self._rows),
                tokens=sum(row.weight for row in self._rows),
                response_tokens=response,
                staleness_start_max=max(starts),
                staleness_start_mean=sum(starts) / len(starts),
                staleness_end_max=max(ends),
                staleness_end_mean=sum(ends) / len(ends),
                staleness_token_mean=lag - sum(row.weighted for row in self._rows) / max(1, response),
                slots=self._slot_count,
            )
        )
        self._world.driver.report(self.step)
        last, every = self.step == scenario.steps, scenario.checkpoint_every
        if last:
            self._world.close()
        self._start_step()
        if last or (every and self.step % every == 0):
            self.recorder.turn(now, "checkpoint", step=self.step, version=self.step - 1)
            self._agenda.after(self._model.checkpoint_s, self._end if last else self._wait_for_slot)
        else:
            self._wait_for_slot()

    def _end(self) -> None:
        self.recorder.turn(self._agenda.now, "idle", waits="end")

    def _spent(self) -> dict[tuple[str, str], float]:
        return self.recorder.spent(self._agenda.now)


def _serial(group: SimulatedGroup) -> int:
    return group.serial
