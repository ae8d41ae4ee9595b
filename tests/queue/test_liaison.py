"""A unit's side of the conversation, with a controller that is a few lines."""

import asyncio

from asyncflow.errors import PeerLost
from asyncflow.queue.backends.memory import MemoryBackend
from asyncflow.queue.protocol.calls import Done
from asyncflow.queue.protocol.unit_calls import Strangers, Welcome
from asyncflow.queue.unit.budget import Budget
from asyncflow.queue.unit.holdings import Holdings
from asyncflow.queue.unit.liaison import Liaison


class Controller:
    """Takes everything; breaks the session when told to."""

    def __init__(self):
        self.told, self.sessions = [], asyncio.Queue()

    async def call(self, method, request, reply, *, timeout):
        if method == "units.hello":
            return Welcome(controller=1, epoch=7, watch_s=1.0)
        if method == "units.announce":
            return Strangers([])
        broken = asyncio.get_running_loop().create_future()
        self.sessions.put_nowait(broken)
        return await broken

    def ask(self, method, request, reply, *, timeout, done):
        self.told.append((method, request))
        done(Done())


async def test_rows_lost_between_two_sessions_are_told_in_the_next():
    controller = Controller()
    holdings = Holdings(backend=MemoryBackend(), budget=Budget(100, where="test"), where="test", lost=list)
    liaison = Liaison(unit=0, incarnation="me", controller=controller, holdings=holdings)
    liaison.start()
    async with asyncio.timeout(10):
        (await controller.sessions.get()).set_exception(PeerLost("it was killed"))
        while liaison._session is not None:
            await asyncio.sleep(0)
        liaison.lose([5, 6])
        await controller.sessions.get()
    assert [(method, call.rows) for method, call in controller.told] == [("units.lost", [5, 6])]
    await liaison.close()
