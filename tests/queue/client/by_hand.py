"""Runs a verb without sockets: whoever runs it answers each call by hand."""

from asyncflow.errors import AsyncFlowError
from asyncflow.queue.client.verbs import Ask, Pause, Together


def carry_out(verb, answer, otherwise=None):
    """Run a verb; ``answer`` is given each call and gives its reply and frames, or raises. Pauses cost nothing.

    otherwise: gives what comes of any other effect, which may be none without it.
    """
    reply, error = None, None
    while True:
        try:
            effect = verb.throw(error) if error else verb.send(reply)
        except StopIteration as ended:
            return ended.value
        reply, error = None, None
        if isinstance(effect, Together):
            try:
                reply = [carry_out(part, answer, otherwise) for part in effect.verbs]
            except AsyncFlowError as failed:
                error = failed
        elif isinstance(effect, Ask):
            try:
                reply = answer(effect)
            except AsyncFlowError as failed:
                error = failed
        elif not isinstance(effect, Pause):
            assert otherwise is not None, effect
            reply = otherwise(effect)
