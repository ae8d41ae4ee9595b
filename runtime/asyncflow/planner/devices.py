"""Kinds of devices: memory, arithmetic, bandwidths, and the share of each that real programs reach.

Invariant: every figure has a source (``Device.sources``): a data sheet, a publication, a measurement, or an assumption,
which a probe or a user's file replaces.

Sources of measurements: ``facts/gpu.md`` of the project (one H100, vLLM 0.25.1, torch 2.11: 2.56 ms a token for one
sequence, 4.8 ms for 64, 21 ms for 512 of a model of 0.6 B parameters), ``docs/internals/gpu.md`` (trainer on H100),
and one core of an AMD EPYC.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec

from asyncflow.errors import ManifestError

GB: Final = 1e9
TERA: Final = 1e12

DATA_SHEET: Final = "data sheet"
ASSUMED: Final = "assumed"
PUBLISHED: Final = "published"

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device.

    profile: its row of ``asyncflow.api.placement.PROFILES``. memory: bytes. bf16, fp32: peak FLOP/s of dense matrix
    products. bandwidth: of its memory, bytes/s. node: number of devices in one node. link, network: bytes/s of one
    device to other devices of its node, and to other nodes, in one direction. host: bytes/s between the device and the
    host's memory.

    Shares that programs reach: usable: of the memory, by tensors; read: of ``bandwidth``; generate, train: of the peak
    (in prefill and decoding, and in a training pass); wire: of link and network. token_s: seconds of a decoding step in
    addition to its bytes and operations (launches, scheduler); sequence_s: the same for each sequence in it (sampling,
    scheduler); hop_s: latency of one all-reduce inside a node.
    """

    name: str
    profile: str
    memory: _Positive
    bf16: _Positive
    fp32: _Positive
    bandwidth: _Positive
    node: Annotated[int, msgspec.Meta(ge=1)]
    link: _Positive
    network: _Positive
    host: _Positive
    usable: _Share = 0.9
    read: _Share = 0.8
    generate: _Share = 0.5
    train: _Share = 0.35
    wire: _Share = 0.7
    token_s: _Seconds = 2.1e-3
    sequence_s: _Seconds = 25e-6
    hop_s: _Seconds = 15e-6
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)

    def flops(self, dtype: str) -> float:
        """Return the peak of matrix products in ``dtype``, FLOP/s."""
        return self.fp32 if dtype == "float32" else self.bf16

    def between(self, devices: int) -> float:
        """Return the bytes/s at which each of ``devices`` communicating devices sends, limited by the slowest link."""
        return self.wire * (self.link if devices <= self.node else self.network)

    def source(self, figure: str) -> str:
        """Return the source of a figure."""
        return self.sources.get(figure, ASSUMED)


FIGURES: Final = tuple(name for name in Device.__struct_fields__ if name not in ("name", "profile", "sources"))
"""The numeric fields."""

_HARDWARE = ("memory", "bf16", "fp32", "bandwidth", "node", "link", "network", "host")


def _sources(measured: Mapping[str, str] = MappingProxyType({})) -> Mapping[str, str]:
    return MappingProxyType({**dict.fromkeys(_HARDWARE, DATA_SHEET), **measured})


_VLLM = "measured: vLLM 0.25.1 on one H100, a model of 0.6 B parameters"
_HOPPER_ENGINE = {"token_s": _VLLM, "sequence_s": _VLLM}
_ASCEND = {
    "bf16": f"{PUBLISHED}: CloudMatrix384, arXiv 2506.12708, of one die",
    "fp32": ASSUMED,
    "bandwidth": f"{PUBLISHED}: CloudMatrix384, arXiv 2506.12708, of one die",
    "link": f"{PUBLISHED}: Periodic Asynchrony §6",
    "host": f"{PUBLISHED}: MindSpeed RL",
}
_CPU = "measured: one core of an AMD EPYC, shared with other work"

DEVICES: Final[Mapping[str, Device]] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                name="h100",
                profile="nvidia",
                memory=80 * GB,
                bf16=989.4 * TERA,
                fp32=66.9 * TERA,
                bandwidth=3350 * GB,
                node=8,
                link=450 * GB,
                network=50 * GB,
                host=54 * GB,
                train=0.25,
                sources=_sources(
                    {
                        **_HOPPER_ENGINE,
                        "host": "measured: 54 GB/s from device to pinned memory",
                        "train": "measured: 0.21 (0.6 B, compiled), 0.22 (1.7 B), 0.27 (4 B, a plain loop)",
                    }
                ),
            ),
            Device(
                name="h200",
                profile="nvidia",
                memory=141 * GB,
                bf16=989.4 * TERA,
                fp32=66.9 * TERA,
                bandwidth=4800 * GB,
                node=8,
                link=450 * GB,
                network=50 * GB,
                host=54 * GB,
                train=0.25,
                sources=_sources(),
            ),
            Device(
                name="h20",
                profile="nvidia",
                memory=96 * GB,
                bf16=148 * TERA,
                fp32=44 * TERA,
                bandwidth=4000 * GB,
                node=8,
                link=450 * GB,
                network=50 * GB,
                host=54 * GB,
                train=0.5,
                sources=_sources(),
            ),
            Device(
                name="a100",
                profile="nvidia",
                memory=80 * GB,
                bf16=312 * TERA,
                fp32=19.5 * TERA,
                bandwidth=2039 * GB,
                node=8,
                link=300 * GB,
                network=25 * GB,
                host=25 * GB,
                sources=_sources(),
            ),
            Device(
                name="910b",
                profile="ascend-a2",
                memory=64 * GB,
                bf16=376 * TERA,
                fp32=94 * TERA,
                bandwidth=1600 * GB,
                node=8,
                link=196 * GB,
                network=12.5 * GB,
                host=50 * GB,
                sources=_sources({**_ASCEND, "network": f"{PUBLISHED}: Periodic Asynchrony §6, 100 Gb/s"}),
            ),
            Device(
                name="910c",
                profile="ascend-a3",
                memory=64 * GB,
                bf16=376 * TERA,
                fp32=94 * TERA,
                bandwidth=1600 * GB,
                node=16,
                link=196 * GB,
                network=25 * GB,
                host=50 * GB,
                sources=_sources({**_ASCEND, "network": f"{PUBLISHED}: CloudMatrix384, arXiv 2506.12708"}),
            ),
            Device(
                name="cpu",
                profile="cpu",
                memory=4 * GB,
                bf16=65 * GB,
                fp32=65 * GB,
                bandwidth=19 * GB,
                node=64,
                link=1.5 * GB,
                network=1 * GB,
                host=9 * GB,
                train=0.3,
                token_s=2e-3,
                sequence_s=20e-6,
                sources={
                    "fp32": _CPU,
                    "bandwidth": _CPU,
                    "link": "measured: host transport by shared memory, 1.59 GB/s",
                    "memory": f"{ASSUMED}: of one process",
                },
            ),
        )
    }
)
"""The known devices by name. A 910c is one of the two dies of a package, as the device plug-in counts them."""

_USUAL: Final[Mapping[str, str]] = MappingProxyType(
    {"nvidia": "h100", "ascend-a2": "910b", "ascend-a3": "910c", "cpu": "cpu"}
)


def usual_device(profile: str) -> Device:
    """Return the default device of a profile. Raises ManifestError if it has none."""
    if profile not in _USUAL:
        raise ManifestError(
            f"the planner knows no device of the profile {profile!r}",
            where="asyncflow plan",
            hint=f"Set --device to one of {', '.join(DEVICES)}, or to a file with the figures of your device",
        )
    return DEVICES[_USUAL[profile]]


def read_device(figures: Mapping[str, Any], *, where: str) -> Device:
    """Return the device that a user's file describes by the fields of ``Device``.

    ``like`` names one of ``DEVICES``, which supplies the fields that are missing in the file. Raises ManifestError if a
    field is unknown, missing or out of range.
    """
    fields = dict(figures)
    like = fields.pop("like", None)
    if like is not None and like not in DEVICES:
        raise ManifestError(f"like: {like!r} is not a known device", where=where, hint=f"Known: {', '.join(DEVICES)}")
    base = msgspec.structs.asdict(DEVICES[like]) if like is not None else {}
    from_file = dict.fromkeys((name for name in fields if name in FIGURES), where)
    sources = {**base.get("sources", {}), **from_file, **fields.get("sources", {})}
    try:
        return msgspec.convert({**base, **fields, "sources": sources}, Device, strict=False)
    except msgspec.ValidationError as error:
        hint = f"Set like ({', '.join(DEVICES)}), from which absent fields are taken, and any of {', '.join(FIGURES)}"
        raise ManifestError(str(error), where=where, hint=hint) from None
