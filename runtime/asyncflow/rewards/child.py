"""A reward process: ``python -m asyncflow.rewards.child FUNCTION EXTRACTOR WORKDIR PARENT``.

Invariants: the function runs in the main thread and nothing that it prints reaches the pipe; the process ends when its
parent does (PR_SET_PDEATHSIG, also while the function runs) or when the pipe ends; it never imports torch itself.
"""

from __future__ import annotations

import ctypes
import math
import numbers
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncflow.rewards.extract import EXTRACTORS
from asyncflow.rewards.registry import RewardFunction, load
from asyncflow.rewards.wire import LENGTH, Example, Ready, Scored, frame

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end now if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def score(function: RewardFunction, extractor: str, example: Example) -> Scored:
    """Call the function; whatever it raises or returns becomes a Scored."""
    try:
        response = EXTRACTORS[extractor](example.response)
        value: object = function(response=response, prompt=example.prompt, answer=example.answer, meta=example.meta)
        if isinstance(value, numbers.Real) and math.isfinite(reward := float(value)):
            return Scored(value=reward)
        return Scored(error=f"the reward is {value!r:.200}, not a finite number")
    except Exception as error:  # noqa: BLE001  somebody else's code: what it raises is the outcome
        return Scored(error=f"{type(error).__name__}: {error}")


def serve(function: RewardFunction, extractor: str, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer one example after the other until the pipe ends."""
    while len(head := questions.read(LENGTH.size)) == LENGTH.size:
        body = questions.read(LENGTH.unpack(head)[0])
        answers.write(frame(score(function, extractor, msgspec.msgpack.decode(body, type=Example))))
        answers.flush()


def main(function: str, extractor: str, workdir: str, parent: str) -> None:
    """Run the process."""
    die_with_parent(int(parent))
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    try:
        scorer = load(function, workdir=Path(workdir))
    except Exception as error:  # noqa: BLE001  importing somebody else's code: the pool reports it
        answers.write(frame(Ready(error=f"{type(error).__name__}: {error}")))
        answers.flush()
        return
    answers.write(frame(Ready()))
    answers.flush()
    serve(scorer, extractor, questions, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
