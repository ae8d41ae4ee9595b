"""Weights over pairs: a torch.distributed process group of holder and receiver, created for one pull.

The receiver requests a pair by a call, then requests one chunk after another by calls; the holder sends each over the
group. The backend is the one that the accelerators of both sides have (``nccl``, ``hccl``), otherwise ``gloo``.

Invariants: a group has exactly two members, so no process waits for a third. A holder ends a pair whose receiver has
requested nothing for ``IDLE`` deadlines. torch is imported in a thread, before a worker announces its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar

import msgspec

from asyncflow.errors import AsyncFlowError, ManifestError, PeerLost, ProtocolError, Refused
from asyncflow.identity import Version
from asyncflow.plugins import importing
from asyncflow.rpc.addresses import host_and_port
from asyncflow.rpc.client import RpcClient
from asyncflow.weights.fast_transport import END_S, Chunk, FastTransport, Line
from asyncflow.weights.transport import Region, digests_of

T = TypeVar("T")

IDLE = 3.0
_GLOO = "gloo"
_THREADS = 16
_CALL_S = 600.0


class PairRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.pair``: create a pair with the caller, with one of these backends, the best one first."""

    collectives: tuple[str, ...]


class PairReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.pair``: the pair's number, its backend, and its store's address, open for a few seconds."""

    pair: int
    collective: str
    host: str
    port: int
    prefix: str


class SendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of ``weights.send``: send regions of a packed version over a pair. No regions: end the pair.

    checked: whether the reply must contain the digest of each region; wait_s: how long the holder may wait for data
    that it does not have yet.
    """

    pair: int
    version: int
    regions: tuple[Region, ...]
    checked: bool
    wait_s: float = 0.0


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to ``weights.send``."""

    digests: tuple[str, ...]


@dataclass(kw_only=True)
class _Serving:
    """A pair of this holder. making: creates the group; turn: serialises chunks; idle: timer that ends the pair."""

    making: asyncio.Future[Any]
    idle: asyncio.TimerHandle
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class PairsTransport(FastTransport):
    """Weights over pairs. device, collective: as in ``open_transport``; options: as in ``FastTransport``."""

    def __init__(
        self, *, bind: str = "tcp://127.0.0.1:*", device: str = "cpu", collective: str = _GLOO, **options: Any
    ) -> None:
        super().__init__(bind=bind, **options)
        self._host = host_and_port(bind)[0]
        self._device = device
        self._collectives = tuple(dict.fromkeys((collective, _GLOO)))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-pairs")
        self._receiving = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-receive")
        self._serving: dict[int, _Serving] = {}
        self._numbers = itertools.count(1)
        self._torch: Any = None
        self._server.route("weights.pair", PairRequest, self._pair)
        self._server.route("weights.send", SendRequest, self._send)

    @classmethod
    def device_options(cls, device: str, collective: str) -> dict[str, Any]:
        """Return the device and the backend."""
        return {"device": device, "collective": collective}

    @classmethod
    def check(cls) -> None:
        """Check that torch is installed."""
        if find_spec("torch") is None:
            raise _lacks_torch("it is not installed")

    async def prepare(self) -> None:
        """Import torch."""
        self._torch = await asyncio.to_thread(_torch)

    async def close(self) -> None:
        """Stop serving, and end every pair."""
        await super().close()
        for pair in list(self._serving):
            self._end(pair)
        self._threads.shutdown(wait=False)
        self._receiving.shutdown(wait=False)

    def line(self, client: RpcClient, version: Version, *, checked: bool) -> PairLine:
        """Return the line of a pull."""
        return PairLine(self, client, version, checked=checked)

    async def ask(self, client: RpcClient) -> PairReply:
        """Request a pair from a holder."""
        return await client.call(
            "weights.pair", PairRequest(collectives=self._collectives), PairReply, timeout=self.deadline_s
        )

    def join(self, reply: PairReply) -> asyncio.Future[Any]:
        """Join the pair that a holder creates. Raises PeerLost, ProtocolError for a backend that was not requested."""
        if reply.collective not in self._collectives:
            raise ProtocolError(f"the pair uses {reply.collective!r}, which was not requested", where=reply.host)
        return self._make(reply)

    def in_thread(self, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run a function that blocks at most until the deadline in a thread. Raises PeerLost for an error of torch."""
        return asyncio.get_running_loop().run_in_executor(self._threads, _run_translated, work, *arguments)

    def receive(self, pair: Any, nbytes: int) -> asyncio.Future[Any]:
        """Receive bytes in a thread reserved for receiving, so that pulls by peers never occupy all threads."""
        return asyncio.get_running_loop().run_in_executor(self._receiving, _run_translated, pair.receive, nbytes)

    def _make(self, reply: PairReply, **listener: Any) -> asyncio.Future[Any]:
        def make() -> Any:
            return self._torch.TorchPair(
                host=reply.host,
                port=reply.port,
                local_host=self._host,
                prefix=reply.prefix,
                collective=reply.collective,
                device=self._device,
                deadline_s=self.deadline_s,
                **listener,
            )

        return self.in_thread(make)

    async def _pair(self, request: PairRequest, _frames: Sequence[memoryview]) -> PairReply:
        collective = next((name for name in request.collectives if name in self._collectives), "")
        if not collective:
            raise Refused(f"none of the backends {', '.join(request.collectives)} is available", where=self.name)
        listener, port = self._torch.listen(self._host)
        number = next(self._numbers)
        reply = PairReply(pair=number, collective=collective, host=self._host, port=port, prefix=secrets.token_hex(16))
        making = self._make(reply, listener=listener)
        making.add_done_callback(_retrieve_error)
        self._serving[number] = _Serving(making=making, idle=self._ending(number))
        return reply

    async def _send(self, request: SendRequest, _frames: Sequence[memoryview]) -> Sent:
        serving = self._serving.get(request.pair)
        if serving is None:
            raise Refused(f"pair {request.pair} does not exist", where=self.name)
        if not request.regions:
            self._end(request.pair)
            return Sent(digests=())
        serving.idle.cancel()
        serving.idle = self._ending(request.pair)
        data = await self.read(request.version, request.regions, wait_s=request.wait_s)
        async with serving.turn:
            pair = await asyncio.shield(serving.making)
            await self.in_thread(pair.send, data)
        digests = await asyncio.to_thread(digests_of, data) if request.checked else ()
        return Sent(digests=digests)

    def _ending(self, number: int) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(IDLE * self.deadline_s, self._end, number)

    def _end(self, number: int) -> None:
        serving = self._serving.pop(number, None)
        if serving is not None:
            serving.idle.cancel()
            serving.making.add_done_callback(self._close_pair)

    def _close_pair(self, making: asyncio.Future[Any]) -> None:
        if not making.cancelled() and making.exception() is None:
            _close(making.result())


class PairLine(Line):
    """A pair with a source, over which one chunk after another travels."""

    def __init__(self, transport: PairsTransport, client: RpcClient, version: Version, *, checked: bool) -> None:
        self._transport = transport
        self._client = client
        self._version = version
        self._checked = checked
        self._turn = asyncio.Lock()
        self._number = 0
        self._pair: Any = None

    async def open(self) -> None:
        """Create the pair."""
        reply = await self._transport.ask(self._client)
        self._number = reply.pair
        self._pair = await self._transport.join(reply)

    async def bring(self, regions: Sequence[Region]) -> Chunk:
        """Request regions, and receive them."""
        sizes = [region.nbytes for region in regions]
        async with self._turn:
            received = self._transport.receive(self._pair, sum(sizes))
            received.add_done_callback(_retrieve_error)
            sent = await self._ask(regions, timeout=_CALL_S)
            data = (await received).data
        starts = itertools.accumulate(sizes[:-1], initial=0)
        frames = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        return Chunk(frames, sent.digests)

    async def end(self) -> None:
        """End the pair on both sides."""
        if self._number:
            with contextlib.suppress(AsyncFlowError):
                await self._ask((), timeout=END_S)
        if self._pair is not None:
            _close(self._pair)

    async def _ask(self, regions: Sequence[Region], *, timeout: float) -> Sent:
        request = SendRequest(
            pair=self._number,
            version=self._version.packed,
            regions=tuple(regions),
            checked=self._checked,
            wait_s=self._transport.wait_s,
        )
        return await self._client.call("weights.send", request, Sent, timeout=timeout)


def _torch() -> Any:
    """Import the module that needs torch. Raises ManifestError if torch is not installed."""
    try:
        with importing():
            return importlib.import_module("asyncflow.weights.torch_pair")
    except ImportError as error:
        raise _lacks_torch(str(error)) from error


def _lacks_torch(why: str) -> ManifestError:
    hint = "Run pip install 'asyncflow[torch]'"
    return ManifestError(f"torch cannot be imported: {why}", where="spec.weightSync.transport", hint=hint)


def _run_translated(work: Callable[..., T], *arguments: Any) -> T:
    try:
        return work(*arguments)
    except (RuntimeError, ValueError, AttributeError, ImportError, OSError) as error:
        raise PeerLost(f"the pair failed: {f'{error}'.partition(chr(10))[0]}") from error


def _close(pair: Any) -> None:
    asyncio.get_running_loop().run_in_executor(None, pair.close).add_done_callback(_retrieve_error)


def _retrieve_error(done: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future, so that asyncio does not log it: another caller handles it, or none has to."""
    if not done.cancelled():
        done.exception()
