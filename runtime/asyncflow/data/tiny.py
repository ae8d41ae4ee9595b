"""The tiny tasks that the project makes itself: ``tiny://reverse-digits``.

Each has checkable prompts without end, and a lesson: what a model is taught before it is trained by reward, the right
answer together with wrong habits that are far more frequent, as pre-training teaches both.

Invariants: prompts and responses are ASCII and short, so that a two-layer model on a CPU can learn them in seconds; a
lesson never shows a held-out prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from asyncflow.data.base import GeneratedSource, Prompt, Purpose, held_out
from asyncflow.errors import ManifestError

Response = Callable[[Prompt], str]


@dataclass(frozen=True, kw_only=True)
class TinyTask:
    """One task.

    ask: gives the prompt for any index in [0, size); habits: how a model that has had its lesson responds, each with
    its share of the lesson; the shares add up to 1.
    """

    name: str
    size: int
    ask: Callable[[int], Prompt]
    habits: Sequence[tuple[float, Response]]

    def lesson(self, *, seed: int) -> Iterator[tuple[str, str]]:
        """Yield questions and responses without end, a pure function of ``seed``."""
        rng = random.Random(seed)
        shares = [share for share, _ in self.habits]
        while True:
            prompt = self.ask(rng.randrange(self.size))
            if not held_out(prompt.question):
                (_, respond), *_ = rng.choices(self.habits, shares)
                yield prompt.question, respond(prompt)


DIGITS = 5


def _reverse(index: int) -> Prompt:
    digits = f"{index:0{DIGITS}d}"
    return Prompt(question=f"{digits}=", answer=digits[::-1], task="tiny://reverse-digits")


def _right(prompt: Prompt) -> str:
    return str(prompt.answer)


def _echo(prompt: Prompt) -> str:
    return f"={prompt.question[:DIGITS]}"


def _slip(prompt: Prompt) -> str:
    return f"{prompt.answer[:-1]}{(int(prompt.answer[-1]) + 1) % 10}"


REVERSE_DIGITS = TinyTask(
    name="reverse-digits", size=10**DIGITS, ask=_reverse, habits=((0.12, _right), (0.83, _echo), (0.05, _slip))
)
"""``40718=`` asks for ``81704``. Habits: right; the digits as they came, after another ``=``; a wrong last digit."""

TASKS = {task.name: task for task in (REVERSE_DIGITS,)}


def tiny_task(name: str, *, where: str) -> TinyTask:
    """Return the task of that name. Raises ManifestError where there is none."""
    if name not in TASKS:
        raise ManifestError(f"there is nothing tiny named {name!r}", where=where, hint=f"One of: {', '.join(TASKS)}")
    return TASKS[name]


def open_tiny(name: str, *, seed: int, purpose: Purpose, size: int | None, where: str) -> GeneratedSource:
    """Open the tiny task ``name`` as a source of prompts. Raises ManifestError where there is none."""
    task = tiny_task(name, where=where)
    return GeneratedSource(task.ask, name=f"tiny://{name}", indices=task.size, seed=seed, purpose=purpose, size=size)
