"""A cluster in memory: kubelets and a driver that do as they are ordered, and people who meddle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from model_api import ApiServer, CustomResource
from model_samples import JOB, QUEUE

from asyncflow.api.job import RLJob
from asyncflow.api.status import DriverStatus, Phase, RolloutState
from asyncflow.driver.status import last_words
from asyncflow_operator.observed import DriverProbe, PodView, Ref


@dataclass
class Cluster(ApiServer):
    """A node that has room for all, a driver, and people.

    probe: what the driver answered last; silent: UIDs of the pods whose nodes do not answer; drained: the rollouts that
    it told to leave; driver_attempt: the newest of the trainer that it knows; step: how far it is.
    """

    probe: DriverProbe = field(default_factory=DriverProbe)
    drained: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    suspending: bool = False
    driver_attempt: int = 0
    driver_phase: Phase = "Running"
    step: int = 0

    # Kubelets.

    def run(self, pod: PodView) -> None:
        """A pod gets a node and begins."""
        self._set(pod, phase="Running", node="node-1", scheduled=True, started=self.now)

    def become_ready(self, pod: PodView) -> None:
        """Its readiness probe answers."""
        self._set(pod, ready=True)
        if pod.role == "driver":
            self._new_driver()
        if pod.role == "trainer":
            self.driver_attempt = max(self.driver_attempt, pod.attempt)

    def end(self, pod: PodView, *, code: int, disrupted: bool = False, last_words: str = "") -> None:
        """Its process ends."""
        phase = "Succeeded" if code == 0 else "Failed"
        self._set(pod, phase=phase, ready=False, exit_code=code, finished=self.now, disrupted=disrupted, node="node-1")
        self._set(self.pods[pod.name], last_words=last_words)

    def vanish(self, pod: PodView) -> None:
        """It is gone without a trace."""
        del self.pods[pod.name]

    def lose_node_of(self, pod: PodView) -> None:
        """Its node no longer answers: the cluster says that it is not ready, and no deletion of it ends."""
        self.silent.add(pod.uid)
        self._set(pod, ready=False, unreachable=True)

    def give_nodes_up(self) -> None:
        """The cluster deletes what is on nodes that do not answer."""
        for pod in list(self.pods.values()):
            if pod.uid in self.silent and not pod.deleting:
                self.take(pod)

    def nodes_return(self) -> None:
        """All nodes answer again."""
        self.silent.clear()
        for pod in list(self.pods.values()):
            if pod.unreachable:
                self._set(pod, unreachable=False)

    def _set(self, pod: PodView, **changes: Any) -> None:
        self.pods[pod.name] = replace(pod, **changes)

    def with_role(self, role: str) -> list[PodView]:
        """Return the pods of a role."""
        return sorted((pod for pod in self.pods.values() if pod.role == role), key=lambda pod: pod.index)

    def kubelets_work(self) -> bool:
        """Bring every pod one step further, and return whether one moved."""
        moved = False
        for pod in list(self.pods.values()):
            if pod.uid in self.silent:
                continue
            if pod.deleting:
                self.vanish(pod)
            elif pod.phase == "Pending":
                self.run(pod)
            elif pod.phase == "Running" and not pod.ready:
                self.become_ready(pod)
            else:
                continue
            moved = True
        return moved

    # The driver.

    def _new_driver(self) -> None:
        self.drained.clear()
        self.suspending, self.driver_phase = False, "Running"

    @property
    def driver_up(self) -> bool:
        """Return whether the driver answers."""
        return any(pod.ready and pod.phase == "Running" for pod in self.with_role("driver"))

    def ask(self, path: str) -> None:
        """POST to the driver, which takes it if it can."""
        if not self.driver_up:
            return
        if path == "/v1/suspend":
            self.suspending = True
            return
        uid = path.removeprefix("/v1/rollouts/").removesuffix("/drain")
        self.drained |= {uid} & {pod.uid for pod in self._registered()}

    def _registered(self) -> list[PodView]:
        return [pod for pod in self.with_role("rollout") if pod.phase == "Running" and pod.ready]

    def look_at_driver(self) -> None:
        """The operator's background probe asks for the status."""
        if not self.driver_up:
            since = self.probe.failing_since or self.now
            self.probe = replace(self.probe, error="no answer", failing_since=since)
            return
        self.probe = DriverProbe(status=self._driver_status(), at=self.now)

    def _driver_status(self) -> DriverStatus:
        rollouts = tuple(
            RolloutState(
                id=pod.uid,
                index=pod.index,
                state="draining" if pod.uid in self.drained else "ready",
                version=self.step,
                inflight=(pod.index * 7) % 5,
            )
            for pod in self._registered()
        )
        return DriverStatus(
            attempt=self.driver_attempt,
            phase=self.driver_phase,
            step=self.step,
            steps=10,
            version=self.step,
            rollouts=rollouts,
        )

    def driver_works(self) -> None:
        """Carry out the orders: drained rollouts end; a job that is suspended ends, the driver last."""
        for pod in self._registered():
            if pod.uid in self.drained:
                self.end(pod, code=0)
        if self.suspending and self.driver_up:
            self.driver_phase = "Suspended"
            self._dismiss()

    def succeed(self) -> None:
        """The run comes to its end."""
        if self.driver_up:
            self.driver_phase = "Succeeded"
            self._dismiss()

    def _dismiss(self) -> None:
        self.look_at_driver()
        words = last_words(self._driver_status())
        for pod in sorted(self.pods.values(), key=lambda pod: pod.role == "driver"):
            if pod.phase == "Running":
                self.end(pod, code=0, last_words=words if pod.role == "driver" else "")

    # People.

    def edit(self, **changes: Any) -> None:
        """Change the job's spec, by dotted-free part: ``rollout={...}`` is merged into that part."""
        known = self.resources[JOB]
        spec = known.model.spec.model_dump(by_alias=True, mode="json", exclude_none=True)
        for part, value in changes.items():
            spec[part] = spec[part] | value if isinstance(value, dict) else value
        owner = replace(known.owner, generation=known.owner.generation + 1)
        model = RLJob.model_validate(
            known.model.model_dump(by_alias=True, mode="json", exclude_none=True) | {"spec": spec}
        )
        self.resources[JOB] = replace(known, owner=owner, model=model)

    def refuse(self, problem: str, reason: str) -> None:
        """Change the job's spec to one that is refused, or with "" to one that is not."""
        known = self.resources[JOB]
        owner = replace(known.owner, generation=known.owner.generation + 1)
        self.resources[JOB] = replace(known, owner=owner, problem=problem, problem_reason=reason)

    def scale_queue(self, units: int) -> None:
        """Change the job's own queue, as kubectl scale does: the number is no longer a field of the operator."""
        known = self.resources[QUEUE]
        model = known.model.model_copy(update={"spec": known.model.spec.model_copy(update={"storage_units": units})})
        owner = replace(known.owner, generation=known.owner.generation + 1)
        self.resources[QUEUE] = CustomResource(owner, model, known.status)
        self.meddle(QUEUE)

    def meddle(self, ref: Ref) -> None:
        """Change a field of an object that the operator has written."""
        self.objects[ref] = replace(self.objects[ref], held='{"f:other":{}}')
