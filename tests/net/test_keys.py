import asyncio
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import Struct

from asyncflow.errors import DeadlineExceeded, ManifestError
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import RpcClient, RpcServer


class Number(Struct, frozen=True, kw_only=True):
    value: int


async def add(request: Number, frames: Sequence[memoryview]) -> Number:
    return Number(value=request.value + 1)


async def served(name: str, keys: Keys | None) -> RpcServer:
    server = RpcServer(name=name, keys=keys)
    server.route("add", Number, add)
    await server.start()
    return server


def test_a_key_is_written_for_its_owner_only_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keys = Keys.generate(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Keys.load(path).domain == keys.domain
    with pytest.raises(FileExistsError):
        Keys.generate(path)


def test_a_key_never_shows_itself(tmp_path: Path) -> None:
    keys = Keys.generate(tmp_path / "key")
    secret = (tmp_path / "key").read_text().strip()
    assert secret not in repr(keys)
    assert secret not in f"{keys}"


@pytest.mark.parametrize("text", ["rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "~" * 40, "!" * 40])
def test_a_key_is_forty_printable_characters_whoever_wrote_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    first = Keys.load(path)
    path.write_text(f"{text}\n")
    assert Keys.load(path).derived("streams") == first.derived("streams") != first.derived("redis")
    path.write_text(text[:-1] + "z")
    assert Keys.load(path).derived("streams") != first.derived("streams")


@pytest.mark.parametrize("content", [None, b"", b"short", b"\xff" * 40, b"a" * 41, b"a" * 20 + b" " + b"a" * 19])
def test_a_file_that_is_no_key_is_refused_without_showing_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ManifestError, match="cannot be read") as refused:
        Keys.load(path)
    assert not content or content.decode("latin-1") not in str(refused.value)


async def test_only_holders_of_the_jobs_key_are_heard(tmp_path: Path) -> None:
    ours, theirs = Keys.generate(tmp_path / "ours"), Keys.generate(tmp_path / "theirs")
    server, other, plain = await served("ours", ours), await served("theirs", theirs), await served("plain", None)

    async def reach(where: RpcServer, keys: Keys | None) -> bool:
        client = RpcClient(name="client", resolve=where.address, keys=keys)
        try:
            return (await client.call("add", Number(value=1), Number, timeout=0.5)).value == 2
        except DeadlineExceeded:
            return False
        finally:
            await client.close()

    cases = [(s, k) for s in (server, other, plain) for k in (ours, theirs, None)]
    reached = await asyncio.gather(*(reach(*case) for case in cases))
    assert [case for case, done in zip(cases, reached, strict=True) if done] == [
        (server, ours),
        (other, theirs),
        (plain, None),
    ]
    assert server.counters.calls["add"] == 1
    for each in (server, other, plain):
        await each.close()


async def test_keyed_connections_carry_frames(tmp_path: Path) -> None:
    keys = Keys.generate(tmp_path / "key")
    server = RpcServer(name="server", keys=keys)

    async def echo(request: Number, frames: Sequence[memoryview]) -> tuple[Number, Sequence[memoryview]]:
        return request, frames

    server.route("echo", Number, echo)
    client = RpcClient(name="client", resolve=await server.start(), keys=keys)
    frame = bytes(range(256)) * 4096
    _, back = await client.call_frames("echo", Number(value=1), Number, timeout=10, frames=[frame])
    assert back == [frame]
    await client.close()
    await server.close()
