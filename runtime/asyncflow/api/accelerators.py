"""The table of facts about accelerators: resource names, legal counts, mounts, environment, ports.

Sources: MindCluster at 22bb3d98 and vllm-ascend (``facts/ascend.md`` of the project); NVIDIA's device plugin.
Invariant: nothing else in the project knows a vendor's names. A new kind of device is a new row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of accelerator.

    resource: the name that its device plugin gives it, "" for none. legal_counts: devices that one process can have;
    gang_counts: the same where several processes form a gang. image: which runtime image. mounts: host paths,
    read-only, where no container runtime hook brings them. visible: the variable by which a process sees only its
    devices. collective: the torch.distributed back end. host_port, npu_port: the first port on which it listens, on the
    host's and on the devices' network, where the i-th process of a node has ports_per_process from i of these on.
    """

    title: str
    resource: str
    legal_counts: tuple[int, ...]
    gang_counts: tuple[int, ...]
    image: str
    collective: str
    mounts: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    visible: str = ""
    runtime_class: str = ""
    node_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    host_port: int = 0
    npu_port: int = 0
    ports_per_process: int = 0


_ASCEND_MOUNTS = (
    "/usr/local/Ascend/driver",
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
)
_ASCEND_ENV = MappingProxyType(
    {
        "HCCL_CONNECT_TIMEOUT": "1500",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_OP_EXPANSION_MODE": "AIV",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    }
)
_UP_TO_8 = tuple(range(1, 9))
_ONE_OR_EVEN_TO_16 = (1, *range(2, 17, 2))


def _ascend(
    title: str, *, resource: str, legal: tuple[int, ...], gang: tuple[int, ...], labels: dict[str, str]
) -> Profile:
    return Profile(
        title=title,
        resource=resource,
        legal_counts=legal,
        gang_counts=gang,
        image="runtime-ascend",
        collective="hccl",
        mounts=_ASCEND_MOUNTS,
        env=_ASCEND_ENV,
        visible="ASCEND_RT_VISIBLE_DEVICES",
        runtime_class="ascend",
        node_labels=MappingProxyType(labels),
        host_port=60000,
        npu_port=61024,
        ports_per_process=64,
    )


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "cpu": Profile(
            title="CPU", resource="", legal_counts=(0,), gang_counts=(0,), image="runtime-cpu", collective="gloo"
        ),
        "nvidia": Profile(
            title="NVIDIA",
            resource="nvidia.com/gpu",
            legal_counts=tuple(range(1, 17)),
            gang_counts=tuple(range(1, 17)),
            image="runtime-cuda",
            collective="nccl",
            env=MappingProxyType({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
            visible="CUDA_VISIBLE_DEVICES",
            runtime_class="nvidia",
        ),
        "ascend-a2": _ascend(
            "Ascend A2",
            resource="huawei.com/Ascend910",
            legal=_UP_TO_8,
            gang=_UP_TO_8,
            labels={"accelerator": "huawei-Ascend910"},
        ),
        "ascend-a3": _ascend(
            "Ascend A3",
            resource="huawei.com/Ascend910",
            legal=_ONE_OR_EVEN_TO_16,
            gang=tuple(range(2, 17, 2)),
            labels={"accelerator": "huawei-Ascend910"},
        ),
        "ascend-a5": _ascend(
            "Ascend A5", resource="huawei.com/npu", legal=_UP_TO_8, gang=(8,), labels={"accelerator": "huawei-npu"}
        ),
    }
)
"""Profile name, as in ``spec.*.accelerator.profile``, to its facts."""


def counted(counts: tuple[int, ...]) -> str:
    """Give device counts in few words: ``1 to 8``, ``1, 2, 4``."""
    if len(counts) > 2 and counts == tuple(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]} to {counts[-1]}"
    return ", ".join(map(str, counts))
