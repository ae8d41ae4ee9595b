"""Layouts of engine instances and of the trainer that fit, and explanations why other layouts do not fit.

Invariant: every returned plan fits into the devices' memory according to ``costs``, and uses a number of devices that
the hardware can allocate to one process (``asyncflow.api.placement``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from asyncflow.api.placement import PROFILES
from asyncflow.errors import ManifestError
from asyncflow.planner.costs import (
    Decoding,
    EngineLayout,
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
_POWERS: Final = (1, 2, 4, 8, 16)
_STAGES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of pipeline stages that are tried for dense models and for mixtures of experts."""
_MOST: Final = 1 << 14
"""Maximum number of devices when searching for a trainer that fits."""


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of the engine, in the terms of the simulated engine.

    slots: number of concurrent sequences; fitting: number of sequences that would fit into memory. token_s, share_s,
    prefill_s, recompute_s: as in ``SimulatedOptions``; swap_s, pull_s: seconds to load a version, and to receive it.
    full: cost of a decoding step with all slots in use. bytes: of weights and full slots on one device.
    """

    layout: EngineLayout
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
        """Tokens per second with all slots in use."""
        return self.slots / (self.token_s + self.share_s * (self.slots - 1))


class TrainerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout of the trainer, the cost of its step, and the bytes on one device."""

    layout: TrainerLayout
    cost: TrainingCost
    memory: Memory

    @property
    def devices(self) -> int:
        """Devices of the trainer."""
        return self.layout.devices

    @property
    def step_s(self) -> float:
        """Seconds of a step if all its samples are available."""
        return self.cost.step_s


def gigabytes(count: float) -> str:
    """Return bytes in the units of data sheets: ``65.5 GB``."""
    if count >= 1e11:
        return f"{count / 1e9:,.0f} GB"
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def processes(device: Device, *, most: int) -> list[int]:
    """Return the possible numbers of devices of an instance inside a node, powers of two up to ``most``."""
    if device.profile == "cpu":
        return [1] if most >= 1 else []
    legal = PROFILES[device.profile].legal_counts
    return [count for count in (1, 2, 4, 8, 16) if count in legal and count <= min(most, device.node)]


def engine_layouts(shape: Shape, device: Device, work: StepWork, *, most: int) -> Iterator[EngineLayout]:
    """Yield the layouts of an instance on up to ``most`` devices.

    Tensor parallelism stays inside a node. An instance that divides its experts may have data-parallel parts. If it
    spans several nodes, it uses whole nodes.
    """
    for tp in processes(device, most=most):
        for size in _doubled(tp, most=most):
            whole = work.wide and divides(shape, size)
            if size == tp or (whole and (size <= device.node or size % device.node == 0)):
                yield EngineLayout(tp=tp, dp=size // tp, ep=size if whole else 1)


def _doubled(first: int, *, most: int) -> list[int]:
    """Return ``first`` and its doublings up to ``most``."""
    return [first << doublings for doublings in range((most // first).bit_length())]


def divides(shape: Shape, devices: int) -> bool:
    """Return whether the experts can be divided evenly over ``devices`` devices."""
    return shape.experts > 0 and shape.experts % devices == 0


def engine(shape: Shape, device: Device, work: StepWork, layout: EngineLayout) -> EnginePlan | None:
    """Return an instance with this layout; None if weights and the cache of the longest sample do not fit."""
    weights, left = engine_bytes(shape, device, layout, dtype=work.engine)
    each = shape.cache(dtype=work.engine) / min(layout.tp, shape.kv_heads)
    if not _divided(shape, layout) or left < work.longest * each:
        return None
    resident = (work.prompt + work.responses.resident) * each
    fitting = layout.dp * max(1, int(left / resident))
    slots = min(layout.dp * work.slots, fitting)

    def step(running: int) -> Decoding:
        return decoding(shape, device, layout, running=running, context=work.context, dtype=work.engine)

    alone, full = step(1), step(slots)
    prompt_s = prefill_s(shape, device, layout, tokens=work.prompt, dtype=work.engine)
    return EnginePlan(
        layout=layout,
        slots=slots,
        fitting=fitting,
        token_s=alone.seconds,
        share_s=(full.seconds - alone.seconds) / (slots - 1) if slots > 1 else 0.0,
        prefill_s=prompt_s / work.group,
        recompute_s=prefill_s(shape, device, layout, tokens=work.context, dtype=work.engine) / work.context,
        swap_s=swap_s(shape, device, work, layout),
        pull_s=pull_s(shape, device, work, layout),
        full=full,
        bytes=weights + slots / layout.dp * resident,
    )


def _divided(shape: Shape, layout: EngineLayout) -> bool:
    """Return whether heads and experts can be divided according to the layout."""
    return shape.heads % layout.tp == 0 and (layout.ep == 1 or divides(shape, layout.ep))


def engines(shape: Shape, device: Device, work: StepWork, *, most: int) -> list[EnginePlan]:
    """Return an instance for each layout, on up to ``most`` devices, in which the model fits.

    Raises ManifestError, with the arithmetic, if it fits in none.
    """
    tried = engine_layouts(shape, device, work, most=most)
    found = [each for layout in tried if (each := engine(shape, device, work, layout)) is not None]
    if not found:
        raise _no_engine(shape, device, work, most=most)
    return found


def refusal_of_engine(shape: Shape, device: Device, work: StepWork, layout: EngineLayout) -> str:
    """Return an explanation why an instance with this layout does not fit, and the smallest layout that fits."""
    advice = _smallest(shape, device, work)
    if shape.heads % layout.tp:
        return f"{shape.heads} attention heads of {shape.name} cannot be divided over {layout.tp} devices{advice}"
    if not _divided(shape, layout):
        return f"{shape.experts} experts of {shape.name} cannot be divided over {layout.ep} devices{advice}"
    if layout.ep > 1:
        return _refusal_of_wide(shape, device, work, layout) + advice
    tp, size = layout.tp, shape.parameters * BYTES[work.engine]
    of = "a device has" if tp == 1 else f"{tp} devices have"
    tensors = tp * device.memory * device.usable
    need = f"{shape.name} in {_SHORT[work.engine]} needs {gigabytes(size)} a replica"
    if size <= tensors:
        cache = work.longest * shape.cache(dtype=work.engine) * tp / min(tp, shape.kv_heads)
        need += f", and the cache of a sample of {work.longest:,} tokens {gigabytes(cache)}"
    room = "" if size > tp * device.memory else f", of which {gigabytes(tensors)} are for tensors"
    return f"{need}, {of} {gigabytes(tp * device.memory)}{room}{advice}"


def _refusal_of_wide(shape: Shape, device: Device, work: StepWork, layout: EngineLayout) -> str:
    """Return the memory arithmetic of one device of an instance that divides its experts."""
    width = BYTES[work.engine]
    common, experts = shape.common * width, shape.routed * width
    cache = work.longest * shape.cache(dtype=work.engine) / min(layout.tp, shape.kv_heads)
    need = common / layout.tp + experts / layout.ep + cache
    return (
        f"{shape.name} in {_SHORT[work.engine]} needs {gigabytes(need)} on each device of {layout} "
        f"({gigabytes(common)} / {layout.tp} + experts of {gigabytes(experts)} / {layout.ep} + {gigabytes(cache)} for "
        f"a sample of {work.longest:,} tokens), a device has {gigabytes(device.memory)}, of which "
        f"{gigabytes(device.memory * device.usable)} are for tensors"
    )


def _smallest(shape: Shape, device: Device, work: StepWork) -> str:
    """Return the advice to use the smallest layout that fits, "" if there is none."""
    tried = engine_layouts(shape, device, work, most=max(device.node, shape.experts))
    more = [layout for layout in tried if engine(shape, device, work, layout) is not None]
    if not more:
        return ""
    least = min(more, key=lambda layout: (layout.devices, layout.dp))
    return f": use {least}" if least.ep > 1 else f": use tensor parallel {least.tp}"


def _no_engine(shape: Shape, device: Device, work: StepWork, *, most: int) -> ManifestError:
    tried = engine_layouts(shape, device, work, most=most)
    layout = max(tried, key=lambda each: (each.devices, each.tp), default=EngineLayout(tp=1))
    wide = ", divide its experts (rollout.engine.options.args.enable_expert_parallel: true)"
    more = wide if shape.experts and not work.wide else ""
    return ManifestError(
        refusal_of_engine(shape, device, work, layout),
        where=_WHERE,
        hint=f"Use more devices, a device with more memory{more}, or a narrower rollout.engine.dtype",
    )


def layouts(shape: Shape, device: Device, work: StepWork, *, devices: int) -> Iterator[TrainerLayout]:
    """Yield the layouts of a trainer on exactly ``devices`` devices.

    Tensor parallelism stays inside a node. The number of pipeline stages is a power of two; with experts also three
    times a power of two, as in published layouts. Experts are divided over a power of two of a stage's devices.
    """
    recomputing = (False, True) if work.recompute is None else (work.recompute,)
    cuts = [(1, 1, 1)]
    if work.megatron:
        stages = _STAGES if shape.experts else _POWERS
        tensor = processes(device, most=devices)
        whole = [(tp, pp) for tp in tensor for pp in stages if devices % (tp * pp) == 0]
        cuts = [(tp, pp, ep) for tp, pp in whole for ep in _expert_cuts(shape, devices=devices // pp)]
    for tp, pp, ep in cuts:
        for recompute in recomputing:
            yield TrainerLayout(dp=devices // (tp * pp), tp=tp, pp=pp, ep=ep, recompute=recompute)


def _expert_cuts(shape: Shape, *, devices: int) -> Iterator[int]:
    """Yield the possible values of ep in a stage of ``devices``: 1, and the powers of two that divide both evenly."""
    yield 1
    for ep in _doubled(2, most=devices):
        if divides(shape, ep) and devices % ep == 0:
            yield ep


def trainer(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout) -> TrainerPlan | None:
    """Return a trainer with this layout; None if it does not fit or cannot be divided this way."""
    memory = training_memory(shape, work, layout)
    if memory.bytes > device.memory * device.usable or shape.heads % layout.tp or layout.pp > shape.layers:
        return None
    if layout.dp > work.samples or not _experts_fit(shape, layout):
        return None
    return TrainerPlan(layout=layout, cost=training(shape, device, work, layout), memory=memory)


def _experts_fit(shape: Shape, layout: TrainerLayout) -> bool:
    """Return whether experts can be divided over a stage's devices according to the layout."""
    return layout.ep == 1 or (divides(shape, layout.ep) and layout.dp * layout.tp % layout.ep == 0)


def trainers(shape: Shape, device: Device, work: StepWork, *, devices: int) -> list[TrainerPlan]:
    """Return the trainers on exactly ``devices`` devices that fit, the fastest first."""
    found = (trainer(shape, device, work, layout) for layout in layouts(shape, device, work, devices=devices))
    return sorted((each for each in found if each is not None), key=lambda each: (each.step_s, each.memory.bytes))


def refusal_of_trainer(
    shape: Shape, device: Device, work: StepWork, *, devices: int, only: TrainerLayout | None = None
) -> str:
    """Return an explanation why no trainer on ``devices`` devices fits, and the number of devices that would suffice.

    The arithmetic is that of the layout with the smallest memory need, or of ``only``.
    """
    tried = (only,) if only is not None else layouts(shape, device, work, devices=devices)
    layout, least = min(
        ((layout, training_memory(shape, work, layout)) for layout in tried), key=lambda pair: pair[1].bytes
    )
    on = f"training {shape.name} on {devices} {'device' if devices == 1 else 'devices'} ({layout})"
    room = device.memory * device.usable
    if least.bytes <= room or not _experts_fit(shape, layout):
        experts = f", {shape.experts} experts" if shape.experts else ""
        return f"{on} cannot divide {work.samples} samples{experts}, {shape.heads} heads or {shape.layers} layers so"
    count = devices
    while count < _MOST and not trainers(shape, device, work, devices=count):
        count += count
    enough = f": give the trainer {count} devices" if devices < count < _MOST else ""
    frozen = f" + {gigabytes(least.frozen)} of the reference" if least.frozen else ""
    experts = f", {gigabytes(least.experts)} of them of experts," if least.experts else ""
    return (
        f"{on} needs {gigabytes(least.bytes)} on each ({gigabytes(least.states)} of weights, gradients and moments"
        f"{experts}{frozen} + {gigabytes(least.activations)} for a micro-batch of {work.pack:,} tokens), a device has "
        f"{gigabytes(device.memory)}, of which {gigabytes(room)} are for tensors{enough}"
    )
