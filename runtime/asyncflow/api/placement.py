"""Placement of processes: accelerators and their properties, resources, pod template, and scheduler settings.

``PROFILES`` is the table of accelerators: resource names, legal counts, mounts, environment, ports, node labels. Its
sources are MindCluster at 22bb3d98 and vllm-ascend (``facts/ascend.md`` of the project), and NVIDIA's device plugin.

Invariants: vendors' names occur only in this module, and a new kind of device is a new row of ``PROFILES``. A manifest
requests only accelerator counts that the hardware supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StringConstraints

from asyncflow.api.base import Annotations, Bytes, Cores, Labels, Name, Options, Rule, Spec, keyed_by
from asyncflow.api.durability import ClaimSpec

PORTS_PER_PROCESS: Final = 64
"""Ports of each range that the ranks or the engine of one replica may use; they listen on free ones. verl assigns 51
ports to the 16 devices of a node."""
PORT_SLOTS: Final = 40
"""Replicas that have ports of their own in each range; for further replicas the operating system chooses ports."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A path of the host that a process needs, read-only.

    hooked: whether the vendor's container runtime mounts it; gang: whether only processes need it that compute together
    over the devices' network.
    """

    path: str
    hooked: bool = True
    gang: bool = False


@dataclass(frozen=True, kw_only=True)
class PortRange:
    """A range of ports for a vendor's library. variable: environment variable of the range; first: the first port."""

    variable: str
    first: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of accelerator.

    device: its name in torch. resource: its resource name in Kubernetes, "" for none. legal_counts: device counts that
    one process can have; gang_counts: the same if several processes form a gang. image: the runtime image. collective:
    the torch.distributed backend. files: pattern of its device files in /dev. opened: files in /dev that a process
    opens to compute with it; read: other files that the process reads; variables: environment variables that it needs
    in addition to ``env`` and ``visible``. visible: the variable that lists the devices of a process, numbered from 0
    in a container; assigned: the variable with the devices of the host that the vendor's scheduler plug-in chose.
    groups: ids of groups that may open the device files. node_labels: labels of nodes with the device; node_types: the
    same, with several possible values. port_ranges: see ``ports``. host_ip, interfaces: variables with the address, or
    with the name of the network interface, that the vendor's library uses.
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
    opened: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
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
"""Ascend Docker Runtime mounts libraries and tools, but not the file with the devices' network addresses."""
_WHOLE_DRIVER = (Mount(path=_DRIVER, hooked=False), *_ASCEND_MOUNTS[1:])
"""On A5 the part of the driver's folder that the runtime mounts is not sufficient (error EI0014)."""
_ASCEND_ENV = MappingProxyType(
    {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HCCL_CONNECT_TIMEOUT": "1500",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_OP_EXPANSION_MODE": "AIV",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    }
)
"""Without the first variable, ``import torch`` fails if torch_npu is installed but cannot be loaded."""
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
        opened=("davinci[0-9]*", "davinci_manager", "devmm_svm", "hisi_hdc"),
        read=(*(mount.path for mount in mounts), "/usr/local/Ascend", "/etc/hdcBasic.cfg", "/etc/sys_version.conf"),
        variables=("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_AICPU_PATH"),
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
            opened=("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps/*"),
            read=("/proc/driver/nvidia", "/proc/driver/nvidia-uvm", "/sys/module/nvidia", "/sys/bus", "/sys/devices"),
            variables=("CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
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
"""Profiles by name, as in ``spec.*.accelerator.profile``."""


def host_paths(profile: Profile, *, runtime: bool, gang: bool) -> tuple[str, ...]:
    """Return the paths that must be mounted from the host.

    runtime: whether the container runs under the vendor's runtime; gang: whether it computes together with others.
    """
    return tuple(mount.path for mount in profile.mounts if not (mount.hooked and runtime) and (gang or not mount.gang))


def ports(profile: Profile, slot: int, *, host_network: bool) -> dict[str, str]:
    """Return the environment variables with the ports that a process may listen on, so that no two processes conflict.

    slot: the number of the process among the processes of its job with devices. On the host's network, where processes
    of other jobs use the same ports, the operating system chooses the ports, as for slots beyond PORT_SLOTS.
    """
    if host_network or slot >= PORT_SLOTS:
        return {ports.variable: "auto" for ports in profile.port_ranges}
    skip = slot * PORTS_PER_PROCESS
    return {
        ports.variable: f"{ports.first + skip}-{ports.first + skip + PORTS_PER_PROCESS - 1}"
        for ports in profile.port_ranges
    }


def counted(counts: tuple[int, ...]) -> str:
    """Return device counts as text: ``1 to 8``, ``1, 2, 4``."""
    if len(counts) > 2 and counts == tuple(range(counts[0], counts[-1] + 1)):
        return f"{counts[0]} to {counts[-1]}"
    return ", ".join(map(str, counts))


AUTO: Final = "auto"
"""The profile that stands for the devices of the machine on which the job runs."""


def _without_auto(schema: dict[str, Any]) -> None:
    """Remove the profile ``auto`` from the CRD: pods in a cluster must request a definite resource."""
    schema["enum"] = [name for name in schema["enum"] if name != AUTO]


ProfileName = Annotated[
    Literal["cpu", "nvidia", "ascend-a2", "ascend-a3", "ascend-a5", "auto"], Field(json_schema_extra=_without_auto)
]


class AcceleratorSpec(Spec):
    """Accelerators of one process."""

    profile: ProfileName = "cpu"
    """Kind of device, which determines resource name, legal counts, mounts, environment and ports. ``auto``, with
    ``asyncflow run`` only: the devices of the machine, one for each replica unless ``count`` is larger."""
    count: Annotated[int, Field(ge=0, le=64)] = 0
    """Devices of one replica; 0 exactly on CPU. A trainer starts a rank for each; an engine uses all."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of one device that the process uses: its tensors take at most this part of the memory; the vendor's
    buffers need more, so leave room. On one machine roles whose shares fit use one device together; on a cluster the
    device plug-in must divide a device (time-slicing, MPS), and the pod requests one part."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("count", "profile"),
            ok=lambda accelerator: (
                accelerator.profile == AUTO or accelerator.count in PROFILES[accelerator.profile].legal_counts
            ),
            cel=f"self.count in { {name: list(facts.legal_counts) for name, facts in PROFILES.items()} }[self.profile]",
            why="a process cannot have this number of devices",
            fix="Set per profile: "
            + "; ".join(f"{name} {counted(facts.legal_counts)}" for name, facts in PROFILES.items()),
        ),
        Rule(
            reads=("share", "count"),
            ok=lambda accelerator: accelerator.share == 1 or accelerator.count == 1,
            cel="self.share == 1.0 || self.count == 1",
            why="share is a part of exactly one device",
            fix="Set count: 1, or remove share",
        ),
    )


class ResourcesSpec(Spec):
    """CPU and memory of one process: requests, and also the limit of memory. Absent: the cluster's default."""

    cpu: Cores | None = None
    """Cores. Absent: ``threads``."""
    memory: Bytes | None = None
    """Bytes."""
    shared_memory: Bytes | None = None
    """Bytes of /dev/shm."""


class EnvSpec(Spec):
    """An environment variable."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
    """Name; ASYNCFLOW_* is reserved."""
    value: Annotated[str, StringConstraints(max_length=4096)] = ""
    """Value."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("name",),
            ok=lambda variable: not variable.name.startswith("ASYNCFLOW_"),
            cel="!self.name.startsWith('ASYNCFLOW_')",
            why="ASYNCFLOW_ variables are reserved",
            fix="Choose another name",
        ),
    )


class TemplateSpec(Spec):
    """Additions to the pods that AsyncFlow creates. On one machine only ``env`` has an effect."""

    labels: Labels = Field(default_factory=dict)
    """Labels of the pods."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations of the pods."""
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    """Image. Absent: the image of the accelerator profile."""
    env: Annotated[tuple[EnvSpec, ...], Field(max_length=128, json_schema_extra=keyed_by("name"))] = ()
    """Environment variables."""
    pod_spec: Options = Field(default_factory=dict)
    """Fields of a PodSpec, e.g. nodeSelector, except restartPolicy; they override AsyncFlow's own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("labels",),
            ok=lambda template: not any(key.startswith("asyncflow.dev/") for key in template.labels),
            cel="!has(self.labels) || self.labels.all(key, !key.startsWith('asyncflow.dev/'))",
            why="labels under asyncflow.dev/ are reserved",
            fix="Choose another prefix",
        ),
        Rule(
            reads=("env",),
            ok=lambda template: len({variable.name for variable in template.env}) == len(template.env),
            cel="!has(self.env) || self.env.all(a, self.env.exists_one(b, b.name == a.name))",
            why="one variable is set twice",
            fix="Remove one of them",
        ),
    )


class DriverSpec(Spec):
    """Resources and storage of the driver."""

    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory."""
    claim: ClaimSpec | None = None
    """Volume claim for the driver's files on Kubernetes: figures, events, texts of samples, state of sinks. Absent:
    they are lost with the driver's pod; training does not depend on them."""


class SchedulingSpec(Spec):
    """Scheduling of the gang (trainer, storage and the least number of rollouts) as a whole."""

    gang: Literal["none", "volcano", "kueue"] = "none"
    """Scheduler that places the gang as a whole; ``none``: pods are placed one by one."""
    queue: Name | None = None
    """Queue of that scheduler; needs a gang scheduler."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("queue", "gang"),
            ok=lambda scheduling: scheduling.queue is None or scheduling.gang != "none",
            cel="!has(self.queue) || self.gang != 'none'",
            why="the default scheduler has no queues",
            fix="Set gang to volcano or kueue, or remove queue",
        ),
    )
