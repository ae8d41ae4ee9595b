"""Leases that are renewed while time passes in sleeps and calls alone."""

import asyncio

import pytest

from asyncflow.errors import DeadlineExceeded
from asyncflow.renewal import keep_renewing

LEASE_S = 30.0


async def test_at_each_third_what_is_held_is_renewed_and_the_rest_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    asked: list[list[str]] = []
    told: list[set[str]] = []
    held = iter([set(), {"a", "b"}, {"a"}, set(), {"c"}])
    sleep = asyncio.sleep

    async def pass_by(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    class Forgetful:
        async def renew(self, leases: list[str], *, timeout: float) -> list[str]:
            asked.append(leases)
            if leases == ["c"]:
                await asyncio.Event().wait()
            return leases[:1]

    monkeypatch.setattr(asyncio, "sleep", pass_by)
    renewing = keep_renewing(Forgetful(), held=lambda: next(held), ended=told.append, lease_s=LEASE_S)  # type: ignore[arg-type]
    task = asyncio.create_task(renewing)
    while len(asked) < 3:
        await sleep(0)
    task.cancel()
    assert asked == [["a", "b"], ["a"], ["c"]]
    assert told == [{"b"}, set()]
    assert slept == [LEASE_S / 3] * 5


async def test_a_lease_is_renewed_in_time_after_one_renewal_that_took_all_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, renewed, sleep = 0.0, asyncio.Event(), asyncio.sleep

    async def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds
        await sleep(0)

    class Slow:
        calls = 0

        async def renew(self, leases: list[str], *, timeout: float) -> list[str]:
            self.calls += 1
            if self.calls == 1:
                await pass_by(timeout)
                raise DeadlineExceeded("the controller does not answer")
            renewed.set()
            await asyncio.Event().wait()
            return leases

    monkeypatch.setattr(asyncio, "sleep", pass_by)
    renewing = keep_renewing(Slow(), held=lambda: {"l"}, ended=lambda _: None, lease_s=LEASE_S)  # type: ignore[arg-type]
    task = asyncio.create_task(renewing)
    await renewed.wait()
    task.cancel()
    assert now < LEASE_S * 0.9
