"""The table of facts about accelerators: resource names, legal counts, mounts, environment, ports, nodes.

Sources: MindCluster at 22bb3d98 and vllm-ascend (``facts/ascend.md`` of the project); NVIDIA's device plugin.
Invariant: nothing else in the project knows a vendor's names. A new kind of device is a new row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

PORTS_PER_PROCESS: Final = 64
"""Ports that the ranks or the engine of one replica may use of each range: they listen where one is free. verl gives
the 16 devices of a node 51."""
PORT_SLOTS: Final = 40
"""Replicas that have ports of their own in each range; those beyond let the operating system choose."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A path of the host that a process needs, read-only.

    hooked: whether the vendor's container runtime brings it; gang: whether only processes need it
    that compute together over the devices' network.
    """

    path: str
    hooked: bool = True
    gang: bool = False


@dataclass(frozen=True, kw_only=True)
class PortRange:
    """Ports that a vendor's library listens on: the variable that says which, and the first of them."""

    variable: str
    first: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of accelerator.

    device: torch's name of it. resource: the name that its device plugin gives it, "" for none. legal_counts: devices
    that one process can have; gang_counts: the same where several processes form a gang. image: which runtime image.
    collective: the torch.distributed back end. files: the names that its devices have in /dev. visible: the variable by
    which a process sees its devices, numbered from 0 in a container; assigned: the variable that names the host's
    devices where the vendor's scheduler plug-in chose them. groups: group ids that may open the device files.
    node_labels, node_types: what nodes with it are labelled with, the second with one of several values. port_ranges:
    see ``ports``. host_ip, interfaces: variables with the address, or the name of the network interface, that the
    vendor's library uses (see there).
    """

    title: str
    device: str
    resource: str
    legal_counts: tuple[int, ...]
    gang_counts: tuple[int, ...]
    image: str
    collective: str
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    files: str = ""
    visible: str = ""
    assigned: str = ""
    groups: tuple[int, ...] = ()
    node_labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    node_types: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    port_ranges: tuple[PortRange, ...] = ()
    host_ip: str = ""
    interfaces: tuple[str, ...] = ()


_DRIVER = "/usr/local/Ascend/driver"
_ASCEND_MOUNTS = (
    Mount(path=_DRIVER),
    Mount(path="/usr/local/dcmi"),
    Mount(path="/usr/local/bin/npu-smi"),
    Mount(path="/etc/ascend_install.info"),
    Mount(path="/etc/hccn.conf", hooked=False, gang=True),
)
"""Ascend Docker Runtime brings libraries and tools, but not the devices' addresses on their own network."""
_WHOLE_DRIVER = (Mount(path=_DRIVER, hooked=False), *_ASCEND_MOUNTS[1:])
"""On A5 the part of the driver's folder that the runtime brings is too little (error EI0014)."""
_ASCEND_ENV = MappingProxyType(
    {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HCCL_CONNECT_TIMEOUT": "1500",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_OP_EXPANSION_MODE": "AIV",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    }
)
"""Without the first, every ``import torch`` ends in a traceback where torch_npu is installed and cannot be loaded."""
_HCCL_PORTS = (
    PortRange(variable="HCCL_HOST_SOCKET_PORT_RANGE", first=60000),
    PortRange(variable="HCCL_NPU_SOCKET_PORT_RANGE", first=60000 + PORT_SLOTS * PORTS_PER_PROCESS),
)
_HWHIAIUSER = 1000
"""Group of the user HwHiAiUser, who owns the device files."""
_UP_TO_8 = tuple(range(1, 9))
_ONE_OR_EVEN_TO_16 = (1, *range(2, 17, 2))


def _ascend(
    title: str,
    *,
    resource: str,
    legal: tuple[int, ...],
    gang: tuple[int, ...],
    label: str,
    types: tuple[str, ...] = (),
    mounts: tuple[Mount, ...] = _ASCEND_MOUNTS,
) -> Profile:
    return Profile(
        title=title,
        device="npu",
        resource=resource,
        legal_counts=legal,
        gang_counts=gang,
        image="runtime-ascend",
        collective="hccl",
        mounts=mounts,
        env=_ASCEND_ENV,
        files="davinci[0-9]*",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        assigned="ASCEND_VISIBLE_DEVICES",
        groups=(_HWHIAIUSER,),
        node_labels=MappingProxyType({"accelerator": label}),
        node_types=MappingProxyType({"accelerator-type": types} if types else {}),
        port_ranges=_HCCL_PORTS,
        host_ip="HCCL_IF_IP",
        interfaces=("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    )


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "cpu": Profile(
            title="CPU",
            device="cpu",
            resource="",
            legal_counts=(0,),
            gang_counts=(0,),
            image="runtime-cpu",
            collective="gloo",
        ),
        "nvidia": Profile(
            title="NVIDIA",
            device="cuda",
            resource="nvidia.com/gpu",
            legal_counts=tuple(range(1, 17)),
            gang_counts=tuple(range(1, 17)),
            image="runtime-cuda",
            collective="nccl",
            env=MappingProxyType({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
            files="nvidia[0-9]*",
            visible="CUDA_VISIBLE_DEVICES",
        ),
        "ascend-a2": _ascend(
            "Ascend A2",
            resource="huawei.com/Ascend910",
            legal=_UP_TO_8,
            gang=_UP_TO_8,
            label="huawei-Ascend910",
            types=("module-910b-8", "module-910b-16", "card-910b-infer"),
        ),
        "ascend-a3": _ascend(
            "Ascend A3",
            resource="huawei.com/Ascend910",
            legal=_ONE_OR_EVEN_TO_16,
            gang=tuple(range(2, 17, 2)),
            label="huawei-Ascend910",
            types=("module-a3-16", "module-a3-16-super-pod", "module-a3-8-super-pod"),
        ),
        "ascend-a5": _ascend(
            "Ascend A5",
            resource="huawei.com/npu",
            legal=_UP_TO_8,
            gang=(8,),
            label="huawei-npu",
            mounts=_WHOLE_DRIVER,
        ),
    }
)
"""Profile name, as in ``spec.*.accelerator.profile``, to its facts."""


def host_paths(profile: Profile, *, runtime: bool, gang: bool) -> tuple[str, ...]:
    """Return the paths that have to be mounted from the host.

    runtime: whether the container runs under the vendor's runtime; gang: whether it computes together with others.
    """
    return tuple(mount.path for mount in profile.mounts if not (mount.hooked and runtime) and (gang or not mount.gang))


def ports(profile: Profile, slot: int, *, host_network: bool) -> dict[str, str]:
    """Return the variables that say which ports a process may listen on, such that no two processes conflict.

    slot: the process's number among those of its job that have devices. Processes on a host's network may meet those of
    another job there, whose slots nobody knows: they let the operating system choose, as do slots beyond PORT_SLOTS.
    """
    if host_network or slot >= PORT_SLOTS:
        return {ports.variable: "auto" for ports in profile.port_ranges}
    skip = slot * PORTS_PER_PROCESS
    return {
        ports.variable: f"{ports.first + skip}-{ports.first + skip + PORTS_PER_PROCESS - 1}"
        for ports in profile.port_ranges
    }


def counted(counts: tuple[int, ...]) -> str:
    """Return device counts in few words: ``1 to 8``, ``1, 2, 4``."""
    if len(counts) > 2 and counts == tuple(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]} to {counts[-1]}"
    return ", ".join(map(str, counts))
