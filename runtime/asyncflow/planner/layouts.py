"""Engines over tensor-parallel devices, and layouts of the trainer, that fit; in words, why others do not.

Invariant: whatever is returned fits into the devices' memory by ``costs``, and is a number of devices that the hardware
gives one process (``asyncflow.api.placement``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.planner.costs import (
    Decoding,
    Memory,
    TrainerLayout,
    TrainingCost,
    decoding,
    engine_bytes,
    prefill_s,
    pull_s,
    swap_s,
    training,
    training_memory,
)
from asyncflow.planner.devices import Device
from asyncflow.planner.shapes import BYTES, Shape
from asyncflow.planner.work import StepWork

_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_WHERE: Final = "asyncflow plan --devices"
_MOST: Final = 1 << 14
"""Devices beyond which no trainer is looked for."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of the engine on ``tp`` devices, in the terms of the simulated engine.

    slots: sequences that run at once; fitting: how many would fit into memory. token_s, share_s, prefill_s,
    recompute_s: as in ``SimulatedOptions``; swap_s, pull_s: to load a version, and to receive it. full: a decoding step
    with all slots taken. bytes: of weights and full slots on one device.
    """

    tp: int
    slots: int
    fitting: int
    token_s: float
    share_s: float
    prefill_s: float
    recompute_s: float
    swap_s: float
    pull_s: float
    full: Decoding
    bytes: float

    @property
    def rate(self) -> float:
        """Tokens a second with all slots taken."""
        return self.slots / (self.token_s + self.share_s * (self.slots - 1))


class TrainerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of the trainer, what its step costs, and bytes on one device."""

    layout: TrainerLayout
    cost: TrainingCost
    memory: Memory

    @property
    def devices(self) -> int:
        """Devices of the trainer."""
        return self.layout.devices

    @property
    def step_s(self) -> float:
        """Seconds of a step whose samples are all there."""
        return self.cost.step_s


def gigabytes(count: float) -> str:
    """Return bytes as people compare them with a data sheet: ``65.5 GB``."""
    if count >= 1e11:
        return f"{count / 1e9:,.0f} GB"
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def processes(device: Device, *, most: int) -> list[int]:
    """Return the numbers of devices, powers of two up to ``most``, that an instance can have inside a node."""
    if device.profile == "cpu":
        return [1] if most >= 1 else []
    legal = PROFILES[device.profile].legal_counts
    return [count for count in (1, 2, 4, 8, 16) if count in legal and count <= min(most, device.node)]


def engine(shape: Shape, device: Device, work: StepWork, *, tp: int) -> EnginePlan | None:
    """Return an instance on ``tp`` devices; None where weights and the cache of the longest sample do not fit."""
    weights, left = engine_bytes(shape, device, tp=tp, dtype=work.engine)
    each = shape.cache(dtype=work.engine) / min(tp, shape.kv_heads)
    if shape.heads % tp or left < work.longest * each:
        return None
    fitting = max(1, int(left / ((work.prompt + work.responses.resident) * each)))
    slots = min(work.slots, fitting)

    def step(running: int) -> Decoding:
        return decoding(shape, device, running=running, context=work.context, tp=tp, dtype=work.engine)

    alone, full = step(1), step(slots)
    prompt_s = prefill_s(shape, device, tokens=work.prompt, tp=tp, dtype=work.engine)
    return EnginePlan(
        tp=tp,
        slots=slots,
        fitting=fitting,
        token_s=alone.seconds,
        share_s=(full.seconds - alone.seconds) / (slots - 1) if slots > 1 else 0.0,
        prefill_s=prompt_s / work.group,
        recompute_s=prefill_s(shape, device, tokens=work.context, tp=tp, dtype=work.engine) / work.context,
        swap_s=swap_s(shape, device, work, tp=tp),
        pull_s=pull_s(shape, device, work, tp=tp),
        full=full,
        bytes=weights + slots * (work.prompt + work.responses.resident) * each,
    )


def engines(shape: Shape, device: Device, work: StepWork, *, most: int) -> list[EnginePlan]:
    """Return an instance for each number of devices, up to ``most``, on which the model fits.

    Raises ManifestError, with the arithmetic, where it fits on none.
    """
    found = [each for tp in processes(device, most=most) if (each := engine(shape, device, work, tp=tp)) is not None]
    if not found:
        raise _no_engine(shape, device, work, most=most)
    return found


def refusal_of_engine(shape: Shape, device: Device, work: StepWork, *, tp: int) -> str:
    """Return in words why an instance on ``tp`` devices does not fit, and on how many it does."""
    size = shape.parameters * BYTES[work.engine]
    of = "a device has" if tp == 1 else f"{tp} devices have"
    tensors = tp * device.memory * device.usable
    need = f"{shape.name} in {_SHORT[work.engine]} needs {gigabytes(size)} a replica"
    more = [n for n in processes(device, most=device.node) if engine(shape, device, work, tp=n) is not None]
    advice = f": use tensor parallel {more[0]}" if more else ""
    if shape.heads % tp:
        return f"{shape.heads} attention heads of {shape.name} cannot be divided over {tp} devices{advice}"
    if size <= tensors:
        cache = work.longest * shape.cache(dtype=work.engine) * tp / min(tp, shape.kv_heads)
        need += f", and the cache of a sample of {work.longest:,} tokens {gigabytes(cache)}"
    room = "" if size > tp * device.memory else f", of which {gigabytes(tensors)} are for tensors"
    return f"{need}, {of} {gigabytes(tp * device.memory)}{room}{advice}"


def _no_engine(shape: Shape, device: Device, work: StepWork, *, most: int) -> ManifestError:
    tp = max(processes(device, most=most), default=1)
    return ManifestError(
        refusal_of_engine(shape, device, work, tp=tp),
        where=_WHERE,
        hint="Give more devices, a device with more memory, or a narrower rollout.engine.dtype",
    )


def layouts(device: Device, work: StepWork, *, devices: int) -> Iterator[TrainerLayout]:
    """Yield the layouts of a trainer on exactly ``devices`` devices.

    Tensor parallelism stays inside a node. A pipeline has as many stages as a power of two.
    """
    recomputing = (False, True) if work.recompute is None else (work.recompute,)
    cuts = [(1, 1)]
    if work.megatron:
        tensor = processes(device, most=devices)
        cuts = [(tp, pp) for tp in tensor for pp in (1, 2, 4, 8, 16) if devices % (tp * pp) == 0]
    for tp, pp in cuts:
        for recompute in recomputing:
            yield TrainerLayout(dp=devices // (tp * pp), tp=tp, pp=pp, recompute=recompute)


def trainer(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout) -> TrainerPlan | None:
    """Return a trainer with this layout; None where it does not fit or cannot be cut so."""
    memory = training_memory(shape, work, layout)
    if memory.bytes > device.memory * device.usable or shape.heads % layout.tp or layout.pp > shape.layers:
        return None
    if layout.dp > work.samples:
        return None
    return TrainerPlan(layout=layout, cost=training(shape, device, work, layout), memory=memory)


def trainers(shape: Shape, device: Device, work: StepWork, *, devices: int) -> list[TrainerPlan]:
    """Return the trainers on exactly ``devices`` devices that fit, the fastest first."""
    found = (trainer(shape, device, work, layout) for layout in layouts(device, work, devices=devices))
    return sorted((each for each in found if each is not None), key=lambda each: (each.step_s, each.memory.bytes))


def refusal_of_trainer(
    shape: Shape, device: Device, work: StepWork, *, devices: int, only: TrainerLayout | None = None
) -> str:
    """Return in words why no trainer on ``devices`` devices fits, and how many would do.

    The arithmetic is that of the layout that needs the least memory, or of ``only``.
    """
    tried = (only,) if only is not None else layouts(device, work, devices=devices)
    layout, least = min(
        ((layout, training_memory(shape, work, layout)) for layout in tried), key=lambda pair: pair[1].bytes
    )
    on = f"training {shape.name} on {devices} {'device' if devices == 1 else 'devices'} ({layout})"
    room = device.memory * device.usable
    if least.bytes <= room:
        return f"{on} cannot divide {work.samples} samples, {shape.heads} heads or {shape.layers} layers so"
    count = devices
    while count < _MOST and not trainers(shape, device, work, devices=count):
        count += count
    enough = f": give the trainer {count} devices" if devices < count < _MOST else ""
    frozen = f" + {gigabytes(least.frozen)} of the reference" if least.frozen else ""
    return (
        f"{on} needs {gigabytes(least.bytes)} on each ({gigabytes(least.states)} of weights, gradients and moments"
        f"{frozen} + {gigabytes(least.activations)} for a micro-batch of {work.pack:,} tokens), a device has "
        f"{gigabytes(device.memory)}, of which {gigabytes(room)} are for tensors{enough}"
    )
