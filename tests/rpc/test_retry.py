"""Retries: delays that grow, errors that are retried, and outages that are said once."""

import asyncio
import logging
from itertools import islice

import pytest

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost, Refused
from asyncflow.rpc.retry import Outage, delays, retry, retry_within


def test_delays_double_up_to_the_longest_and_vary_by_at_most_a_fifth() -> None:
    for delay, usual in zip(
        islice(delays(first=0.1, longest=1.0), 7), (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0), strict=True
    ):
        assert 0.8 * usual <= delay <= 1.2 * usual


async def test_only_errors_that_leave_open_whether_it_was_done_are_retried() -> None:
    outcomes: list[AsyncFlowError | int] = [PeerLost("a"), DeadlineExceeded("b"), 7]

    async def attempt() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, int):
            return outcome
        raise outcome

    assert await retry(attempt, what="seven", timeout=10) == 7
    outcomes[:] = [Refused("no"), 7]
    with pytest.raises(Refused):
        await retry(attempt, what="seven", timeout=10)


async def test_at_the_deadline_the_last_error_is_told() -> None:
    async def lost() -> int:
        raise PeerLost("gone", where="there")

    async def silent() -> int:
        await asyncio.Event().wait()
        return 1

    with pytest.raises(DeadlineExceeded, match=r"^a thing did not succeed within 0.2 s; last: there: gone$"):
        await retry(lost, what="a thing", timeout=0.2)
    with pytest.raises(DeadlineExceeded, match=r"^a thing did not succeed within 0.05 s; last: it was still running$"):
        await retry(silent, what="a thing", timeout=0.05)


async def test_each_attempt_has_until_the_deadline_and_none_begins_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ends = 100.0, []

    async def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def attempt(seconds: float) -> None:
        ends.append(now + seconds)
        await pass_by(0.1)
        raise PeerLost("gone")

    monkeypatch.setattr(asyncio, "sleep", pass_by)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    with pytest.raises(DeadlineExceeded):
        await retry_within(attempt, what="a thing", timeout=3.0)
    assert len(ends) > 3
    assert ends == pytest.approx([103.0] * len(ends))


async def test_an_answer_of_the_peer_is_not_lost_behind_a_failure_after_it() -> None:
    answered = DeadlineExceeded("no room")
    answered.from_peer = True
    errors = [answered]

    async def attempt() -> int:
        raise errors.pop() if errors else PeerLost("gone")

    with pytest.raises(DeadlineExceeded, match=r"last: gone; before that it answered: no room$"):
        await retry(attempt, what="a put", timeout=0.3)


async def test_a_timeout_of_the_attempts_own_passes_through() -> None:
    async def attempt() -> int:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await retry(attempt, what="a thing", timeout=10)


async def test_an_outage_is_one_warning_and_one_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    caplog.set_level(logging.INFO)
    outage = Outage("claiming")
    outage.end()
    assert not caplog.records
    for _ in range(6):
        await outage.wait(PeerLost("gone"))
    outage.end()
    outage.end()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "claiming failed and is retried until it succeeds: gone" in caplog.text
    assert waited[0] <= 0.06 < waited[-1] <= 1.2
    await outage.wait(PeerLost("gone"))
    assert waited[-1] <= 0.06
