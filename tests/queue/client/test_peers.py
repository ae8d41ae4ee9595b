"""Calls on real sockets, from a coroutine and from a thread that blocks: answered, repeated, and ended together."""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from asyncflow.errors import DeadlineExceeded, PeerLost, Refused
from asyncflow.local.issuer import Issuer
from asyncflow.queue.blocking import BlockingQueue
from asyncflow.queue.client import QueueClient
from asyncflow.queue.peers import CONTROLLER, Peer, gather_all, scatter
from asyncflow.rpc.access import Access
from asyncflow.rpc.retry import retry_within
from asyncflow.rpc.shm import SHARED_MEMORY_ENV

sys.path.insert(0, str(Path(__file__).parent))
from server_world import Heard, Say, world


def unit(number):
    return Peer("storage", number)


def client(servers, credentials=None):
    return QueueClient(
        find=lambda role, number: servers.address(None if role == "controller" else number),
        units=list,
        worker="w",
        credentials=credentials,
    )


def connect(servers, credentials=None):
    return BlockingQueue(lambda: client(servers, credentials))


class Caller:
    """Makes calls of a client in an event loop, or, with ``thread``, in a thread that blocks."""

    def __init__(self, thread, servers, credentials):
        self._queue = connect(servers, credentials) if thread else None
        self._client = client(servers, credentials)
        self._runner = asyncio.Runner()

    def run(self, job):
        if self._queue:
            return self._queue.run(job(self._queue.awaited.peers))
        return self._runner.run(job(self._client.peers))

    def word(self, peer, word, **options):
        return self.run(lambda peers: say(peers, peer, word, **options))

    def close(self):
        if self._queue:
            self._queue.close()
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(params=[False, True], ids=["loop", "thread"])
def caller(request):
    made = []

    def make(servers, credentials=None):
        made.append(Caller(request.param, servers, credentials))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def say(peers, peer, word, *, timeout=5.0):
    return (await peers.call(peer, "say", Say(word), Heard, timeout=timeout))[0].word


def until(happened, within_s=10.0):
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_call_with_frames_large_and_small(caller):
    frames = [b"small", os.urandom(300_000), b""]
    with world(None) as made:
        answer, came = caller(made).run(
            lambda peers: peers.call(CONTROLLER, "say", Say("a"), Heard, timeout=5.0, frames=frames)
        )
    assert (answer.word, [bytes(frame) for frame in came]) == ("None: a", frames)


def test_calls_together_give_their_answers_in_order(caller):
    with world(0, 1) as made:
        run = caller(made).run
        words = [(0, "slowly"), (1, "b"), (0, "c")]
        answers = run(lambda peers: gather_all(say(peers, unit(n), word) for n, word in words))
        assert answers == ["0: slowly", "1: b", "0: c"]
        assert run(lambda _: gather_all([])) == []


def test_scatter_gives_answers_in_the_order_of_the_keys(caller):
    keys = [1, 0, 1]

    async def send(peers, indices):
        word = await say(peers, unit(keys[indices[0]]), ",".join(map(str, indices)))
        return [word] * len(indices)

    with world(0, 1) as made:
        answers = caller(made).run(lambda peers: scatter(keys, lambda indices: send(peers, indices)))
    assert answers == ["1: 0,2", "0: 1", "1: 0,2"]


def test_the_first_failure_of_gather_all_ends_the_others(caller):
    ended = []

    async def refuses():
        while (0, "never") not in made.calls:
            await asyncio.sleep(0.01)
        raise Refused("no")

    async def waits(peers):
        try:
            await say(peers, unit(0), "never", timeout=30)
        finally:
            ended.append("waits")

    with world(0) as made:
        calls = caller(made)
        with pytest.raises(Refused, match="no"):
            calls.run(lambda peers: gather_all([waits(peers), refuses()]))
        assert ended == ["waits"]
        assert calls.word(unit(0), "again") == "0: again"
        until(lambda: made.cancelled == ["never"])


def test_errors_of_the_peer_arrive_as_they_are(caller):
    with world(None) as made, pytest.raises(Exception, match="there is no method 'nonsense'"):
        caller(made).run(lambda peers: peers.ask("nonsense", Say("a"), Heard, timeout=5.0))


def test_a_silent_peer_costs_its_timeout_and_no_more(caller):
    with world(None) as made:
        calls = caller(made)
        with pytest.raises(DeadlineExceeded, match=r"say was not answered .* within 0.3 s: it is connected and silent"):
            calls.word(CONTROLLER, "never", timeout=0.3)
        with pytest.raises(DeadlineExceeded, match=r"at the controller did not succeed within 0.3 s; last: .*silent"):
            calls.run(lambda peers: peers.ask("say", Say("never"), Heard, timeout=0.3))
        assert calls.word(CONTROLLER, "b") == "None: b"


def test_a_peer_without_an_address_is_waited_for(caller):
    with world() as made:
        calls = caller(made)
        with pytest.raises(DeadlineExceeded, match="no address yet"):
            calls.word(CONTROLLER, "a", timeout=0.2)
        later = threading.Timer(0.2, made.start, [None])
        later.start()
        assert calls.word(CONTROLLER, "b", timeout=10) == "None: b"
        later.join()


def test_a_lost_peer_is_noticed_and_its_successor_is_found(caller):
    lost = []

    async def words(peers):
        try:
            await say(peers, CONTROLLER, "never", timeout=30)
        except PeerLost:
            lost.append(True)
        return await peers.ask("say", Say("b"), Heard, timeout=20)

    with world(None) as made:

        def replace():
            until(lambda: made.calls)
            made.stop(None)
            made.start(None)

        other = threading.Thread(target=replace)
        other.start()
        assert caller(made).run(words).word == "None: b"
        other.join()
    assert lost


def test_a_peer_that_moves_before_it_was_reached_is_found_where_it_went(caller):
    with world(None) as made, closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        places = [f"tcp://127.0.0.1:{nobody.getsockname()[1]}"]
        server, made.address = made.address(None), lambda _: places[-1]
        later = threading.Timer(0.2, places.append, [server])
        later.start()
        assert caller(made).run(lambda peers: peers.ask("say", Say("b"), Heard, timeout=10)).word == "None: b"
        later.join()


def test_attempts_end_with_the_last_error(caller):
    given = []

    async def attempt(seconds):
        given.append(seconds)
        raise PeerLost("gone")

    with world() as made, pytest.raises(DeadlineExceeded, match=r"a word did not succeed within 0.2 s; last: gone"):
        caller(made).run(lambda _: retry_within(attempt, what="a word", timeout=0.2))
    assert given[0] == 0.2
    assert given == sorted(given, reverse=True)


def test_over_tls(caller, tmp_path, monkeypatch):
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off")
    issuer = Issuer(tmp_path / "tls")
    access = Access(table={"say": {"client": lambda _: ()}})
    with world() as made:
        made.start(None, credentials=issuer.credentials("controller"), access=access)
        assert caller(made, issuer.credentials("client")).word(CONTROLLER, "a") == "None: a"


@pytest.fixture
def interruptible():
    """A worker of pytest-xdist ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
def test_a_call_that_a_signal_interrupts_has_sent_its_cancellation_before_the_error_is_raised(interruptible, error):
    async def words(peers):
        try:
            await say(peers, CONTROLLER, "never", timeout=30)
        except (asyncio.CancelledError, KeyboardInterrupt):
            peers.send(CONTROLLER, "say", Say("goodbye"), Heard, timeout=5.0)
            raise

    def stop(*_):
        raise Stop

    with world(None) as made, closing(connect(made)) as queue:
        if error is Stop:
            signal.signal(signal.SIGINT, stop)

        def interrupt():
            until(lambda: made.calls)
            os.kill(os.getpid(), signal.SIGINT)

        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(error):
            queue.run(words(queue.awaited.peers))
        assert made.calls == [(None, "never"), (None, "goodbye")]
        other.join()
        until(lambda: made.cancelled == ["never"])
        assert queue.run(say(queue.awaited.peers, CONTROLLER, "b")) == "None: b"


async def test_a_thread_that_runs_an_event_loop_may_block_too():
    with world(None) as made, closing(connect(made)) as queue:
        assert queue.run(say(queue.awaited.peers, CONTROLLER, "a")) == "None: a"
        assert await asyncio.to_thread(lambda: queue.run(say(queue.awaited.peers, CONTROLLER, "b"))) == "None: b"
