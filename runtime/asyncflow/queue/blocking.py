"""The client of a queue for threads: the methods of ``QueueClient`` and ``Partition``, each of which blocks.

A call takes an event loop that nobody uses, or makes one, and runs it in the calling thread until the call is done. So
any number of threads may use one ``BlockingQueue``, none waits for another, and no call passes between threads.

Invariants: an interrupted call has ended before its exception is raised, and a claim among them has given up its lease;
a process that was forked is a client of its own, with connections, names and heartbeats of its own, as soon as it uses
the queue, and leaves those of its parent alone.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, PeerLost
from asyncflow.queue.client import JOIN_S, QueueClient
from asyncflow.queue.partition import Partition
from asyncflow.queue.peers import visitor
from asyncflow.rpc.membership import Membership
from asyncflow.rpc.tls import Credentials

log = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C")


class LoopThread:
    """An event loop in a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self.thread.start()

    def begin(self, job: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``job``."""
        return asyncio.run_coroutine_threadsafe(job, self.loop)

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Return what ``job`` returns; a caller that is interrupted cancels it."""
        future = self.begin(job)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


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


@_made_from(QueueClient)
class BlockingQueue:
    """A ``QueueClient`` for threads. new: makes that client; in a process that was forked it is called again.

    In a thread that runs an event loop itself, such as that of a notebook, a call is made by another thread.
    """

    def __init__(self, new: Callable[[], QueueClient]) -> None:
        self._new = new
        self._closed = False
        self._inherited: list[object] = []
        self._begin()
        _living.add(self)

    def _begin(self) -> None:
        self._client: QueueClient | None = None
        self._idle: list[asyncio.Runner] = []
        self._beside: LoopThread | None = None
        self._lock = threading.Lock()

    def begin_anew(self) -> None:
        """Forget what belongs to the parent of this process, but close nothing of it: both share its sockets."""
        self._inherited.append((self._client, self._idle, self._beside))
        self._begin()

    @property
    def awaited(self) -> QueueClient:
        """The client whose methods are run."""
        if self._client is None:
            with self._lock:
                self._client = self._client or self._new()
        return self._client

    def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Return what ``job`` returns, which uses ``awaited``. Raises PeerLost where this was closed."""
        if self._closed:
            job.close()
            raise PeerLost("this client was closed", where="queue client")
        if _runs_a_loop():
            with self._lock:
                self._beside = self._beside or LoopThread("queue client")
            return self._beside.run(job)
        try:
            runner = self._idle.pop()
        except IndexError:
            runner = asyncio.Runner(loop_factory=_new_loop)
        loop = runner.get_loop()
        task = loop.create_task(job)
        try:
            result = loop.run_until_complete(task)
        except BaseException as error:
            if isinstance(error, AsyncFlowError) and task.done():
                self._keep(runner)
            else:  # it may be a signal's, raised while a message was half sent or read
                task.cancel()
                self._end(runner, task)
            raise
        self._keep(runner)
        return result

    def close(self) -> None:
        """Close all connections: of calls under way when they are done. Later calls raise PeerLost."""
        self._closed = True
        if _runs_a_loop():
            closing = threading.Thread(target=self._end_idle)
            closing.start()
            closing.join()
        else:
            self._end_idle()
        if self._beside is not None:
            self._beside.run(self.awaited.close())
            self._beside.end()
            self._beside = None

    def _keep(self, runner: asyncio.Runner) -> None:
        self._idle.append(runner)
        if self._closed:
            self._end_idle()

    def _end_idle(self) -> None:
        while self._idle:
            self._end(self._idle.pop())

    def _end(self, runner: asyncio.Runner, *tasks: asyncio.Task[Any]) -> None:
        """Wait for ``tasks``, close the connections of a loop, and the loop."""

        async def end() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.awaited.close()

        with runner:
            runner.run(end())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


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
    presence = _Presence(address, credentials=credentials or Credentials.of_environment())
    queue = BlockingQueue(presence.client)
    try:
        presence.join(timeout)
        yield queue
    finally:
        queue.close()
        presence.leave()


class _Presence:
    """This process in the directory of the queue at ``address``."""

    def __init__(self, address: str, *, credentials: Credentials | None) -> None:
        self._address = address
        self._credentials = credentials
        self._inherited: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._membership = visitor(self._address, credentials=self._credentials)
        self._thread = LoopThread("queue heartbeats")
        self._joining: Future[None] | None = None

    def client(self) -> QueueClient:
        """Make the client of this process, which joins the directory if it was forked from the one that has."""
        if self._process != os.getpid():
            self._inherited.append((self._membership, self._thread, self._joining))
            self._begin()
            self._joining = self._thread.begin(_join(self._membership))
        return QueueClient.of(self._membership, credentials=self._credentials)

    def join(self, timeout: float) -> None:
        """Wait until the directory has taken this process in. Raises DeadlineExceeded."""
        self._thread.run(self._membership.join(timeout))

    def leave(self) -> None:
        """Leave the directory, unless it was the parent of this process that joined it."""
        if self._process != os.getpid():
            return
        if self._joining is not None:
            self._joining.cancel()
        self._thread.run(self._membership.close())
        self._thread.end()


async def _join(membership: Membership) -> None:
    """Join, however late the directory can be reached."""
    while True:
        try:
            return await membership.join(JOIN_S)
        except DeadlineExceeded as error:
            log.warning("%s", error)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Make a loop that polls: an epoll instance would be shared with forked processes, which could change it."""
    return asyncio.SelectorEventLoop(selectors.PollSelector())


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
