import asyncio
import base64
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncflow.api.base import MOST_REPLICAS
from asyncflow.api.status import (
    BestState,
    CheckpointState,
    CorrectionFigures,
    DriverStatus,
    QueueDepth,
    RecentFigures,
    RewardState,
    RolloutState,
    SetState,
    Staleness,
    StepProgress,
    TaskState,
)
from asyncflow.api.versions import (
    LAG_BUCKETS,
    MOST_FLEET_NAME,
    MOST_FLEETS,
    MOST_LAGGARDS,
    Laggard,
    PhaseSeconds,
    VersionCount,
    VersionsState,
)
from asyncflow.plan.certificates import period_of
from asyncflow_operator import drivers
from asyncflow_operator.desired.objects import family_of
from asyncflow_operator.desired.secrets import OwnerSecrets, SecretPart
from asyncflow_operator.drivers import ROLLOUT_BYTES, STATUS_BYTES, Drivers, RunningDriver
from asyncflow_operator.observed import Owner

OWNER = Owner(kind="RLJob", namespace="ns", name="j", uid="u")
LARGEST = 2**53 - 1
MASTER = b"m" * 32
NOW = period_of(time.time())


def context_of(folder: Path, role: str, owner: Owner = OWNER) -> ssl.SSLContext:
    """Return the side of a server that is process 0 of ``role``, as its pod sees its Secret."""
    part = SecretPart(role=role, leaves=1, period=NOW)
    for name, value in OwnerSecrets(owner, MASTER).make(family_of(owner), part)["data"].items():
        (folder / name).write_bytes(base64.b64decode(value))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "0.crt", folder / "0.key")
    return context


def driver_of(name: str = "j", *, pod: str = "pod-1", rollouts: int = 0) -> RunningDriver:
    owner = Owner(kind="RLJob", namespace="ns", name=name, uid="u" if name == "j" else f"u-{name}")
    return RunningDriver(owner=owner, pod=pod, host="127.0.0.1", rollouts=rollouts)


class World:
    """A driver that answers as it is told, and whoever asks it. posted: the path of each order, and who gave it."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self.tls = tls
        self.status = DriverStatus(phase="Running", step=1, steps=9)
        self.answer: Callable[[web.Request], Awaitable[web.Response]] = self.tell
        self.asked = 0
        self.running = [driver_of()]
        self.changed: list[Owner] = []
        self.posted: list[tuple[str, str]] = []
        self.ordered: list[str] = []

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{name}/v1/status", self._get)
        app.router.add_post("/{name}/{path:.*}", self._post)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        await web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        plain, secure = (address[1] for address in self.runner.addresses)
        self.drivers = Drivers(
            url=f"http://127.0.0.1:{plain}/{{name}}",
            control_url=f"https://127.0.0.1:{secure}/{{name}}",
            every_s=0.01,
            certificate=lambda owner: OwnerSecrets(owner, MASTER).operator(NOW),
            running=lambda: self.running,
            changed=self.changed.append,
            ordered=self.ordered.append,
        )
        self.task = asyncio.create_task(self.drivers.run())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.runner.cleanup()

    async def tell(self, _: web.Request) -> web.Response:
        return web.json_response(text=self.status.model_dump_json(by_alias=True))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    async def _get(self, request: web.Request) -> web.Response:
        self.asked += 1
        return await self.answer(request)

    async def _post(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        assert "Authorization" not in request.headers
        names = request.transport.get_extra_info("peercert")["subjectAltName"]
        (uri,) = [name for kind, name in names if kind == "URI"]
        self.posted.append((request.match_info["path"], uri))
        return web.json_response({}, status=202 if "suspend" in request.match_info["path"] else 409)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(context_of(tmp_path, "driver"))
    await world.start()
    yield world
    await world.end()


async def test_a_change_of_phase_is_reported_at_once_and_progress_is_not(world: World) -> None:
    await world.until(lambda: world.drivers.probe("u").status)
    assert world.changed == [OWNER]
    world.status = world.status.model_copy(update={"step": 2})
    await world.until(lambda: world.drivers.probe("u").status.step == 2)
    assert world.changed == [OWNER]
    world.status = world.status.model_copy(update={"phase": "Suspended"})
    await world.until(lambda: len(world.changed) == 2)


async def test_progress_is_reported_after_a_while_also_if_it_has_ended_since(world: World, monkeypatch: Any) -> None:
    await world.until(lambda: world.changed)
    world.status = world.status.model_copy(update={"step": 2})
    await world.until(lambda: world.drivers.probe("u").status.step == 2)
    monkeypatch.setattr(drivers, "MATTERS_S", 0.0)
    await world.until(lambda: len(world.changed) == 2)


async def test_a_rollout_that_comes_or_changes_is_reported(world: World) -> None:
    await world.until(lambda: world.changed)
    world.status = world.status.model_copy(update={"rollouts": (RolloutState(id="r0"),)})
    await world.until(lambda: len(world.changed) == 2)
    world.status = world.status.model_copy(update={"rollouts": (RolloutState(id="r0", state="ready"),)})
    await world.until(lambda: len(world.changed) == 3)


async def test_a_driver_that_fails_keeps_its_last_answer_and_says_why_and_since_when(world: World) -> None:
    await world.until(lambda: world.drivers.probe("u").status)

    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    world.answer = broken
    await world.until(lambda: world.drivers.probe("u").error)
    failed = world.drivers.probe("u")
    assert failed.status is not None
    assert "HTTP 500" in failed.error
    assert failed.failing_since is not None
    world.answer = world.tell
    await world.until(lambda: not world.drivers.probe("u").error)
    assert world.drivers.probe("u").failing_since is None


async def test_a_driver_that_fails_does_so_since_no_future_time_when_the_clock_is_set_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    world.answer = broken
    await world.until(lambda: world.drivers.probe("u").error)
    hour_ago = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: hour_ago)
    await world.until(lambda: world.drivers.probe("u").failing_since == hour_ago)


@pytest.mark.parametrize("text", ["{", '{"phase": "Dancing"}', "x" * (5 << 20)])
async def test_an_answer_that_is_none_is_an_error_and_no_crash(world: World, text: str) -> None:
    async def nonsense(_: web.Request) -> web.Response:
        return web.json_response(text=text)

    world.answer = nonsense
    await world.until(lambda: world.drivers.probe("u").error)
    assert world.drivers.probe("u").status is None


async def test_a_driver_that_is_gone_is_forgotten_and_asked_no_more(world: World) -> None:
    await world.until(lambda: world.drivers.probe("u").status)
    world.running = []
    await world.until(lambda: world.drivers.probe("u").status is None)
    asked = world.asked
    await asyncio.sleep(0.05)
    assert world.asked == asked


async def test_another_pod_is_another_driver_of_which_nothing_is_known(world: World) -> None:
    await world.until(lambda: world.drivers.probe("u").status)
    assert world.drivers.probe("u").pod == "pod-1"
    world.answer = never
    world.running = [driver_of(pod="pod-2")]
    await world.until(lambda: world.drivers.probe("u").pod == "pod-2")
    assert not world.drivers.probe("u").asked


async def never(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response()


async def test_an_order_is_given_as_the_operator_and_a_refused_one_is_reported(world: World, monkeypatch: Any) -> None:
    monkeypatch.setattr(drivers, "_RETRY_S", 0.05)
    await world.until(lambda: world.changed)
    world.drivers.order(OWNER, "/v1/suspend")
    await world.until(lambda: world.ordered == ["ok"])
    assert world.posted == [("v1/suspend", "asyncflow://u/operator/0")]
    assert world.changed == [OWNER]
    world.drivers.order(OWNER, "/v1/rollouts/r0/drain")
    world.drivers.order(OWNER, "/v1/rollouts/r1/drain")
    await world.until(lambda: len(world.changed) == 2)
    assert world.ordered == ["ok", "failed"]
    assert len(world.posted) == 2


@pytest.mark.parametrize(
    ("role", "uid", "why"),
    [
        ("rollout", "u", "another process than asyncflow://u/driver/0 answers"),
        ("driver", "v", "certificate verify failed"),
    ],
)
async def test_an_order_is_told_to_nobody_but_the_jobs_driver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, role: str, uid: str, why: str
) -> None:
    world = World(context_of(tmp_path, role, Owner(kind="RLJob", namespace="ns", name="j", uid=uid)))
    await world.start()
    await world.until(lambda: world.changed)
    world.drivers.order(OWNER, "/v1/suspend")
    await world.until(lambda: world.ordered == ["failed"])
    await world.end()
    assert world.posted == []
    assert why in " ".join(str(vars(record).get("why")) for record in caplog.records).replace("_", " ").lower()


async def test_an_order_to_a_driver_that_does_not_run_is_reported_later(world: World, monkeypatch: Any) -> None:
    monkeypatch.setattr(drivers, "_RETRY_S", 0.05)
    stranger = driver_of("k").owner
    world.drivers.order(stranger, "/v1/suspend")
    await world.until(lambda: stranger in world.changed)
    assert world.posted == []


async def test_a_driver_is_asked_one_thing_at_a_time(world: World) -> None:
    world.answer = never
    await world.until(lambda: world.asked == 1)
    await asyncio.sleep(0.1)
    assert world.asked == 1


async def test_drivers_that_keep_one_waiting_have_slots_of_their_own(world: World, monkeypatch: Any) -> None:
    monkeypatch.setattr(drivers, "AT_ONCE", 1)
    monkeypatch.setattr(drivers, "PROVEN_S", 0.1)
    monkeypatch.setattr(drivers, "ANSWER_S", 60.0)
    await world.end()
    await world.start()
    asked: Counter[str] = Counter()

    async def answer(request: web.Request) -> web.Response:
        asked[request.match_info["name"]] += 1
        return await (never if "slow" in request.path else world.tell)(request)

    world.answer = answer
    await asyncio.sleep(0.2)
    world.running += [driver_of("slow-1"), driver_of("slow-2")]
    await world.until(lambda: asked["slow-1"])
    before = asked["j"]
    await world.until(lambda: asked["j"] >= before + 20)
    assert asked["slow-1"] + asked["slow-2"] == 1


def largest(rollouts: int) -> DriverStatus:
    """Return the longest status that is legal."""
    state = RolloutState(id="r" * 128, index=LARGEST, state="starting", version=LARGEST, inflight=LARGEST)
    late = Laggard(id="r" * 128, version=LARGEST, lag=LARGEST, cause="\x00" * 128)
    longest, line = -1.2345678901234567e-300, "\x00" * 1024
    depth = QueueDepth(ready=LARGEST, leased=LARGEST, staged=LARGEST, bytes=LARGEST, limit=LARGEST)
    failed = {f"{number:02}" + "\x00" * 30: LARGEST for number in range(64)}
    four = dict(list(failed.items())[:4])
    task = TaskState(
        role="\x00" * 64,
        replicas=LARGEST,
        ready=LARGEST,
        leased=LARGEST,
        done=LARGEST,
        failed=four,
        first_failure="\x00" * 256,
    )
    equal = {"groups_all_right": LARGEST, "groups_all_wrong": LARGEST}
    rewards = RewardState(scored=LARGEST, failed=failed, first_failure="\x00" * 2048, **equal)
    counts = dict.fromkeys(("step", "samples", "generated", "filtered", "trained", "running", "publishing"), LARGEST)
    progress = StepProgress(**counts, tokens_per_second=-longest, saving=False)
    small = 1.2345678901234567e-300
    passed = {str(k): small for k in range(1017, 1025)}
    of_a_set = {"accuracy": small, "greedy": small, "reward": longest, "pass_at": passed}
    versions = VersionsState(
        rollouts=LARGEST,
        followers=LARGEST,
        behind=LARGEST,
        serving=(VersionCount(version=LARGEST, instances=LARGEST),) * LAG_BUCKETS,
        lag=(LARGEST,) * LAG_BUCKETS,
        laggards=(late,) * MOST_LAGGARDS,
        bytes=LARGEST,
        wire_bytes=LARGEST,
        seconds=PhaseSeconds(publish=-longest, transfer=-longest, stage=-longest, swap=-longest),
    )
    return DriverStatus(
        attempt=1_000_000_000,
        phase="Suspending",
        insecure=False,
        step=LARGEST,
        steps=LARGEST,
        reward=longest,
        reward_components={f"{number:02}" + "n" * 61: longest for number in range(16)},
        eval=longest,
        eval_greedy=longest,
        eval_reward=longest,
        eval_pass_at=passed,
        eval_sets={f"{number:02}" + "n" * 61: SetState(**of_a_set) for number in range(16)},
        best=BestState(step=LARGEST, by="accuracy", value=longest),
        tokens_per_second=-longest,
        eta_seconds=-longest,
        last_step_at="\x00" * 35,
        step_p95=-longest,
        staleness=Staleness(start=longest, end=longest, mean=longest),
        version=LARGEST,
        queue=depth,
        trainer_wait_share=-longest,
        recent=RecentFigures(
            since=LARGEST,
            wait_share=-longest,
            busy_share=-longest,
            slot_share=-longest,
            tokens_per_second=-longest,
            tokens_per_sample=-longest,
        ),
        idle_share={f"{number:02}" + "\x00" * 62: longest for number in range(16)},
        rollouts=(state,) * rollouts,
        checkpoint=CheckpointState(step=LARGEST, at="\x00" * 35),
        prompts_skipped=LARGEST,
        rewards=rewards,
        tasks={f"{number:02}" + "n" * 61: task for number in range(8)},
        step_progress=progress,
        waiting_for=line,
        desired_rollouts=LARGEST,
        correction=CorrectionFigures(effective_share=-longest, bounded_share=-longest),
        versions=versions,
        fleets={f"{number}" + "\x00" * (MOST_FLEET_NAME - 1): versions for number in range(MOST_FLEETS)},
    )


@pytest.mark.parametrize("rollouts", [0, 1, 100, MOST_REPLICAS])
def test_the_longest_legal_status_of_a_job_with_so_many_rollouts_fits(rollouts: int) -> None:
    status = largest(rollouts)
    assert set(DriverStatus.model_fields) == status.model_fields_set
    text = status.model_dump_json(by_alias=True).encode()
    assert len(text) + drivers.HEAD_BYTES <= STATUS_BYTES + rollouts * ROLLOUT_BYTES


async def test_a_status_of_more_rollouts_than_there_can_be_is_refused(world: World) -> None:
    world.running = [driver_of(rollouts=10)]
    many = tuple(RolloutState(id=f"r{number}") for number in range(2 * 10 + drivers.SPARE_ROLLOUTS))
    world.status = world.status.model_copy(update={"rollouts": many})
    await world.until(lambda: world.drivers.probe("u").status == world.status)
    world.status = world.status.model_copy(update={"rollouts": (*many, RolloutState(id="one"))})
    await world.until(lambda: "85 rollouts listed, of a job that has had 10" in world.drivers.probe("u").error)
    world.running = [driver_of(rollouts=11)]
    await world.until(lambda: not world.drivers.probe("u").error)


@pytest.mark.parametrize(
    "lie",
    [
        '{"step": 1e30}',
        '{"step": 9007199254740992}',
        '{"attempt": 1000000001}',
        '{"etaSeconds": 1e300}',
        '{"etaSeconds": NaN}',
        '{"rollouts": [{"id": "../../x?"}]}',
        '{"rollouts": [{"id": ""}]}',
        '{"waitingFor": "\\ud800"}',
        '{"waitingFor": "' + "x" * 1025 + '"}',
        '{"idleShare": {"' + "x" * 65 + '": 1}}',
    ],
)
async def test_a_status_that_no_driver_can_mean_is_refused(world: World, lie: str) -> None:
    async def lying(_: web.Request) -> web.Response:
        return web.json_response(text=lie)

    world.answer = lying
    await world.until(lambda: world.drivers.probe("u").error)
    assert world.drivers.probe("u").status is None
    assert len(world.drivers.probe("u").error) < 300
