"""An operator that is killed at a write, as a process, leaves nothing that the next one could not go on from."""

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from proxy import KillingProxy
from scripted_driver import ScriptedDrivers
from world import World

import operator_rights
from kube.plane import ControlPlane
from operator_process import OperatorProcess

SAMPLES = 5
Stage = dict[str, Any]


class Life:
    """A job's whole life in a namespace of its own, under an operator that may be killed again and again."""

    def __init__(self, plane: ControlPlane, drivers: ScriptedDrivers, proxy: KillingProxy, name: str) -> None:
        self.world = World.new(plane, name)
        self.name = name
        self.proxy = proxy
        self._driver = drivers.of(name, "quickstart")
        self._deadly: list[int] = []
        self.deaths = 0
        operator_rights.grant(plane, self.world.namespace)
        self.operator = OperatorProcess(
            plane,
            name,
            kubeconfig=proxy.kubeconfig,
            namespace=self.world.namespace,
            namespaces=self.world.namespace,
            probe_url=drivers.url,
            probe_seconds=1,
        )

    def run(self, deadly: list[int]) -> list[Stage]:
        """Live, the operator being killed at each of these writes; return how things stood after each stage."""
        self._deadly = sorted(deadly)
        self._start()
        return list(self._stages())

    def made(self) -> Counter[tuple[str, str]]:
        """Return how often each object was made, events aside."""
        return Counter(
            (each.resource, _of_any_job(each.name))
            for each in operator_rights.of(self.world.plane, self.name)
            if each.code == 201 and each.resource not in ("events", "leases")
        )

    def history(self, made: Collection[tuple[str, str]]) -> list[str]:
        """Say what anybody wrote of these objects, in the order of the answers."""
        written = [
            each
            for each in self.world.plane.requests()
            if each.namespace == self.world.namespace
            and each.is_write
            and (each.resource, _of_any_job(each.name)) in made
        ]
        return [f"{each.at:%X.%f} {each.user} {each.verb} {each.name} {each.code}" for each in written]

    def _stages(self) -> Iterator[Stage]:
        world = self.world

        def short_lived(spec: dict[str, Any]) -> None:
            spec["limits"] = {"ttlSecondsAfterFinished": 2}

        world.apply(short_lived)
        yield self._after("begins", lambda: world.is_whole() and world.phase() == "Running")
        world.annotate("quickstart-rollout-1", exit="1")
        yield self._after(
            "loses a rollout", lambda: world.is_whole() and world.attempts()["quickstart-rollout-1"] == "1"
        )
        world.annotate("quickstart-storage-0", exit="1")
        world.annotate("quickstart-trainer-0", exit="137", exit_reason="OOMKilled")
        yield self._after(
            "loses its trainer and a unit",
            lambda: world.is_whole() and set(world.attempts("trainer").values()) == {"1"},
        )
        world.kubectl("scale", "rlj/quickstart", "--replicas=4")
        yield self._after("grows", lambda: world.is_whole(rollout=4))
        world.kubectl("scale", "rlj/quickstart", "--replicas=1")
        yield self._after("shrinks", lambda: world.is_whole(rollout=1))
        world.edit(suspend=True)
        self._until("has its driver told", lambda: "/v1/suspend" in self._driver.asked)
        self._driver.say(phase="Suspended")
        yield self._after("is suspended", lambda: world.phase() == "Suspended" and not world.pods())
        self._driver.say(phase="Running")
        world.edit(suspend=False)
        yield self._after("is resumed", lambda: world.is_whole(rollout=1) and world.phase() == "Running")
        world.annotate("quickstart-driver-0", exit="0")
        self._until("has ended and is gone", lambda: not world.exists() and not world.objects())

    def _after(self, what: str, goal: Callable[[], object]) -> Stage:
        self._until(what, goal)
        world = self.world
        return {
            "stage": what,
            "objects": {(plural, _of_any_job(name)) for plural, name in world.objects()},
            "attempts": world.attempts(),
            "restarts": world.restarts(),
        }

    def _until(self, what: str, goal: Callable[[], object]) -> None:
        """Wait for ``goal``; an operator that was started again has as much time as the one before."""
        deaths = -1
        while deaths != self.deaths:
            deaths = self.deaths
            self.world.until(partial(self._died_or, deaths, goal), f"a job that {what}")

    def _died_or(self, deaths: int, goal: Callable[[], object]) -> bool:
        return self._alive() and (self.deaths > deaths or bool(goal()))

    def _alive(self) -> bool:
        """Start the operator again where it was killed."""
        if self.operator.process.died():
            assert self.operator.process.died().startswith(f"{self.name} ended with -9")
            self.operator.process.end()
            self.deaths += 1
            self._start()
        return True

    def _start(self) -> None:
        deadly = self._deadly.pop(0) if self._deadly else 0
        answered = len(self._deadly) % 2 == 0
        self.proxy.arm(deadly, answered=answered, victim=lambda: self.operator.process.pid)
        self.operator.process.start()


def _of_any_job(name: str) -> str:
    """Return the name of an object without what distinguishes jobs of one name: the mark of a Secret's name."""
    return re.sub("-(keys|tls-[a-z]+)-[0-9a-f]{16}$", r"-\1", name)


@pytest.fixture
def life(kwok_plane: ControlPlane, drivers: ScriptedDrivers, tmp_path: Path) -> Iterator[Callable[[str], Life]]:
    """Makes lives; their operators and namespaces are gone afterwards."""
    begun: list[Life] = []
    proxies: list[KillingProxy] = []

    def begin(name: str) -> Life:
        proxy = KillingProxy(operator_rights.account(kwok_plane, name), tmp_path)
        proxies.append(proxy.__enter__())
        begun.append(Life(kwok_plane, drivers, proxy, name))
        return begun[-1]

    yield begin
    for each in begun:
        each.operator.process.end()
        kwok_plane.api.delete(f"/api/v1/namespaces/{each.world.namespace}")
    for proxy in proxies:
        proxy.__exit__()


@pytest.mark.timeout(480)
def test_killed_at_five_writes_of_a_jobs_life_it_makes_the_same_objects_as_often(life: Callable[[str], Life]) -> None:
    """The writes are drawn with a fixed seed; after half of them the operator dies before it has the answer.

    Status writes coalesce, so a life may have a few less than the one before: the last tenth is left out.
    """
    undisturbed = life("life-undisturbed")
    reference = undisturbed.run([])
    writes = undisturbed.proxy.writes * 9 // 10
    killed = life("life-killed")
    stages = killed.run(random.Random(4).sample(range(1, writes), SAMPLES))
    assert killed.deaths == SAMPLES
    assert stages == reference
    differently = dict(killed.made().items() ^ undisturbed.made().items())
    assert not differently, {each.name: each.history(differently) for each in (killed, undisturbed)}
