"""The client of a queue for threads: the methods of ``QueueClient`` and ``Partition``, as blocking functions.

One event loop in a separate thread executes the calls of all threads, and sends the client's heartbeats.

Invariants: an interrupted call has ended before its exception is raised, and an interrupted claim has returned its
lease. A forked process becomes a separate client when it first uses the queue, with its own connections, names and
heartbeats, and leaves those of its parent alone.
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


def _blocking_methods_of(source: type) -> Callable[[type[C]], type[C]]:
    """Return a class decorator that adds the public coroutine functions of ``source`` as blocking functions."""

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


@_blocking_methods_of(QueueClient)
class BlockingQueue:
    """A ``QueueClient`` for threads. opened: creates that client, again in each forked process."""

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[QueueClient]]) -> None:
        self.closed = False
        self._opened = opened
        self._inherited: list[object] = []
        self._reset()
        _open_queues.add(self)

    def _reset(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: QueueClient | None = None
        self._stack = AsyncExitStack()
        self._running: set[asyncio.Task[Any]] = set()
        self._lock = threading.RLock()

    def reset_after_fork(self) -> None:
        """Forget the objects of the parent process without closing them, since both processes share its sockets."""
        self._inherited.append((self._loop, self._client, self._stack, self._running))
        self._reset()

    @property
    def awaited(self) -> QueueClient:
        """The client whose methods are called. Raises PeerLost if this was closed."""
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
        """Return the result of ``job``; an interrupted caller cancels it, and waits until it has ended."""
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
            if self._client is not None:  # an interrupted claim still has to report that
                self.run(self._client.peers.settle())
            raise
        try:
            return tasks[0].result()
        except asyncio.CancelledError:
            raise _closed() from None

    def close(self) -> None:
        """Leave the queue. Calls in progress, and later ones, raise PeerLost."""
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


@_blocking_methods_of(Partition)
class BlockingPartition:
    """A ``Partition`` for threads."""

    def __init__(self, queue: BlockingQueue, name: str, *, tensors: bool = False) -> None:
        self.queue = queue
        self.name = name
        self.run = queue.run
        self._tensors = tensors

    @property
    def awaited(self) -> Partition:
        """The partition whose methods are called."""
        return Partition(self.queue.awaited, self.name, tensors=self._tensors)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


_open_queues: weakref.WeakSet[BlockingQueue] = weakref.WeakSet()

os.register_at_fork(after_in_child=lambda: list(map(BlockingQueue.reset_after_fork, _open_queues)))


@contextmanager
def connect(
    address: str, *, credentials: Credentials | None = None, timeout: float = JOIN_S
) -> Iterator[BlockingQueue]:
    """Connect to the queue at ``address`` from threads; see ``aconnect``.

    Heartbeats are sent by a separate thread, however long other threads block, as long as they release the GIL.
    """
    credentials = credentials or Credentials.of_environment()
    queue = BlockingQueue(lambda: aconnect(address, credentials=credentials, timeout=timeout))
    try:
        assert queue.awaited
        yield queue
    finally:
        queue.close()
