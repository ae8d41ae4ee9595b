"""Both runners of verbs, the event loop's and the thread's, carry out the same effects with the same results."""

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
from asyncflow.net.keys import Keys
from asyncflow.queue.client.connections import Connections
from asyncflow.queue.client.lane import Lane
from asyncflow.queue.client.verbs import Ask, Farewell, Pause, Together, persist, scatter, together

sys.path.insert(0, str(Path(__file__).parent))
from server_world import Heard, Say, world


class InLoop:
    """Runs verbs by ``Connections``."""

    def __init__(self, made, keys=None):
        self.loop = asyncio.new_event_loop()
        self.connections = Connections(
            controller=lambda: made.address(None), unit=lambda unit: made.address(unit), keys=keys
        )

    def run(self, verb):
        return self.loop.run_until_complete(self.connections.run(verb))

    def close(self):
        self.loop.run_until_complete(self.connections.close())
        self.loop.close()


class InThread(Lane):
    """Runs verbs by ``Lane``."""

    def __init__(self, made, keys=None):
        super().__init__(resolve=made.address, keys=keys)


@pytest.fixture(params=[InLoop, InThread])
def runner(request):
    made = []

    def make(servers, keys=None):
        made.append(request.param(servers, keys))
        return made[-1]

    yield make
    for one in made:
        one.close()


def say(unit, word, *, timeout=5.0, frames=()):
    answer, out = yield Ask(unit, "say", Say(word), Heard, timeout, frames)
    return answer.word, [bytes(frame) for frame in out]


def word_of(unit, word, **options):
    return (yield from say(unit, word, **options))[0]


def test_a_call_with_frames_large_and_small(runner):
    frames = [b"small", os.urandom(300_000), b""]
    with world(None) as made:
        assert runner(made).run(say(None, "a", frames=frames)) == ("None: a", frames)


def test_calls_together_give_their_answers_in_order(runner):
    def verb():
        return (yield Together([word_of(0, "slowly"), word_of(1, "b"), word_of(0, "c")]))

    with world(0, 1) as made:
        assert runner(made).run(verb()) == ["0: slowly", "1: b", "0: c"]


def test_together_inside_together(runner):
    def inner(word):
        return (yield from together(word_of(unit, word) for unit in (0, 1)))

    with world(0, 1) as made:
        assert runner(made).run(together([inner("a"), inner("b")])) == [["0: a", "1: a"], ["0: b", "1: b"]]
        assert runner(made).run(together([])) == []


def test_scatter_gives_answers_in_the_order_of_the_keys(runner):
    def send(unit, indices):
        word = yield from word_of(unit, ",".join(map(str, indices)))
        return [word] * len(indices)

    keys = [1, 0, 1]
    with world(0, 1) as made:
        answers = runner(made).run(scatter(keys, lambda indices: send(keys[indices[0]], indices)))
    assert answers == ["1: 0,2", "0: 1", "1: 0,2"]


def test_the_first_failure_of_together_ends_the_others(runner):
    ended = []

    def refuses():
        yield Pause(0.05)
        raise Refused("no")

    def waits():
        try:
            yield from word_of(0, "never", timeout=30)
        finally:
            ended.append("waits")

    with world(0) as made:
        started = time.monotonic()
        run = runner(made)
        with pytest.raises(Refused, match="no"):
            run.run(together([waits(), refuses()]))
        assert time.monotonic() - started < 10
        assert run.run(word_of(0, "again")) == "0: again"
        until(lambda: made.cancelled == ["never"])
    assert ended == ["waits"]


def test_errors_of_the_peer_arrive_as_they_are(runner):
    def verb():
        yield Ask(None, "nonsense", Say("a"), Heard, 5.0)

    with world(None) as made, pytest.raises(Exception, match="there is no method 'nonsense'"):
        runner(made).run(verb())


def test_a_silent_peer_costs_its_timeout_and_no_more(runner):
    with world(None) as made:
        run = runner(made)
        with pytest.raises(DeadlineExceeded, match=r"say was not answered .* within 0.3 s: it is connected and silent"):
            run.run(word_of(None, "never", timeout=0.3))
        assert run.run(word_of(None, "b")) == "None: b"


def test_a_peer_without_an_address_is_waited_for(runner):
    with world() as made:
        run = runner(made)
        with pytest.raises(DeadlineExceeded, match="no address yet"):
            run.run(word_of(None, "a", timeout=0.2))
        later = threading.Timer(0.2, made.start, [None])
        later.start()
        assert run.run(word_of(None, "b", timeout=10)) == "None: b"
        later.join()


def test_a_lost_peer_is_noticed_and_a_persistent_verb_finds_its_successor(runner):
    def attempt():
        return (yield from word_of(None, "never" if not lost else "b", timeout=30))

    lost = []

    def verb():
        try:
            yield from attempt()
        except PeerLost:
            lost.append(True)
        return (yield from persist(attempt, what="a word", timeout=20, clock=time.monotonic))

    with world(None) as made:

        def replace():
            until(lambda: made.calls)
            made.stop(None)
            made.start(None)

        other = threading.Thread(target=replace)
        other.start()
        assert runner(made).run(verb()) == "None: b"
        other.join()
    assert lost


def test_a_peer_that_moves_before_it_was_reached_is_found_where_it_went(runner):
    with world(None) as made, closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        places = [f"tcp://127.0.0.1:{nobody.getsockname()[1]}"]
        server, made.address = made.address(None), lambda _: places[-1]
        later = threading.Timer(0.2, places.append, [server])
        later.start()
        words = persist(lambda: word_of(None, "b", timeout=30), what="a word", timeout=10, clock=time.monotonic)
        assert runner(made).run(words) == "None: b"
        later.join()


def test_persist_gives_up_with_the_last_error(runner):
    def attempt():
        raise PeerLost("gone")
        yield

    with (
        world() as made,
        pytest.raises(DeadlineExceeded, match=r"a word did not succeed within 0.2 s; last: gone"),
    ):
        runner(made).run(persist(attempt, what="a word", timeout=0.2, clock=time.monotonic))


def test_with_keys(runner, tmp_path):
    keys = Keys.generate(tmp_path / "key")
    with world() as made:
        made.start(None, keys=keys)
        assert runner(made, keys).run(word_of(None, "a")) == "None: a"


def test_a_caller_that_leaves_says_farewell_in_the_loop():
    def verb():
        yield Farewell(Ask(None, "say", Say("goodbye"), Heard, 5.0))
        yield from word_of(None, "never", timeout=30)

    async def leave(run):
        task = asyncio.create_task(run.connections.run(verb()))
        while not made.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with world(None) as made:
        run = InLoop(made)
        run.loop.run_until_complete(leave(run))
        run.close()
        assert made.calls == [(None, "never"), (None, "goodbye")]


@pytest.fixture
def interruptible():
    """A worker of pytest-xdist ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_thread_that_is_interrupted_says_farewell(interruptible):
    def verb():
        yield Farewell(Ask(None, "say", Say("goodbye"), Heard, 5.0))
        yield from word_of(None, "never", timeout=30)

    with world(None) as made:
        run = InThread(made)

        def interrupt():
            until(lambda: made.calls)
            os.kill(os.getpid(), signal.SIGINT)

        other = threading.Thread(target=interrupt)
        other.start()
        with pytest.raises(KeyboardInterrupt):
            run.run(verb())
        other.join()
        until(lambda: made.calls == [(None, "never"), (None, "goodbye")])
        until(lambda: made.cancelled == ["never"])
        assert run.run(word_of(None, "b")) == "None: b"
        run.close()


def until(happened, within_s=10.0):
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
