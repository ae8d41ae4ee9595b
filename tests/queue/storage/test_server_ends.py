"""A store's server ends with whoever started it, however that ends."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

START = """
import asyncio, sys

from asyncflow.queue.storage.servers import Server, free_port

async def main():
    host, port = "127.0.0.1", free_port("127.0.0.1")
    command = [sys.executable, "-m", "http.server", str(port), "--bind", host]
    await Server.start(command, host=host, port=port)
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.process
def test_a_server_goes_with_a_role_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True) as role:
        assert role.stdout is not None
        assert role.stdout.readline() == "ready\n"
        (server,) = psutil.Process(role.pid).children()
        role.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the server outlived its role"
        time.sleep(0.05)
