"""The command line of each server of a control plane, as a function of the plane's folder, address and ports.

Invariant: the API server listens on the plane's address, and all other servers on 127.0.0.1, on ports of this plane.
The servers write only into the plane's folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from asyncflow.local.placement import PortReservation
from kube.build import binary
from kube.pki import Authority

Command = list[str | Path]

HERE: Final = Path(__file__).parent
LOOPBACK: Final = "127.0.0.1"
_SERVICES: Final = "10.96.0.0/16"
_FIRST_SERVICE: Final = "10.96.0.1"
_MASTERS: Final = ("system:masters",)
_QPS: Final = 300
"""The controllers' limit of requests per second. The defaults (20, 50) would limit what benchmarks measure."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The folder, address and ports of one plane.

    address: the API server's address; audit: whether requests are recorded; pods_need_accounts: whether a pod needs a
    service account, which the controllers create.
    """

    folder: Path
    address: str
    authority: Authority
    etcd_port: int
    peer_port: int
    port: int
    kwok_port: int
    audit: bool
    pods_need_accounts: bool
    extra: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The address of the API server."""
        return f"https://{self.address}:{self.port}"

    @property
    def audit_log(self) -> Path:
        """The file that requests are recorded in."""
        return self.folder / "audit.log"

    def kubeconfig(self, name: str, *, user: str, groups: tuple[str, ...] = ()) -> Path:
        """Return the kubeconfig of a user of this plane."""
        return self.authority.kubeconfig(name, server=self.url, user=user, groups=groups)


def free_ports(count: int) -> list[int]:
    """Return free ports that no outgoing connection uses while a server restarts."""
    with PortReservation(count) as ports:
        return list(ports)


def etcd(site: Site) -> Command:
    """Return the command of etcd; it never syncs to disk, since its data is not kept."""
    clients, peers = f"http://{LOOPBACK}:{site.etcd_port}", f"http://{LOOPBACK}:{site.peer_port}"
    return [
        binary("etcd"),
        *("--name", "plane", "--data-dir", site.folder / "etcd", "--log-level", "warn"),
        *("--listen-client-urls", clients, "--advertise-client-urls", clients),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"plane={peers}"),
        *("--unsafe-no-fsync", f"--quota-backend-bytes={4 << 30}"),
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "5m"),
    ]


def apiserver(site: Site) -> Command:
    """Return the command of the API server."""
    certificate, key = site.authority.server("kube-apiserver", addresses=(site.address, _FIRST_SERVICE))
    to_kubelets, kubelets_key = site.authority.client("kubelet-client", user="kube-apiserver", groups=_MASTERS)
    public, private = site.authority.signing_key("service-accounts")
    command: Command = [
        binary("kube-apiserver"),
        *("--etcd-servers", f"http://{LOOPBACK}:{site.etcd_port}", "--secure-port", str(site.port)),
        *("--bind-address", site.address, "--advertise-address", site.address),
        *("--endpoint-reconciler-type", "none" if site.address == LOOPBACK else "lease"),
        *("--kubelet-client-certificate", to_kubelets, "--kubelet-client-key", kubelets_key),
        *("--service-cluster-ip-range", _SERVICES, "--client-ca-file", site.authority.ca),
        *("--tls-cert-file", certificate, "--tls-private-key-file", key),
        *("--service-account-key-file", public, "--service-account-signing-key-file", private),
        *("--service-account-issuer", "https://kubernetes.default.svc"),
        *("--authorization-mode", "Node,RBAC", "--allow-privileged=true"),
        *("--max-requests-inflight", "1000", "--max-mutating-requests-inflight", "500"),
    ]
    if not site.pods_need_accounts:
        command += ["--disable-admission-plugins", "ServiceAccount"]
    if site.audit:
        command += ["--audit-policy-file", HERE / "audit-policy.yaml", "--audit-log-path", site.audit_log]
        command += ["--audit-log-maxsize", "4096"]
    return command + list(site.extra)


def controller_manager(site: Site) -> Command:
    """Return the command of the controllers: garbage collection, namespaces, Jobs, service accounts, node taints."""
    config = site.kubeconfig("kcm", user="system:kube-controller-manager", groups=_MASTERS)
    authority = site.authority
    return [
        binary("kube-controller-manager"),
        *("--kubeconfig", config, "--authentication-kubeconfig", config, "--authorization-kubeconfig", config),
        *("--secure-port", "0", "--leader-elect=false"),
        *("--service-account-private-key-file", authority.folder / "service-accounts.key"),
        *("--root-ca-file", authority.ca),
        *("--cluster-signing-cert-file", authority.ca, "--cluster-signing-key-file", authority.ca_key),
        *("--kube-api-qps", str(_QPS), "--kube-api-burst", str(2 * _QPS)),
        *("--concurrent-job-syncs", "20", "--concurrent-gc-syncs", "30"),
    ]


def scheduler(site: Site) -> Command:
    """Return the command of the scheduler.

    Every 30 s it retries the pods that have been unschedulable for 20 s, instead of 5 minutes by default: on a busy
    machine, it once missed that the volume of a pod was bound.
    """
    config = site.kubeconfig("sched", user="system:kube-scheduler")
    settings = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(config), "qps": 2 * _QPS, "burst": 4 * _QPS},
        "leaderElection": {"leaderElect": False},
    }
    file = site.folder / "scheduler.yaml"
    file.write_text(yaml.safe_dump(settings))
    return [
        binary("kube-scheduler"),
        *("--config", file, "--authentication-kubeconfig", config, "--authorization-kubeconfig", config),
        *("--secure-port", "0", "--pod-max-in-unschedulable-pods-duration", "20s"),
    ]


def kwok(site: Site) -> Command:
    """Return the command of KWOK, which simulates the kubelets of fake nodes by the stages in ``kwok/``."""
    config = site.kubeconfig("kwok", user="kwok", groups=_MASTERS)
    stages: Sequence[Path] = sorted((HERE / "kwok").glob("*.yaml"))
    return [
        binary("kwok"),
        *("--kubeconfig", config, "--server-address", f"{LOOPBACK}:{site.kwok_port}"),
        *(part for stage in stages for part in ("--config", stage)),
    ]


OPTIONAL: Final[dict[str, Callable[[Site], Command]]] = {"kcm": controller_manager, "sched": scheduler, "kwok": kwok}
