"""One server of a store, for tests: ``store_process.py master | redis BYTES [PASSWORD] | holder MASTER_FILE BYTES``.

It prints its address and the pid to be killed, and ends with its standard input.
"""

import asyncio
import os
import sys
from pathlib import Path

from asyncflow.errors import PeerLost
from asyncflow.queue.storage.mooncake import MooncakeConnection
from asyncflow.queue.storage.servers import Server, start_mooncake_master, start_redis

HOST = "127.0.0.1"


async def until_input_ends() -> None:
    await asyncio.to_thread(sys.stdin.read)


async def serve(server: Server) -> None:
    say(f"tcp://{server.host}:{server.port}", server._process.pid)
    await until_input_ends()
    await server.stop()


async def hold(master_file: Path, size: int) -> None:
    """Follow the master whose address stands in a file, as a holder follows the job's directory."""
    segment = MooncakeConnection(host=HOST, master=master_file.read_text, segment_bytes=size)
    await asyncio.to_thread(segment.client)
    say("-", os.getpid())
    ended = asyncio.create_task(until_input_ends())
    while not ended.done():
        await asyncio.wait([ended], timeout=0.5)
        try:
            await asyncio.to_thread(segment.client)
        except PeerLost as error:
            sys.stderr.write(f"{error}\n")
    os._exit(0)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main(role: str, *words: str) -> None:
    if role == "master":
        await serve(await start_mooncake_master(HOST))
    elif role == "redis":
        memory, password = int(words[0]), words[1] if len(words) > 1 else ""
        await serve(await start_redis(HOST, memory=memory, password=password))
    else:
        await hold(Path(words[0]), int(words[1]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
