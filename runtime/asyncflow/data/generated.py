"""Prompts that a program generates: reasoning-gym's (``gym://DATASET``) and the project's own (``tiny://TASK``).

A tiny task has checkable prompts without end, and a lesson: what a model is taught before it is trained by reward, the
right answer together with wrong habits that are far more frequent, as pre-training teaches both.

Invariants: task ``index`` depends on nothing but (dataset, config, seed, index). Tiny prompts and responses are ASCII
and short, so that a two-layer model on a CPU can learn them in seconds; a lesson never shows a held-out prompt.
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
"""Number of tasks that a dataset is asked to have; ``size`` in the config overrides it, for datasets that limit it."""


def open_gym(
    name: str, *, config: Mapping[str, Any], seed: int, purpose: Purpose, size: int | None, where: str
) -> GeneratedSource:
    """Open the dataset ``name`` of reasoning-gym.

    config: the dataset's own fields, without ``seed``, and ``held_out``, the share of all questions that is kept for
    evaluation (for datasets with few). Raises ManifestError where the package is missing, or it does not know the
    dataset or refuses the config.
    """
    config = dict(config)
    share = config.pop(SHARE, HELD_OUT_SHARE)
    if not isinstance(share, float) or not 0 < share < 1:
        raise ManifestError(f"{SHARE} = {share!r}", where=where, hint="Give a share between 0 and 1, or leave it out")
    if "seed" in config:
        raise ManifestError("seed is no setting of the source", where=f"{where}.config", hint=f"Set {where}.seed")
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
    """Make a reasoning-gym dataset. Raises ManifestError where that is not possible."""
    try:
        import reasoning_gym  # noqa: F401  importing it registers the datasets
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ManifestError(
            f"`gym://` needs reasoning-gym: {error}", where=where, hint="pip install 'asyncflow[gym]'"
        ) from error
    if name not in DATASETS:
        near = ", ".join(difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4))
        raise ManifestError(
            f"reasoning-gym has no dataset {name!r}",
            where=where,
            hint=f"near it: {near or 'nothing'}",
        )
    try:
        return create_dataset(name, **config)
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise ManifestError(
            f"reasoning-gym refuses the config of {name!r}: {error}", where=where, hint="see the dataset's fields"
        ) from error


def _plain(metadata: Any) -> Any:
    """Return the metadata as JSON values: a checker sees lists for tuples, and text for what JSON cannot say."""
    return json.loads(json.dumps(metadata, default=str))


Response = Callable[[Prompt], tuple[str, ...]]
"""What a model says, and what it reads between its turns, in turns: the first, the third and so on are the model's."""


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

    def lesson(self, *, seed: int) -> Iterator[tuple[str, tuple[str, ...]]]:
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
"""``40718=`` asks for ``81704``. Habits: right; the digits as they came, after another ``=``; a wrong last digit."""

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
    """Return a turn with a call, and what the environment ``calculator`` says."""
    first, second = expression.split("*")
    return f"calc({expression})", f"\n{int(first) * int(second)}\n"


PRODUCTS = TinyTask(
    name="products",
    size=len(FACTORS) ** 2,
    ask=_product,
    habits=((0.25, _calculated), (0.45, _guessed), (0.3, _miscopied)),
)
"""``47*86=`` asks for ``4042``, which needs the environment ``calculator``. Habits: a call, and its value; a guess; a
call, and its value with a wrong last digit."""

TASKS = {task.name: task for task in (REVERSE_DIGITS, PRODUCTS)}


def tiny_task(name: str, *, where: str) -> TinyTask:
    """Return the task of that name. Raises ManifestError where there is none."""
    if name not in TASKS:
        raise ManifestError(f"there is nothing tiny named {name!r}", where=where, hint=f"One of: {', '.join(TASKS)}")
    return TASKS[name]


def open_tiny(name: str, *, seed: int, purpose: Purpose, size: int | None, where: str) -> GeneratedSource:
    """Open the tiny task ``name`` as a source of prompts. Raises ManifestError where there is none."""
    task = tiny_task(name, where=where)
    return GeneratedSource(
        task.ask, name=f"tiny://{name}", indices=task.size, seed=seed, purpose=purpose, where=where, size=size
    )
