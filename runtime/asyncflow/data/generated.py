"""Generated prompts: the data sets of reasoning-gym (``gym://DATASET``) and the built-in tasks (``tiny://TASK``).

A tiny task has an endless number of checkable prompts, and a lesson: supervised examples for a model before it is
trained by reward. As in pre-training, a lesson contains right answers and, far more often, wrong ones.

Invariants: task ``index`` depends only on (dataset, config, seed, index). Prompts and responses of tiny tasks are short
and ASCII, so that a two-layer model on a CPU can learn them in seconds. A lesson never contains a held-out prompt.
reasoning-gym is imported lazily.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow.data.base import HELD_OUT_SHARE, GeneratedSource, Prompt, Purpose, held_out
from asyncflow.errors import ManifestError

SHARE = "held_out"
INDICES = 1_000_000
"""Default of ``size`` in the config of a data set: the number of its tasks. Some data sets limit it."""


def open_gym(
    name: str, *, config: Mapping[str, Any], seed: int, purpose: Purpose, size: int | None, where: str
) -> GeneratedSource:
    """Open the data set ``name`` of reasoning-gym.

    config: the fields of the data set, without ``seed``, and ``held_out``, the share of all questions that is held out
    for evaluation (for data sets with few questions). Raises ManifestError if the package is missing, or if it does not
    know the data set or refuses the config.
    """
    config = dict(config)
    share = config.pop(SHARE, HELD_OUT_SHARE)
    if not isinstance(share, float) or not 0 < share < 1:
        what = f"{SHARE} = {share!r} is not a share of the questions"
        raise ManifestError(what, where=where, hint="Set a number between 0 and 1, or remove it")
    if "seed" in config:
        raise ManifestError("seed is not a setting of the source", where=f"{where}.config", hint=f"Set {where}.seed")
    settings = {"size": INDICES, **config}
    dataset = make_dataset(name, {**settings, "seed": seed}, where=where)

    def generate(index: int) -> Prompt:
        entry = dataset[index]
        meta = {"dataset": name, "config": dict(config), "metadata": _plain(entry["metadata"])}
        return Prompt(question=entry["question"], answer=entry["answer"], task=f"gym://{name}", meta=meta)

    return GeneratedSource(
        generate,
        name=f"gym://{name}",
        indices=settings["size"],
        seed=seed,
        purpose=purpose,
        where=where,
        size=size,
        share=share,
    )


def make_dataset(name: str, config: Mapping[str, Any], *, where: str) -> Any:
    """Create a reasoning-gym data set. Raises ManifestError if that is not possible."""
    try:
        import reasoning_gym  # noqa: F401  importing it registers the datasets
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ManifestError(
            f"gym:// needs reasoning-gym: {error}", where=where, hint="Run pip install 'asyncflow[gym]'"
        ) from error
    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4))
        raise ManifestError(
            f"reasoning-gym has no dataset {name!r}",
            where=where,
            hint=f"Correct the name; similar names: {near or 'none'}",
        )
    try:
        return create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise ManifestError(
            f"reasoning-gym refuses the config of {name!r}: {error}",
            where=where,
            hint="Use the fields of the dataset, as reasoning-gym documents them",
        ) from error


def _plain(metadata: Any) -> Any:
    """Return the metadata as JSON values: tuples become lists, and values that JSON cannot represent become strings."""
    return json.loads(json.dumps(metadata, default=str))


Response = Callable[[Prompt], tuple[str, ...]]
"""A function that returns a response: the model's turns (first, third ...) and the observations between them."""


@dataclass(frozen=True, kw_only=True)
class TinyTask:
    """One built-in task.

    ask: returns the prompt for any index in [0, size); habits: the kinds of responses in the lesson, each with its
    share of the lesson. The shares add up to 1.
    """

    name: str
    size: int
    ask: Callable[[int], Prompt]
    habits: Sequence[tuple[float, Response]]

    def lesson(self, *, seed: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield an endless sequence of questions and responses, which depends only on ``seed``."""
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


def _right(prompt: Prompt) -> tuple[str, ...]:
    return (prompt.answer,)


def _echo(prompt: Prompt) -> tuple[str, ...]:
    return (f"={prompt.question[:DIGITS]}",)


def _slip(prompt: Prompt) -> tuple[str, ...]:
    return (_slipped(prompt.answer),)


def _slipped(digits: str) -> str:
    return f"{digits[:-1]}{(int(digits[-1]) + 1) % 10}"


REVERSE_DIGITS = TinyTask(
    name="reverse-digits", size=10**DIGITS, ask=_reverse, habits=((0.12, _right), (0.83, _echo), (0.05, _slip))
)
"""The answer to ``40718=`` is ``81704``. Habits: the right answer; the unchanged digits after a second ``=``; the right
answer with a wrong last digit."""

FACTORS = range(32, 100)
"""Their products all have four digits."""


def _product(index: int) -> Prompt:
    first, second = (FACTORS[factor] for factor in divmod(index, len(FACTORS)))
    return Prompt(question=f"{first}*{second}=", answer=str(first * second), task="tiny://products")


def _calculated(prompt: Prompt) -> tuple[str, ...]:
    return (*_called(prompt.question[:-1]), prompt.answer)


def _miscopied(prompt: Prompt) -> tuple[str, ...]:
    return (*_called(prompt.question[:-1]), _slipped(prompt.answer))


def _guessed(prompt: Prompt) -> tuple[str, ...]:
    return (str(random.Random(prompt.question).randrange(1000, 10000)),)


def _called(expression: str) -> tuple[str, str]:
    """Return a turn with a call, and the answer of the environment ``calculator``."""
    first, second = expression.split("*")
    return f"calc({expression})", f"\n{int(first) * int(second)}\n"


PRODUCTS = TinyTask(
    name="products",
    size=len(FACTORS) ** 2,
    ask=_product,
    habits=((0.25, _calculated), (0.45, _guessed), (0.3, _miscopied)),
)
"""The answer to ``47*86=`` is ``4042``, computed by the environment ``calculator``. Habits: a call, then its value; a
guess without a call; a call, then its value with a wrong last digit."""

TASKS = {task.name: task for task in (REVERSE_DIGITS, PRODUCTS)}


def tiny_task(name: str, *, where: str) -> TinyTask:
    """Return the task ``name``. Raises ManifestError if there is none."""
    if name not in TASKS:
        hint = f"Use one of: {', '.join(TASKS)}"
        raise ManifestError(f"there is no built-in task tiny://{name}", where=where, hint=hint)
    return TASKS[name]


def open_tiny(name: str, *, seed: int, purpose: Purpose, size: int | None, where: str) -> GeneratedSource:
    """Open the tiny task ``name`` as a source of prompts. Raises ManifestError if there is none."""
    task = tiny_task(name, where=where)
    return GeneratedSource(
        task.ask, name=f"tiny://{name}", indices=task.size, seed=seed, purpose=purpose, where=where, size=size
    )
