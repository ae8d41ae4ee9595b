"""Costs of generation, training and transfers on a kind of device, in closed form (AsyncFlow §4.3's hybrid cost model).

All functions are pure functions of a shape, a device and sizes. Measured coefficients replace computed ones
(``measured``).

Sources of the formulas: roofline of bytes and operations (Williams et al. 2009); ring all-reduce, 2 (n - 1) / n of the
bytes (Thakur et al. 2005); operations of a pass, all-reduces of tensor parallelism and the pipeline's bubble
(Narayanan et al. 2021, §§2-3, 5.1); memory of activations (Korthikanti et al. 2022, eq. 2 without the attention term,
because attention scores are never stored); optimizer states over devices (Rajbhandari et al. 2020).

Mixtures of experts: experts are divided over devices that are data-parallel for the other layers, and tokens travel to
them and back in two all-to-alls per layer (DeepSpeed-MoE, arXiv 2201.05596, §5.3). In the engine these are all devices
of an instance, tensor times data parallel (vLLM, "Expert Parallel Deployment": EP_SIZE = TP_SIZE x DP_SIZE); a token is
sent once for each of its experts (point to point, DeepSeek-V3, arXiv 2412.19437, §3.4.2). In the trainer the experts
and the other parameters have separate divisions over the same devices (Megatron-Core MoE: expert data parallel =
devices / (expert tensor x expert x pipeline parallel)). Routing is assumed to be uniform.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from asyncflow.planner.devices import Device
from asyncflow.planner.shapes import BYTES, Shape
from asyncflow.planner.work import StepWork

_BETWEEN_NODES: Final = 4
"""Latency of an all-reduce between nodes, as a multiple of the latency inside a node; assumed."""
_ACTIVATION: Final = 34
"""Bytes of a layer's activations for each token and hidden unit, in 16 bit."""
_ATTENTION: Final = 15
"""Bytes of ``_ACTIVATION`` for attention and norms. The rest is for the dense gated part, which experts replace."""
_HEAD_TOKENS: Final = 2048
"""Tokens whose logits exist at the same time in the trainer (``head_tokens``)."""
_RESERVED: Final = 0.04
"""Part of an engine's memory for activations and compiled graphs; assumed."""
MOMENTS: Final = 8
"""Bytes of AdamW's moments per parameter, always in float32."""
GRADIENT: Final = 4
"""Bytes of the accumulated gradient per parameter, always in float32."""


def all_reduce_s(size: float, *, devices: int, device: Device) -> float:
    """Return the seconds of a ring all-reduce of ``size`` bytes."""
    if devices == 1:
        return 0.0
    latency = device.hop_s * (1 if devices <= device.node else _BETWEEN_NODES)
    return latency + 2 * (devices - 1) / devices * size / device.between(devices)


def all_to_all_s(size: float, *, devices: int, device: Device) -> float:
    """Return the seconds of an all-to-all in which each device sends ``size`` bytes, an equal part to each device.

    Between nodes the network is the bottleneck. Parts for devices of the same node do not use it.
    """
    if devices == 1:
        return 0.0
    near = min(devices, device.node)
    latency = device.hop_s * (1 if devices <= device.node else _BETWEEN_NODES)
    inside = (near - 1) / devices * size / device.between(near)
    return latency + max(inside, (devices - near) / devices * size / device.between(devices))


class EngineLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Division of an engine instance: the sequences are divided into dp parts, each on tp devices.

    ep: number of devices over which experts are divided, either all devices of the instance, or 1: then each expert is
    divided over tp, like the other parameters.
    """

    tp: int
    dp: int = 1
    ep: int = 1

    @property
    def devices(self) -> int:
        """Devices of the instance."""
        return self.tp * self.dp

    def weights(self, shape: Shape) -> float:
        """Return the number of parameters on one device."""
        return shape.common / self.tp + shape.routed / max(self.tp, self.ep)

    def __str__(self) -> str:
        """Return the layout in the usual notation: ``TP2 DP32 EP64``."""
        return _named((("TP", self.tp), *((name, n) for name, n in (("DP", self.dp), ("EP", self.ep)) if n > 1)))


def _named(parts: Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{name}{n}" for name, n in parts)


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one decoding step: bytes read, operations, all-reduces, tokens to experts and back, and the rest."""

    read_s: float
    compute_s: float
    reduce_s: float
    rest_s: float
    exchange_s: float = 0.0

    @property
    def seconds(self) -> float:
        """max(bytes, operations) + all-reduces + all-to-alls + the rest."""
        return max(self.read_s, self.compute_s) + self.reduce_s + self.rest_s + self.exchange_s


def decoding(
    shape: Shape, device: Device, layout: EngineLayout, *, running: float, context: float, dtype: str
) -> Decoding:
    """Return the cost of one more token for each of ``running`` sequences that attend to ``context`` tokens.

    A data-parallel part has its share of the sequences. It reads the common weights once for all of them, the cache of
    each sequence, and every expert that any sequence of the instance uses. Over tp devices each layer sums its output
    twice. The key heads are replicated if there are fewer of them than devices.
    """
    size = BYTES[dtype]
    each = max(1.0, running / layout.dp) if layout.dp > 1 else running
    cached = each * context * shape.cache(dtype=dtype) / min(layout.tp, shape.kv_heads)
    experts = shape.routed_read(running, devices=layout.ep) / (layout.tp if layout.ep == 1 else 1)
    weights = shape.common_read / layout.tp + experts
    reduce_s = 2 * shape.layers * all_reduce_s(each * shape.hidden * size, devices=layout.tp, device=device)
    return Decoding(
        read_s=(weights * size + cached) / (device.bandwidth * device.read),
        compute_s=each * shape.forward(context=context) / (layout.tp * device.flops(dtype) * device.generate),
        reduce_s=reduce_s,
        rest_s=device.token_s + each * device.sequence_s,
        exchange_s=_engine_exchange_s(shape, device, layout, tokens=each, dtype=dtype),
    )


def prefill_s(shape: Shape, device: Device, layout: EngineLayout, *, tokens: float, dtype: str) -> float:
    """Return the seconds to compute the cache of ``tokens`` tokens, which is bound by arithmetic.

    One data-parallel part computes them, while each other part computes as many of its own.
    """
    compute = tokens * shape.forward(context=tokens / 2) / (layout.tp * device.flops(dtype) * device.generate)
    reduced = tokens * shape.hidden * BYTES[dtype]
    reduce_s = 2 * shape.layers * all_reduce_s(reduced, devices=layout.tp, device=device)
    return compute + reduce_s + _engine_exchange_s(shape, device, layout, tokens=tokens, dtype=dtype)


def _engine_exchange_s(shape: Shape, device: Device, layout: EngineLayout, *, tokens: float, dtype: str) -> float:
    """Return the seconds in which the tokens of each data-parallel part travel to their experts and back.

    The tensor-parallel devices of a part send equal shares. Without data parallelism every device has all tokens.
    """
    if layout.dp == 1:
        return 0.0
    size = tokens / layout.tp * shape.active * shape.hidden * BYTES[dtype]
    return 2 * shape.expert_layers * all_to_all_s(size, devices=layout.ep, device=device)


def engine_bytes(shape: Shape, device: Device, layout: EngineLayout, *, dtype: str) -> tuple[float, float]:
    """Return the bytes of weights on one device of an engine, and the bytes left for caches (negative if too few)."""
    weights = layout.weights(shape) * BYTES[dtype]
    return weights, device.memory * (device.usable - _RESERVED) - weights


class TrainerLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Division of a trainer: dp x tp x pp devices. recompute: whether layers are recomputed in the backward pass.

    ep: number of the dp x tp devices of a stage over which experts are divided, each expert whole (Megatron-Core's
    expert tensor parallelism of 1); 1: each expert is divided over tp, like the other parameters.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    recompute: bool = False

    @property
    def devices(self) -> int:
        """Devices of the trainer."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        """Return the layout in the usual notation: ``DP8 TP4 PP6 EP16``."""
        more = (("TP", self.tp), ("PP", self.pp), ("EP", self.ep))
        return _named((("DP", self.dp), *((name, n) for name, n in more if n > 1)))

    @property
    def cuts(self) -> tuple[int, int]:
        """Numbers of devices over which common parameters and experts' parameters are divided."""
        return self.tp * self.pp, (self.ep if self.ep > 1 else self.tp) * self.pp


class TrainingCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step of the trainer.

    compute_s: forward and backward passes, without waiting; bubble_s: stages waiting for other stages and for their
    data; reduce_s: all-reduces of tensor parallelism; exchange_s: tokens travelling to experts and back; gather_s:
    exchange of parameters and gradients between replicas, as far as it does not overlap with computation; optimizer_s:
    updates; publish_s: copying the published weights to the host.
    """

    compute_s: float
    bubble_s: float
    reduce_s: float
    gather_s: float
    optimizer_s: float
    publish_s: float
    exchange_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step if all its samples are available, without its publication."""
        computed = self.compute_s + self.bubble_s + self.reduce_s
        return computed + self.gather_s + self.optimizer_s + self.exchange_s


def training(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout) -> TrainingCost:
    """Return the cost of a step's training under a layout.

    The operations are those of a forward pass, three times for training (twice with adapters, as the other weights have
    no gradient), once more if layers are recomputed, and once for each further pass, over all tokens and epochs. A
    micro-batch has at most ``work.pack`` tokens.
    """
    trained = work.trained * work.epochs
    forward = shape.forward(context=work.attended)
    models = 2 if work.critic else 1
    recomputed = 1 if layout.recompute else 0
    passes = models * (3 + recomputed) - (1 if work.lora else 0) + work.passes / work.epochs
    compute = trained * forward * passes / (layout.devices * device.flops(work.compute) * device.train)
    updates = work.epochs * work.updates
    batches = max(1.0, trained / updates / layout.dp / work.pack)
    gather_s = _over_replicas_s(shape, device, work, layout, compute=compute, batches=batches, updates=updates)
    return TrainingCost(
        compute_s=compute,
        bubble_s=compute * (layout.pp - 1) / batches + _pipeline_s(shape, device, work, layout),
        reduce_s=models * _tensor_parallel_s(shape, device, work, layout, batches=batches * updates),
        gather_s=models * gather_s,
        optimizer_s=updates * 2 * _states(shape, work, layout) / (device.bandwidth * device.read),
        publish_s=_published(shape, work) / layout.devices / device.host,
        exchange_s=models * _exchange_s(shape, device, work, layout, batches=batches * updates),
    )


def _tensor_parallel_s(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout, *, batches: float) -> float:
    """Return the seconds of all-reduces: two per layer forward, two backward, two more if the layer is recomputed.

    Whole experts need none. In their layers half of the all-reduces remain, if no shared experts are divided as well.
    """
    if layout.tp == 1:
        return 0.0
    tokens = work.trained * work.epochs / layout.dp / batches
    each = all_reduce_s(tokens * shape.hidden * BYTES[work.compute], devices=layout.tp, device=device)
    layers = shape.layers - (shape.expert_layers / 2 if layout.ep > 1 and not shape.shared else 0)
    return batches * layers / layout.pp * _exchanges(work, layout) * each


def _exchanges(work: StepWork, layout: TrainerLayout) -> float:
    """Return the number of exchanges of tokens between a layer's devices: two in each pass, forward and backward."""
    return 4 + (2 if layout.recompute else 0) + 2 * work.passes / work.epochs


def _exchange_s(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout, *, batches: float) -> float:
    """Return the seconds in which tokens and gradients travel to the experts and back, without overlap."""
    if layout.ep == 1:
        return 0.0
    tokens = work.trained * work.epochs / layout.dp / layout.tp / batches
    size = tokens * shape.active * shape.hidden * BYTES[work.compute]
    each = all_to_all_s(size, devices=layout.ep, device=device)
    return batches * shape.expert_layers / layout.pp * _exchanges(work, layout) * each


def _pipeline_s(shape: Shape, device: Device, work: StepWork, layout: TrainerLayout) -> float:
    """Return the seconds in which a stage sends activations forward and gradients backward, for all its tokens."""
    if layout.pp == 1:
        return 0.0
    tokens = work.trained * work.epochs / layout.dp
    return 2 * tokens * shape.hidden * BYTES[work.compute] / layout.tp / device.between(layout.tp * layout.pp)


def _over_replicas_s(
    shape: Shape, device: Device, work: StepWork, layout: TrainerLayout, *, compute: float, batches: float, updates: int
) -> float:
    """Return the seconds in which replicas exchange data that does not overlap with computation.

    FSDP gathers all parameters forward and backward and scatters gradients in each micro-batch, during computation.
    With tensor and pipeline parallelism gradients are scattered and weights gathered once per update, after the
    computation: common parameters over their replicas, and experts over theirs.
    """
    common, routed = layout.cuts
    sent = _sent(shape.common, over=common, devices=layout.devices)
    sent += _sent(shape.routed, over=routed, devices=layout.devices)
    rate = device.between(layout.devices)
    if work.megatron:
        return updates * sent * (GRADIENT + BYTES[work.compute]) / rate
    scattered = 0 if work.lora else GRADIENT
    gathered = updates * math.ceil(batches) * sent * (2 * BYTES[work.compute] + scattered) / rate
    return max(0.0, gathered - compute)


def _sent(parameters: int, *, over: int, devices: int) -> float:
    """Return the number of parameters that a device sends when its parameters are summed or gathered over replicas."""
    return (devices - over) / devices * (parameters / over)


def _states(shape: Shape, work: StepWork, layout: TrainerLayout) -> float:
    """Return the bytes on one device that an optimizer update reads and writes, of policy and critic."""
    whole = shape.parameters * (MOMENTS + GRADIENT + BYTES[work.holds])
    policy = shape.adapters(work.lora) * (MOMENTS + GRADIENT + BYTES["float32"]) if work.lora else whole
    return (policy + (whole if work.critic else 0)) / layout.devices


def _published(shape: Shape, work: StepWork) -> float:
    """Return the bytes of a published version. Adapters are published alone, in float32."""
    return shape.adapters(work.lora) * BYTES["float32"] if work.lora else shape.parameters * work.published_bytes


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one device of the trainer: states (weights, gradients and moments), a frozen model, activations.

    experts: bytes of ``states`` for experts that a router selects.
    """

    states: float
    frozen: float
    activations: float
    experts: float = 0.0

    @property
    def bytes(self) -> float:
        """All bytes."""
        return self.states + self.frozen + self.activations


def training_memory(shape: Shape, work: StepWork, layout: TrainerLayout) -> Memory:
    """Return the bytes that one device of the trainer needs.

    FSDP shards all parameters over all devices and gathers one layer at a time. With tensor and pipeline parallelism
    each replica holds weights and gradients, divided over tp x pp, and a share of the float32 weights and moments.
    Experts are divided over ep x pp, and their float32 weights and moments over the remaining replicas. Activations are
    those of a micro-batch, in each stage for as many micro-batches as there are stages. If layers are recomputed, they
    are those of one layer and the inputs of all. Tensor parallelism divides them too (sequence parallelism).
    """
    models = 2 if work.critic else 1
    width = BYTES[work.compute]
    if work.megatron:
        state_bytes = MOMENTS + (BYTES["float32"] if width == 2 else 0)

        def held(parameters: int, *, cut: int) -> float:
            return parameters / cut * (width + GRADIENT + state_bytes / (layout.devices / cut))

        common, routed = layout.cuts
        experts = models * held(shape.routed, cut=routed)
        states = models * held(shape.common, cut=common) + experts
        frozen = (shape.common / common + shape.routed / routed) * width
    else:
        gathered = shape.parameters / shape.layers * width if layout.dp > 1 else 0.0
        frozen = shape.parameters / layout.devices * BYTES[work.holds]
        states = _states(shape, work, layout) + (frozen if work.lora else 0.0) + models * 2 * gathered
        experts = states * shape.routed / shape.parameters
    scale = width / 2
    dense, mixed = (work.pack * each * scale for each in _activations(shape, layout))
    inputs = shape.layers * work.pack * shape.hidden * width / layout.tp
    every = shape.dense * dense + shape.expert_layers * mixed
    activations = inputs + max(dense, mixed) if layout.recompute else every
    logits = min(work.pack, _HEAD_TOKENS) * shape.vocab / layout.tp * 2 * BYTES["float32"]
    return Memory(
        states=states,
        frozen=frozen if work.reference else 0.0,
        activations=activations + logits,
        experts=experts,
    )


def _activations(shape: Shape, layout: TrainerLayout) -> tuple[float, float]:
    """Return the bytes of a token's activations on a device, in 16 bit: of a dense layer, and of one with experts.

    They are 0 for a kind of layer that the model does not have. Each expert of a token holds a copy of the token, its
    output, and three times its hidden units (gate, up, and their product), 2 bytes per number. If each expert is
    divided over tp, all tp devices hold the copies and the outputs.
    """
    dense = shape.hidden * _ACTIVATION / layout.tp if shape.dense else 0.0
    if not shape.experts:
        return dense, 0.0
    copies, hidden = 2 * shape.hidden, 3 * shape.expert_hidden
    routed = shape.active * (copies / (layout.tp if layout.ep > 1 else 1) + hidden / layout.tp)
    shared = (copies + 3 * shape.shared) / layout.tp if shape.shared else 0.0
    return dense, shape.hidden * _ATTENTION / layout.tp + 2 * (routed + shared)


def pull_s(shape: Shape, device: Device, work: StepWork, layout: EngineLayout) -> float:
    """Return the seconds in which the devices of one instance receive a version from other nodes."""
    return _published(shape, work) * layout.weights(shape) / shape.parameters / (device.network * device.wire)


def swap_s(shape: Shape, device: Device, work: StepWork, layout: EngineLayout) -> float:
    """Return the seconds in which an instance copies a version from its host's memory to its devices."""
    return layout.weights(shape) * work.published_bytes / device.host
