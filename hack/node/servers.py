"""The command line and configuration of each server of a node, as a function of the node's folder.

Invariant: the servers write only into the node's folder and into paths that its namespaces keep in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from kube.build import binary
from kube.plane import ControlPlane
from node import machine

NAME: Final = "node-0"
DNS: Final = "10.96.0.10"
Command = list[str | Path]


def containerd(folder: Path, *, pause: str) -> Command:
    """Return the command of the container runtime. pause: the image of a pod's first process."""
    settings = f"""\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{socket(folder)}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{folder}/cni"
"""
    (folder / "containerd.toml").write_text(settings)
    ranges, routes = [[{"subnet": machine.PODS}]], [{"dst": "0.0.0.0/0"}]
    addresses = {"type": "host-local", "dataDir": "/run/ipam", "ranges": ranges, "routes": routes}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    (folder / "cni").mkdir()
    network = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}
    (folder / "cni" / "pods.conflist").write_text(json.dumps(network))
    return ["containerd", "--config", folder / "containerd.toml"]


def socket(folder: Path) -> Path:
    """Return the socket of the container runtime."""
    return folder / "containerd.sock"


def kubelet(folder: Path, plane: ControlPlane) -> Command:
    """Return the command of the kubelet."""
    settings = {
        "containerRuntimeEndpoint": f"unix://{socket(folder)}",
        "authentication": {
            "anonymous": {"enabled": False},
            "x509": {"clientCAFile": str(plane.folder / "pki" / "ca.crt")},
            "webhook": {"enabled": True},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{machine.CGROUP}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "resolvConf": "",
        "clusterDNS": [DNS],
        "clusterDomain": "cluster.local",
        "podLogsDir": str(folder / "podlogs"),
        "volumePluginDir": str(folder / "plugins"),
        "nodeStatusUpdateFrequency": "4s",
        "syncFrequency": "5s",
        "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "maxPods": 100,
    }
    return [
        binary("kubelet"),
        *("--config", _config(folder, "kubelet.config.k8s.io/v1beta1", "KubeletConfiguration", settings)),
        *("--kubeconfig", plane.kubeconfig(f"system:node:{NAME}", "system:nodes")),
        *("--root-dir", folder / "kubelet", "--cert-dir", folder / "kubelet" / "pki"),
        *("--hostname-override", NAME, "--node-ip", machine.ADDRESS),
    ]


def proxy(folder: Path, plane: ControlPlane) -> Command:
    """Return the command of kube-proxy, without its conntrack limits, which would apply to the whole machine."""
    settings = {
        "clientConnection": {"kubeconfig": str(plane.kubeconfig("system:kube-proxy"))},
        "hostnameOverride": NAME,
        "clusterCIDR": machine.PODS,
        "mode": "iptables",
        "oomScoreAdj": 0,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    file = _config(folder, "kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration", settings)
    return [binary("kube-proxy"), "--config", file]


def _config(folder: Path, version: str, kind: str, settings: Mapping[str, Any]) -> Path:
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump({"apiVersion": version, "kind": kind, **settings}, sort_keys=False))
    return path
