"""Costs of generation, training and transfers on a kind of device, in closed form (AsyncFlow §4.3's hybrid cost model).

Everything is a pure function of a shape, a device and sizes; what a probe has measured replaces it (``measured``).

Sources of the formulas: roofline of bytes and operations (Williams et al. 2009); ring all-reduce, 2 (n - 1) / n of the
bytes (Thakur et al. 2005); operations of a pass, all-reduces of tensor parallelism and the pipeline's bubble
(Narayanan et al. 2021, §§2-3, 5.1); memory of activations (Korthikanti et al. 2022, eq. 2 without the term of
attention, which is never stored); states over devices (Rajbhandari et al. 2020).
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from asyncflow.planner.devices import Device
from asyncflow.planner.shapes import BYTES, Shape
from asyncflow.planner.work import StepWork

_BETWEEN_NODES: Final = 4
"""Times the latency of an all-reduce inside a node that one between nodes has; assumed."""
_ACTIVATION: Final = 34
"""Bytes of a layer's activations for each token and hidden unit, in 16 bit."""
_HEAD_TOKENS: Final = 2048
"""Tokens whose logits exist at once in the trainer (``head_tokens``)."""
_RESERVED: Final = 0.04
"""Part of an engine's memory for activations and compiled graphs; assumed."""
MOMENTS: Final = 8
"""Bytes of AdamW's moments of a parameter, always in float32."""
GRADIENT: Final = 4
"""Bytes of a parameter's sum of gradients, always in float32."""


def all_reduce_s(size: float, *, devices: int, device: Device) -> float:
    """Return the seconds to sum ``size`` bytes over devices and have the sum on each of them, by a ring."""
    if devices == 1:
        return 0.0
    latency = device.hop_s * (1 if devices <= device.node else _BETWEEN_NODES)
    return latency + 2 * (devices - 1) / devices * size / device.between(devices)


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """One decoding step, in seconds: bytes read, operations, all-reduces, and what is neither."""

    read_s: float
    compute_s: float
    reduce_s: float
    rest_s: float

    @property
    def seconds(self) -> float:
        """max(bytes, operations) + all-reduces + the rest."""
        return max(self.read_s, self.compute_s) + self.reduce_s + self.rest_s


def decoding(shape: Shape, device: Device, *, running: float, context: float, tp: int, dtype: str) -> Decoding:
    """Return the cost of one more token for each of ``running`` sequences that attend to ``context`` tokens.

    Weights are read once for all of them, the cache of each for itself; over ``tp`` devices a layer sums its output
    twice. The heads of keys are repeated where there are fewer than devices.
    """
    size = BYTES[dtype]
    cached = running * context * shape.cache(dtype=dtype) / min(tp, shape.kv_heads)
    read = shape.parameters_read(running) * size / tp + cached
    reduce_s = 2 * shape.layers * all_reduce_s(running * shape.hidden * size, devices=tp, device=device)
    return Decoding(
        read_s=read / (device.bandwidth * device.read),
        compute_s=running * shape.forward(context=context) / (tp * device.flops(dtype) * device.generate),
        reduce_s=reduce_s,
        rest_s=device.token_s + running * device.sequence_s,
    )


def prefill_s(shape: Shape, device: Device, *, tokens: float, tp: int, dtype: str) -> float:
    """Return the seconds to compute the cache of ``tokens`` tokens: bound by arithmetic."""
    compute = tokens * shape.forward(context=tokens / 2) / (tp * device.flops(dtype) * device.generate)
    reduced = tokens * shape.hidden * BYTES[dtype]
    return compute + 2 * shape.layers * all_reduce_s(reduced, devices=tp, device=device)


def engine_bytes(shape: Shape, device: Device, *, tp: int, dtype: str) -> tuple[float, float]:
    """Return the bytes of weights on one device of an engine, and those left for caches (negative: too few)."""
    weights = shape.parameters * BYTES[dtype] / tp
    return weights, device.memory * (device.usable - _RESERVED) - weights


class TrainerLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Division of a trainer: dp x tp x pp devices. recompute: layers are computed again in the backward pass."""

    dp: int
    tp: int = 1
    pp: int = 1
    recompute: bool = False

    @property
    def devices(self) -> int:
        """Devices of the trainer."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        """Return it as people write it: ``DP4 TP8 PP2``."""
        parts = [f"DP{self.dp}", *(f"{name}{n}" for name, n in (("TP", self.tp), ("PP", self.pp)) if n > 1)]
        return " ".join(parts)


class TrainingCost(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the trainer, in seconds, and bytes on one device.

    compute_s: forward and backward, without waiting; bubble_s: stages that wait for others, and for what these send;
    reduce_s: all-reduces of
    tensor parallelism; gather_s: parameters and gradients over replicas, as far as computing does not hide it;
    optimizer_s: updates; publish_s: copying what is published to the host.
    """

    compute_s: float
    bubble_s: float
    reduce_s: float
    gather_s: float
    optimizer_s: float
    publish_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step whose samples are all there, without its publication."""
        return self.compute_s + self.bubble_s + self.reduce_s + self.gather_s + self.optimizer_s


def training(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout) -> TrainingCost:
    """Return the cost of a step's training under a layout.

    Operations: those of a forward pass, three times for training, once more where layers are computed again, and once
    for each further pass, over all tokens and epochs. A micro-batch has at most ``work.pack`` tokens.
    """
    trained = work.trained * work.epochs
    attended = work.prompt + work.responses.mean
    forward = shape.forward(context=attended / 2)
    models = 2 if work.critic else 1
    again = 1 if layout.recompute else 0
    passes = models * (3 + again) + work.passes / work.epochs
    compute = trained * forward * passes / (layout.devices * device.flops(work.compute) * device.train)
    updates = work.epochs * work.updates
    batches = max(1.0, trained / updates / layout.dp / work.pack)
    gather_s = _over_replicas_s(shape, device, work, layout, compute=compute, batches=batches, updates=updates)
    return TrainingCost(
        compute_s=compute,
        bubble_s=compute * (layout.pp - 1) / batches + _pipeline_s(shape, device, work, layout),
        reduce_s=models * _tensor_parallel_s(shape, device, work, layout, batches=batches * updates),
        gather_s=models * gather_s,
        optimizer_s=models * updates * 2 * _states(shape, work, layout) / (device.bandwidth * device.read),
        publish_s=shape.parameters * work.published_bytes / layout.devices / device.host,
    )


def _tensor_parallel_s(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout, *, batches: float) -> float:
    """Return the seconds of all-reduces: two a layer forward, two backward, two more where it is computed again."""
    if layout.tp == 1:
        return 0.0
    tokens = work.trained * work.epochs / layout.dp / batches
    each = all_reduce_s(tokens * shape.hidden * BYTES[work.compute], devices=layout.tp, device=device)
    reduces = 4 + (2 if layout.recompute else 0) + 2 * work.passes / work.epochs
    return batches * shape.layers / layout.pp * reduces * each


def _pipeline_s(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout) -> float:
    """Return the seconds in which a stage sends activations forward and gradients backward, of all its tokens."""
    if layout.pp == 1:
        return 0.0
    tokens = work.trained * work.epochs / layout.dp
    return 2 * tokens * shape.hidden * BYTES[work.compute] / layout.tp / device.between(layout.tp * layout.pp)


def _over_replicas_s(
    shape: Shape, device: Device, work: StepWork, layout: TrainerLayout, *, compute: float, batches: float, updates: int
) -> float:
    """Return the seconds in which replicas exchange, and nothing is computed.

    FSDP gathers all parameters forward and backward and scatters gradients in each micro-batch, beside computing.
    With tensor and pipeline parallelism gradients are scattered and weights gathered once an update, behind it.
    """
    if layout.dp == 1:
        return 0.0
    part = (layout.dp - 1) / layout.dp
    parameters = shape.parameters / (layout.tp * layout.pp)
    rate = device.between(layout.devices)
    if work.megatron:
        return updates * part * parameters * (GRADIENT + BYTES[work.compute]) / rate
    gathered = updates * math.ceil(batches) * part * parameters * (2 * BYTES[work.compute] + GRADIENT) / rate
    return max(0.0, gathered - compute)


def _states(shape: Shape, work: StepWork, layout: TrainerLayout) -> float:
    """Return the bytes on one device that an update of the weights reads and writes."""
    return shape.parameters / layout.devices * (MOMENTS + GRADIENT + BYTES[work.holds])


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device of the trainer: weights, gradients and moments; a frozen model; what a pass needs."""

    states: float
    frozen: float
    activations: float

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.states + self.frozen + self.activations


def training_memory(shape: Shape, work: StepWork, layout: TrainerLayout) -> Memory:
    """Return the bytes that one device of the trainer needs.

    FSDP cuts everything over all devices and gathers a layer at a time. With tensor and pipeline parallelism each
    replica holds weights and gradients, cut over tp x pp, and a part of the float32 weights and moments. Activations
    are those of a micro-batch, of each stage in as many as there are stages, or of one layer and the inputs of all
    where layers are computed again; tensor parallelism cuts them too (sequence parallelism).
    """
    models = 2 if work.critic else 1
    width = BYTES[work.compute]
    cut = layout.tp * layout.pp
    if work.megatron:
        kept = MOMENTS + (BYTES["float32"] if width == 2 else 0)
        states = shape.parameters / cut * (width + GRADIENT + kept / layout.dp)
        frozen = shape.parameters / cut * width
    else:
        gathered = shape.parameters / shape.layers * width if layout.dp > 1 else 0.0
        states = _states(shape, work, layout) + 2 * gathered
        frozen = shape.parameters / layout.devices * width
    scale = width / 2
    layer = work.pack * shape.hidden * _ACTIVATION * scale / layout.tp
    inputs = shape.layers * work.pack * shape.hidden * width / layout.tp
    activations = inputs + layer if layout.recompute else shape.layers * layer
    logits = min(work.pack, _HEAD_TOKENS) * shape.vocab / layout.tp * 2 * BYTES["float32"]
    return Memory(
        states=models * states,
        frozen=frozen if work.reference else 0.0,
        activations=activations + logits,
    )


def pull_s(shape: Shape, device: Device, work: StepWork, *, tp: int) -> float:
    """Return the seconds in which the devices of one instance receive a version from other nodes."""
    return shape.parameters * work.published_bytes / (tp * device.network * device.wire)


def swap_s(shape: Shape, device: Device, work: StepWork, *, tp: int) -> float:
    """Return the seconds in which an instance copies a version from its host's memory to its devices."""
    return shape.parameters * work.published_bytes / (tp * device.host)
