"""The supervised warm-up of a tiny model: it learns the skill together with wrong habits, as pre-training does.

Invariant: the weights are a pure function of (config, lesson, seed) on one machine, whatever the caller's threads and
random state, which are left as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.data.tiny import TinyTask
from asyncflow.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

STEPS = 400
BATCH = 32
LEARNING_RATE = 4e-3
RAMP = 20
"""Steps over which the learning rate rises; afterwards it falls by a cosine to FLOOR of its peak."""
FLOOR = 0.05
IGNORED = -100


def warm_up(folder: Path, task: TinyTask, *, seed: int) -> dict[str, torch.Tensor]:
    """Teach ``task`` to a fresh model of the folder's config and give its weights, float32 on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = Tokenizer.load(folder)
    lesson = task.lesson(seed=seed)
    with _alone(seed):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        for step in range(STEPS):
            ids, targets = _batch(tokenizer, islice(lesson, BATCH))
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * _schedule(step)
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _schedule(step: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return min(1.0, (step + 1) / RAMP) * (FLOOR + (1 - FLOOR) * cosine)


def _batch(tokenizer: Tokenizer, pairs: Iterator[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input ids and the ids to predict from them, both int64 (BATCH, length), padded on the right."""
    import torch

    coded = [(tokenizer.encode(question), [*tokenizer.encode(said), tokenizer.eos_ids[0]]) for question, said in pairs]
    length = max(len(question) + len(said) for question, said in coded) - 1
    ids = torch.full((len(coded), length), tokenizer.pad_id)
    targets = torch.full((len(coded), length), IGNORED)
    for row, (question, said) in enumerate(coded):
        whole = torch.tensor(question + said)
        ids[row, : len(whole) - 1] = whole[:-1]
        targets[row, len(question) - 1 : len(whole) - 1] = whole[len(question) :]
    return ids, targets


@contextmanager
def _alone(seed: int) -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
