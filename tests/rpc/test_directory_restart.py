"""A restarted directory knows no member yet; its members must not forget each other because of that."""

import asyncio
import uuid

from asyncflow.rpc.directory import Directory
from asyncflow.rpc.membership import Member, Membership
from asyncflow.rpc.server import RpcServer


def member(role: str) -> Member:
    return Member(role=role, index=0, incarnation=uuid.uuid4().hex, address=f"tcp://127.0.0.1:{len(role)}")


async def serve(bind: str) -> tuple[RpcServer, Directory, str]:
    server, directory = RpcServer(name="driver", bind=bind), Directory(heartbeat_s=0.05, lost_after_s=0.6)
    directory.attach(server)
    return server, directory, await server.start()


async def test_members_stay_known_until_a_restarted_directory_had_time_to_hear_of_them() -> None:
    server, directory, address = await serve("tcp://127.0.0.1:*")
    alive = Membership(driver=address, member=member("rollout"))
    gone = Membership(driver=address, member=member("storage"))
    await alive.join(20)
    await gone.join(20)
    await alive.wait_for(lambda: alive.peer("storage"), "the unit", 20)
    await directory.close()
    await server.close()
    await gone.close()
    server, directory, _ = await serve(address)
    revisions = directory.revision
    async with asyncio.timeout(20):
        while directory.revision == revisions:
            assert alive.address("storage") is not None
            await asyncio.sleep(0.01)
    assert alive.address("storage") is not None
    await alive.wait_for(lambda: alive.peer("storage") is None, "the unit that is gone to be forgotten", 20)
    assert alive.address("rollout") is not None
    await alive.close()
    await directory.close()
    await server.close()
