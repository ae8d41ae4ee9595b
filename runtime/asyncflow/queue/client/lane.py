"""Runs verbs in a thread that blocks: one step of a verb after the other, asleep in the link on which an answer comes.

What a verb does together is left to ``strands``.

Invariants: a lane runs one verb at a time; when ``run`` returns or raises nothing of the verb goes on; an answer for
which nobody waits is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from asyncflow.errors import AsyncFlowError
from asyncflow.net.keys import Keys
from asyncflow.net.rpc import wire
from asyncflow.net.rpc.blocking_link import LOOK_S
from asyncflow.queue.client.links import Links, answer_to
from asyncflow.queue.client.strands import Strands
from asyncflow.queue.client.verbs import Ask, Effect, Pause, Peer, Together, Verb

log = logging.getLogger(__name__)

T = TypeVar("T")


class Lane:
    """What one thread needs to run verbs. resolve: gives the address of a ``Peer`` now."""

    def __init__(self, *, resolve: Callable[[Peer], str | None], keys: Keys | None) -> None:
        self._links = Links(resolve=resolve, keys=keys)

    def run(self, verb: Verb[T]) -> T:
        """Do what ``verb`` yields; give its result."""
        farewells: list[Ask] = []
        answer: Any = None
        try:
            effect: Effect = next(verb)
            while True:
                try:
                    if isinstance(effect, Ask):
                        answer = self._ask(effect)
                    elif isinstance(effect, Together):
                        answer = Strands(self._links, farewells).run(effect.verbs)
                    elif isinstance(effect, Pause):
                        time.sleep(effect.seconds)
                        answer = None
                    else:
                        farewells.append(effect.ask)
                        answer = None
                except AsyncFlowError as error:
                    effect = verb.throw(error)
                else:
                    effect = verb.send(answer)
        except StopIteration as ended:
            result: T = ended.value
            return result
        except Exception:
            raise
        except BaseException:
            self._say(farewells)
            raise
        finally:
            verb.close()

    def close(self) -> None:
        """Close all links."""
        self._links.close()

    def _ask(self, ask: Ask) -> Any:
        """Make a call and wait for its answer; where the peer has no address, for that first."""
        links, left = self._links, ask.timeout
        due = time.monotonic() + left
        call = next(links.numbers)
        link = links.send(call, ask, due)
        try:
            while True:
                if link is None:
                    time.sleep(min(LOOK_S, left))
                elif parts := links.receive(link, ask.unit, min(LOOK_S, left)):
                    answered, error = wire.read_answer(parts, where=link.address)
                    if answered == call:
                        if error is not None:
                            raise error
                        return answer_to(ask, parts, where=link.address)
                left = due - time.monotonic()
                if left <= 0:
                    raise links.late(ask, link)
                if link is None:
                    link = links.send(call, ask, due)
                else:
                    links.to(ask.unit)
        except Exception:
            raise
        except BaseException:
            if link is not None:
                link.forget(call)
            raise

    def _say(self, farewells: list[Ask]) -> None:
        """Say farewell to peers that can be reached at once."""
        for ask in farewells:
            try:
                self._links.tell(ask, seconds=LOOK_S)
            except AsyncFlowError as error:
                log.info("%s was not heard: %s", ask.method, error)
