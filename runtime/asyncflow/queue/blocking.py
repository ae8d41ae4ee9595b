"""The client of a queue for threads: the methods of ``QueueClient`` and ``Partition``, each of which blocks.

One event loop in a thread of its own carries out the calls of all threads, beside the client's heartbeats.

Invariants: an interrupted call has ended before its exception is raised, and a claim among them has returned its lease;
a process that was forked is a client of its own, with connections, names and heartbeats of its own, as soon as it uses
the queue, and leaves those of its parent alone.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from asyncflow.errors import PeerLost
from asyncflow.queue.client import JOIN_S, QueueClient, aconnect
from asyncflow.queue.partition import Partition
from asyncflow.rpc.tls import Credentials

T = TypeVar("T")
C = TypeVar("C")


def _blocking(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., T]:
    @wraps(method)
    def call(self: Any, /, *args: Any, **options: Any) -> T:
        result: T = self.run(method(self.awaited, *args, **options))
        return result

    return call


def _made_from(source: type) -> Callable[[type[C]], type[C]]:
    """Make a class decorator that adds the public coroutine functions of ``source``, as functions that block."""

    def add(target: type[C]) -> type[C]:
        for name, method in inspect.getmembers(source, inspect.iscoroutinefunction):
            if not name.startswith("_") and name not in vars(target):
                setattr(target, name, _blocking(method))
        return target

    return add


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks``, and wait until they have ended."""
    if ending := list(tasks):
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)


@_made_from(QueueClient)
class BlockingQueue:
    """A ``QueueClient`` for threads. opened: makes that client; in a process that was forked it is called again."""

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[QueueClient]]) -> None:
        self.closed = False
        self._opened = opened
        self._inherited: list[object] = []
        self._begin()
        _living.add(self)

    def _begin(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: QueueClient | None = None
        self._stack = AsyncExitStack()
        self._running: set[asyncio.Task[Any]] = set()
        self._lock = threading.RLock()

    def begin_anew(self) -> None:
        """Forget what belongs to the parent of this process, but close nothing of it: both share its sockets."""
        self._inherited.append((self._loop, self._client, self._stack, self._running))
        self._begin()

    @property
    def awaited(self) -> QueueClient:
        """The client whose methods are run. Raises PeerLost where this was closed."""
        with self._lock:
            if self.closed:
                raise _closed()
            if self._loop is None:
                self._loop = uvloop.new_event_loop()
                self.thread = threading.Thread(target=self._loop.run_forever, name="queue client", daemon=True)
                self.thread.start()
            if self._client is None:
                self._client = self.run(self._stack.enter_async_context(self._opened()))
            return self._client

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``job``; a caller that is interrupted cancels it, and waits until it has ended."""
        ended, tasks = threading.Lock(), list[asyncio.Task[T]]()
        ended.acquire()

        def begin(loop: asyncio.AbstractEventLoop) -> None:
            tasks.append(loop.create_task(job))
            self._running.add(tasks[0])
            tasks[0].add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            self._running.discard(task)
            ended.release()

        with self._lock:
            if (loop := self._loop) is None:
                job.close()
                raise _closed()
            loop.call_soon_threadsafe(begin, loop)
        try:
            ended.acquire()
        except BaseException:
            asyncio.run_coroutine_threadsafe(cancelled(tasks), loop).result()
            if self._client is not None:  # a claim that was interrupted has more to say
                self.run(self._client.peers.settle())
            raise
        try:
            return tasks[0].result()
        except asyncio.CancelledError:
            raise _closed() from None

    def close(self) -> None:
        """Leave the queue. Calls under way, and later ones, raise PeerLost."""
        with self._lock:
            self.closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(cancelled(self._running), loop).result()
            asyncio.run_coroutine_threadsafe(self._stack.aclose(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self.thread.join()
            loop.close()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


def _closed() -> PeerLost:
    return PeerLost("this client was closed", where="queue client")


@_made_from(Partition)
class BlockingPartition:
    """A ``Partition`` for threads; see there."""

    def __init__(self, queue: BlockingQueue, name: str, *, tensors: bool = False) -> None:
        self.queue = queue
        self.name = name
        self.run = queue.run
        self._tensors = tensors

    @property
    def awaited(self) -> Partition:
        """The partition whose methods are run."""
        return Partition(self.queue.awaited, self.name, tensors=self._tensors)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


_living: weakref.WeakSet[BlockingQueue] = weakref.WeakSet()


def _begin_anew() -> None:
    for queue in _living:
        queue.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def connect(
    address: str, *, credentials: Credentials | None = None, timeout: float = JOIN_S
) -> Iterator[BlockingQueue]:
    """Be a client of the queue at ``address`` in threads; see ``aconnect``.

    Heartbeats go on in a thread of their own, however long the others block, as long as something lets go of the GIL.
    """
    credentials = credentials or Credentials.of_environment()
    queue = BlockingQueue(lambda: aconnect(address, credentials=credentials, timeout=timeout))
    try:
        assert queue.awaited
        yield queue
    finally:
        queue.close()
