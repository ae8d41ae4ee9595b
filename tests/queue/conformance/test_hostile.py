"""Unknown peers: whatever they send is refused or dropped, memory stays bounded and service goes on."""

import asyncio
import contextlib
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ProtocolError, Refused
from asyncflow.local.issuer import Issuer
from asyncflow.queue.client import QueueClient
from asyncflow.queue.partition import Partition
from asyncflow.queue.protocol import calls, unit_calls
from asyncflow.queue.protocol.messages import Samples, TaskSpec
from asyncflow.queue.values import encode_columns
from asyncflow.rpc import framing
from asyncflow.rpc.addresses import address_of, host_and_port
from asyncflow.rpc.client import RpcClient
from asyncflow.rpc.columns import BatchHeader, encode_batch
from asyncflow.rpc.shm import SHARED_MEMORY_ENV

LIMIT = 8 << 20
ROOM = 48 << 20
UNREAD = 64 << 20
"""What may lie for who does not read."""
HEARD_S = 1.0
"""Seconds in which all that was sent is read."""
GREETED = framing.hello(None)
"""All that a peer without a certificate says before it is listened to."""


class Victim:
    """A queue in a process of its own."""

    def __init__(self, process, controller, unit, credentials):
        self.process = psutil.Process(process.pid)
        self.addresses = (controller, unit)
        self.controller, self.unit, self.credentials = controller, unit, credentials
        self.client = self.connect(credentials)
        self.partition = Partition(self.client, "scores")

    def connect(self, credentials):
        return QueueClient(
            find=lambda role, _: self.controller if role == "controller" else self.unit,
            units=lambda: [0],
            worker="me",
            credentials=credentials,
        )

    async def serves(self):
        """Check that rows go through it, and that nothing is held afterwards."""
        rows = await self.partition.put({"n": np.arange(5)}, timeout=20)
        assert (await self.partition.get(rows, ["n"], timeout=20))["n"].tolist() == list(range(5))
        await self.partition.clear(rows, timeout=20)
        async with asyncio.timeout(20):
            while (await self.client.stats(timeout=20)).bytes:
                await asyncio.sleep(0.05)

    @property
    def memory(self):
        return self.process.memory_info().rss


@pytest.fixture
def victim(tmp_path, monkeypatch):
    @contextlib.asynccontextmanager
    async def run(*, certified=False, limit=LIMIT):
        if certified:  # what an unknown peer reaches: nobody but this user gets to a socket of this host
            monkeypatch.setenv(SHARED_MEMORY_ENV, "off")
        folder = tmp_path / "tls"
        credentials = Issuer(folder).credentials("client") if certified else None
        words = [str(tmp_path), str(limit), *([str(folder)] if certified else [])]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("serve.py")), *words, stdout=subprocess.PIPE
        )
        made = None
        try:
            controller, unit = (await process.stdout.readline()).decode().split()
            made = Victim(process, controller, unit, credentials)
            await made.serves()
            yield made
            assert process.returncode is None
            await made.serves()
        finally:
            if made is not None:
                await made.client.close()
            process.kill()
            await process.wait()
            process._transport.close()

    return run


def dial(address):
    return socket.create_connection(host_and_port(address), timeout=10)


def attack(made, *, times, send):
    """Open ``times`` connections to each server and let ``send`` do its worst; return the most memory it then takes."""
    opened = []
    try:
        for number in range(times):
            for address in made.addresses:
                peer = dial(address)
                opened.append(peer)
                try:
                    send(peer, number)
                except OSError:
                    continue
        most, until = made.memory, time.monotonic() + HEARD_S
        while time.monotonic() < until:
            time.sleep(0.05)
            most = max(most, made.memory)
        return most
    finally:
        for peer in opened:
            peer.close()


async def test_who_has_another_jobs_certificate_or_none_is_not_heard(victim, tmp_path):
    async with victim(certified=True) as made:
        for credentials in (None, Issuer(tmp_path / "another").credentials("client")):
            peer = made.connect(credentials)
            partition = Partition(peer, "scores")
            with pytest.raises(AsyncFlowError):
                await partition.put({"n": np.arange(5)}, timeout=1)
            with pytest.raises(AsyncFlowError):
                await partition.rows(timeout=1)
            await peer.close()
        assert (await made.partition.rows()).rows == []


@pytest.mark.parametrize("certified", [False, True])
async def test_garbage_and_half_greetings_of_thousands_of_connections(victim, certified):
    rng = random.Random(7)
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    pieces = [os.urandom(99), hello, GREETED + os.urandom(200), GREETED, b"GET / HTTP/1.1\r\n\r\n", b""]
    async with victim(certified=certified) as made:
        before = made.memory
        held = await asyncio.to_thread(attack, made, times=1000, send=lambda s, _: s.sendall(rng.choice(pieces)))
        assert held - before < ROOM
        await made.serves()


async def test_unknown_peers_that_hold_on_make_room_for_who_has_a_certificate(victim):
    async with victim(certified=True) as made:
        hold = asyncio.Event()
        loop = asyncio.get_running_loop()

        def attack_and_hold():
            peers = [dial(made.controller) for _ in range(800)]
            loop.call_soon_threadsafe(hold.set)
            return peers

        held = asyncio.create_task(asyncio.to_thread(attack_and_hold))
        await hold.wait()
        await made.serves()
        for peer in await held:
            peer.close()


async def test_huge_declared_sizes_take_no_memory(victim):
    def send(peer, number):
        peer.sendall(GREETED)
        declared = 1 << (30 + number % 33)
        block = struct.pack("<QIQ", 12, 1, (1 << 30) - 1 if number % 2 else declared)
        peer.sendall((struct.pack("<Q", declared) if number % 3 else block) + bytes(4096))

    async with victim() as made:
        before = made.memory
        held = await asyncio.to_thread(attack, made, times=200, send=send)
        assert held - before < ROOM


async def test_huge_sizes_of_who_shows_no_certificate_are_not_even_read(victim):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def send(peer, number):
        with context.wrap_socket(peer.dup()) as shaken:
            shaken.sendall(GREETED + struct.pack("<Q", 1 << 30) + bytes(1 << 16))

    async with victim(certified=True) as made:
        before = made.memory
        held = await asyncio.to_thread(attack, made, times=100, send=send)
        assert held - before < ROOM


async def test_what_goes_over_the_wire_is_tls_and_of_no_use_to_who_records_it(victim):
    """A tap between a client and the unit: it hears no plain text, and what it heard is said again in vain."""
    async with victim(certified=True) as made:
        heard, told, streams = bytearray(), bytearray(), []

        async def tap(reader, writer):
            there, here = await asyncio.open_connection(*host_and_port(made.unit))
            streams.extend((writer, here))

            async def pass_on(source, sink, record):
                while data := await source.read(1 << 16):
                    record += data
                    sink.write(data)

            await asyncio.gather(pass_on(reader, here, heard), pass_on(there, writer, told))

        tapped = await asyncio.start_server(tap, "127.0.0.1", 0)
        address = f"{address_of(*tapped.sockets[0].getsockname())}/{made.unit.rpartition('/')[2]}"
        client = QueueClient(
            find=lambda role, _: made.controller if role == "controller" else address,
            units=lambda: [0],
            worker="tapped",
            credentials=made.credentials,
        )
        partition = Partition(client, "scores")
        await partition.put({"text": ["confidential" * 10_000]}, timeout=20)
        assert len(heard) > 100_000
        for said in (heard, told):
            assert _is_tls(bytes(said))
            for word in (b"confidential", b"unit.put", b"scores", b"asyncflow", b"client"):
                assert word not in said
        await client.close()

        reader, writer = await asyncio.open_connection(*host_and_port(made.unit))
        writer.write(heard)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1 << 16):
                pass
        writer.close()
        assert len((await made.partition.rows()).rows) == 1
        await made.partition.clear((await made.partition.rows()).rows)
        tapped.close()
        for stream in streams:
            stream.close()


def _is_tls(said):
    """Return whether all of it is records of TLS (RFC 8446, 5.1), of which only the greetings are not encrypted."""
    kinds = set()
    while said:
        kind, version, length = struct.unpack_from(">BHH", said)
        kinds.add(kind)
        if version not in (0x0301, 0x0303) or length > (1 << 14) + 256:
            return False
        said = said[5 + length :]
    return kinds == {20, 22, 23}


async def test_headers_that_lie_about_sizes_are_refused(victim):
    header, frames = encode_batch(encode_columns({"n": np.arange(5)}))
    lies = []
    for rows, values in ((1 << 47, 5), (5, 1 << 47), (1 << 47, 1 << 47), (4, 5), (0, 0)):
        told = msgspec.to_builtins(header)
        told["rows"] = rows
        for column in told["columns"]:
            column["values"] = values
        lies.append(msgspec.convert(told, BatchHeader))
    async with victim() as made:
        before = made.memory
        client = RpcClient(name="liar", resolve=made.unit)
        for number, lie in enumerate(lies):
            request = unit_calls.PutRows("scores", b"a client", number, 1, lie, [], {}, 1.0)
            with pytest.raises((ProtocolError, Refused, DeadlineExceeded)):
                await client.call("unit.put", request, unit_calls.RowIds, timeout=5, frames=frames)
        greedy = unit_calls.PutRows("scores", b"a client", 1 << 31, 1, header, [], {"later": 1 << 60}, 1.0)
        with pytest.raises(Refused):
            await client.call("unit.put", greedy, unit_calls.RowIds, timeout=5, frames=frames)
        await client.close()
        assert made.memory - before < ROOM


async def test_half_messages_end_with_their_connections(victim):
    call = framing.encode(framing.Call(1, "queue.stats", 1.0, 0))
    async with victim() as made:
        before, halves = made.memory, []
        for _ in range(50):
            half = dial(made.controller)
            half.sendall(GREETED + struct.pack("<QIQ", 12 + len(call), 1, len(call)) + call[:-1])
            halves.append(half)
            half = dial(made.unit)
            half.sendall(GREETED + struct.pack("<QIQ", 1 << 20, 1, 1 << 19) + bytes(1000))
            halves.append(half)
        await made.serves()
        assert made.memory - before < ROOM
        for half in halves:
            half.close()


async def test_a_message_that_is_replayed_does_nothing_twice(victim, raw_peer_at):
    header, frames = encode_batch(encode_columns({"n": np.arange(5)}))
    request = framing.encode(unit_calls.PutRows("scores", b"a client", 0, 1, header, [], {}, 5.0))

    async def play(peer, numbers):
        for number in numbers:
            await peer.send([framing.encode(framing.Call(number, "unit.put", 5.0, len(frames))), request, *frames])

    async with victim() as made, raw_peer_at(made.unit) as peer:
        await play(peer, (number // 3 for number in range(300)))
        async with asyncio.timeout(20):
            while len((await made.partition.rows()).rows) < 5:
                await asyncio.sleep(0.05)
        await made.partition.clear((await made.partition.rows()).rows)
        await play(peer, range(300, 400))
        await made.serves()
        assert (await made.partition.rows()).rows == []


async def test_who_asks_for_much_and_reads_nothing_makes_no_memory_grow_and_gets_it_all_when_it_reads(
    victim, raw_peer_at
):
    values = np.arange(32 << 16, dtype=np.float64).reshape(32, -1)  # rows of 512 KiB
    async with victim(limit=32 << 20) as made, raw_peer_at(made.unit) as greedy:
        large = Partition(made.client, "large")
        rows = await large.put({"values": values}, timeout=20)
        scattered = framing.encode(unit_calls.FetchRows(rows[::2], ["values"]))
        before = most = made.memory
        for number in range(100):
            await greedy.send([framing.encode(framing.Call(number, "unit.fetch", 60.0, 0)), scattered])
        async with asyncio.timeout(30):
            while most - before < UNREAD:
                await asyncio.sleep(0.01)
                most = max(most, made.memory)
        for _ in range(20):
            mine = await made.partition.put({"n": np.arange(5)}, timeout=20)
            assert (await made.partition.get(mine, ["n"], timeout=20))["n"].tolist() == list(range(5))
            await made.partition.clear(mine, timeout=20)
            most = max(most, made.memory)
        assert most - before < UNREAD + ROOM
        for number in range(100):
            async with asyncio.timeout(30):
                header, _, *frames = await greedy.receive()
            assert framing.to_client(header).call == number
            assert b"".join(frames[1:]) == values[::2].tobytes()
            most = max(most, made.memory)
        assert most - before < UNREAD + ROOM
        await large.clear(rows, timeout=20)


async def test_calls_of_many_clients_at_once_are_all_answered(victim):
    async with victim() as made:
        clients = [RpcClient(name=f"client {n}", resolve=made.controller) for n in range(500)]
        asked = [client.call("queue.stats", calls.Nothing(), calls.Done, timeout=60) for client in clients]
        await asyncio.gather(*asked)
        for client in clients:
            await client.close()


async def test_tasks_and_partitions_of_questions_are_not_made(victim):
    async with victim() as made:
        before = made.memory
        for number in range(2000):
            await Partition(made.client, f"nobody made {number}").rows()
        assert await made.client.partitions(timeout=10) in ({"scores": 0}, {})
        assert made.memory - before < ROOM


def requests():
    """One good request of everything that a client says, with its frames: (to the unit, method, body, frames)."""
    header, frames = encode_batch(encode_columns({"n": np.arange(2), "text": ["a", "b"]}))
    put = unit_calls.PutRows("scores", b"a client", 0, 1, header, [{"key": "x"}, {"n": 1}], {"later": 8}, 0.1)
    row = 1 << 44
    yield True, "unit.put", put, frames
    yield True, "unit.write", unit_calls.WriteRows("write:1", [row, row + 1], header, [], "complete", 0.1), frames
    yield True, "unit.fetch", unit_calls.FetchRows([row, row + 1], ["n"]), []
    samples = Samples(serials=[1], step=1, tokens=[3, 4])
    put = unit_calls.PutRows("scores", b"a client", 0, 2, header, [], {"later": 8}, 0.1, samples=samples)
    yield True, "unit.put", put, frames
    spec = TaskSpec(partition="scores", name="grade", needs=["n"])
    for method, request in {
        "queue.declare": calls.Declare([spec]),
        "queue.claim": calls.ClaimRows("scores", "grade", "w", "t", 8, None, None, [], 0.1),
        "queue.renew": calls.Leases(["1"]),
        "queue.end": calls.EndRows("1", [row], "why", True),
        "queue.slot": calls.AskSlot("scores", 0, 1, 0, 0, 100, 0.1),
        "queue.open_step": calls.OpenStep("scores", 1, 4, 2),
        "queue.begin": calls.Begin("scores", 0, 0, 1),
        "queue.snapshot": calls.InPartition("scores"),
        "queue.show": calls.InPartition("scores"),
        "queue.wanted": calls.AskWanted("scores", 0, 0.1),
        "open.list": calls.InPartition("scores"),
        "open.find": calls.FindRows("scores", ["x"]),
        "open.peek": calls.Peek("scores", "grade", [row], 8),
        "open.reset": calls.Reset("scores", None),
        "open.expect": calls.Expect("scores", 4),
        "open.clear": calls.ClearRows("scores", [row]),
        "open.progress": calls.AskProgress("scores", ["n"], ""),
    }.items():
        yield False, method, request, []


def spoilt(rng, data):
    """Return ``data`` with a few bytes changed, doubled or gone."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(out)) if out else 0
        match rng.randrange(4):
            case 0 if out:
                out[place] = rng.randrange(256)
            case 1:
                out[place:place] = bytes([rng.choice([0, 0x7F, 0x80, 0xC0, 0xCB, 0xCF, 0xD3, 0xDF, 0xFF])])
            case 2 if out:
                del out[place]
            case _:
                out += out[place : place + 9]
    return bytes(out)


async def test_requests_with_a_few_bytes_changed_do_no_harm(victim, raw_peer_at):
    rng = random.Random(11)
    async with victim() as made:
        before = made.memory
        async with raw_peer_at(made.controller) as queue, raw_peer_at(made.unit) as unit:
            for number, (to_unit, method, request, frames) in enumerate(list(requests()) * 100):
                call = framing.encode(framing.Call(number, method, 20.0, len(frames)))
                parts = [framing.encode(request), *map(bytes, frames)]
                which = rng.randrange(len(parts))
                parts[which] = spoilt(rng, parts[which])
                peer = unit if to_unit else queue
                await peer.send([call, *parts])
                async with asyncio.timeout(30):
                    header, *rest = await peer.receive()
                answer = framing.to_client(header)
                assert answer.call == number
                if isinstance(answer, framing.Failure):
                    code = framing.error_body(rest[0])["code"]
                    assert code in ("protocol", "refused", "stale_handle", "elsewhere", "fenced", "deadline"), (
                        method,
                        parts,
                        rest,
                    )
        for name in await made.client.partitions(timeout=10):
            await made.client.clear_partition(partition=name, timeout=10)
        assert made.memory - before < ROOM
