"""Events that cannot be written."""

from typing import Any

from asyncflow_operator.actions import Note
from asyncflow_operator.cluster.client import Unreachable
from asyncflow_operator.cluster.events import QUIET_S, Recorder
from asyncflow_operator.observed import Owner

OWNER = Owner(kind="RLJob", namespace="team", name="demo", uid="u")


class Busy:
    """A server that takes no event until the call's deadline, as one with a limit for them does."""

    def __init__(self) -> None:
        self.asked = 0

    async def create(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        raise Unreachable("HTTP 429", where="create")


async def test_events_that_a_busy_server_does_not_take_are_dropped_and_hold_nothing_up() -> None:
    server, now = Busy(), 1000.0
    recorder = Recorder(server, reporter="test", clock=lambda: now)
    for number in range(100):
        await recorder.record(OWNER, Note(type="Warning", reason="RolloutFailed", message=f"rollout-{number} ended"))
    assert server.asked == 1, "each would have held up the job for the deadline of a call"
    now += QUIET_S
    await recorder.record(OWNER, Note(type="Normal", reason="Running", message="The job is running"))
    assert server.asked == 2
