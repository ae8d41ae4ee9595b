"""The resources of a node on its machine, outside of its namespaces: one link, two routes, a control group.

Invariant: addresses and names are fixed, so a machine has one node at a time, and a new node finds and removes the
resources that a killed one left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kube.process import PlaneError, wait_until

HOST: Final = "10.199.77.1"
"""This machine's end of the link."""
ADDRESS: Final = "10.199.77.2"
"""The node's end."""
PODS: Final = "10.244.0.0/24"
SERVICES: Final = "10.96.0.0/16"
CGROUP: Final = "asyncflow-node"
PACKAGES: Final = ("containerd", "runc", "containernetworking-plugins", "iptables", "conntrack")
_PROGRAMS: Final = ("containerd", "ctr", "runc", "iptables", "conntrack", "ip", "nsenter", "unshare", "gcc", "ldd")
_PLUGINS: Final = Path("/usr/lib/cni")
_OUTSIDE: Final = "af-node0"
_INSIDE: Final = "af-node1"
_PREFIX: Final = 30
_DEADLINE_S: Final = 20.0
_INSTALL_S: Final = 600.0


def prepare(say: Callable[[str], None]) -> None:
    """Install the missing Debian packages. Raises PlaneError if a node still cannot run."""
    if os.geteuid() == 0 and _missing() and shutil.which("apt-get") is not None:
        say(f"installing {' '.join(PACKAGES)}")
        run("apt-get", "-qq", "update", within_s=_INSTALL_S)
        quietly = ("env", "DEBIAN_FRONTEND=noninteractive")
        run(*quietly, "apt-get", "-qq", "install", "--no-install-recommends", *PACKAGES, within_s=_INSTALL_S)
    check()


def check() -> None:
    """Raise PlaneError if a requirement is missing, with the command that installs it."""
    if os.geteuid() != 0:
        raise PlaneError("a node needs root: it makes namespaces, mounts and a network link")
    if missing := _missing():
        install = f"apt-get install --no-install-recommends {' '.join(PACKAGES)}"
        raise PlaneError(f"a node needs {', '.join(missing)}: {install}")
    if not Path("/sys/fs/cgroup/memory").is_dir():
        raise PlaneError("a node needs cgroup v1, which this machine does not mount")


def _missing() -> list[str]:
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return missing if (_PLUGINS / "bridge").exists() else [*missing, str(_PLUGINS / "bridge")]


def run(*command: str | Path, within_s: float = _DEADLINE_S) -> str:
    """Run a command and return its output. Raises PlaneError, with its error output, if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    if result.returncode != 0:
        raise PlaneError(f"`{' '.join(map(str, command))}` ended with {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def connect(init: int) -> None:
    """Create the link into the network namespace of process ``init``, and the routes to pods and services."""
    inside = ("nsenter", "--target", str(init), "--net")
    run("ip", "link", "add", _OUTSIDE, "type", "veth", "peer", "name", _INSIDE)
    run("ip", "link", "set", _INSIDE, "netns", str(init))
    run("ip", "address", "add", f"{HOST}/{_PREFIX}", "dev", _OUTSIDE)
    run("ip", "link", "set", _OUTSIDE, "up")
    run(*inside, "ip", "link", "set", _INSIDE, "name", "eth0")
    run(*inside, "ip", "address", "add", f"{ADDRESS}/{_PREFIX}", "dev", "eth0")
    run(*inside, "ip", "link", "set", "eth0", "up")
    run(*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    for network in (SERVICES, PODS):
        run("ip", "route", "add", network, "via", ADDRESS)


def disconnect() -> None:
    """Remove the link and its routes, unless the end of the namespace has already removed them."""
    if _linked():
        subprocess.run(["ip", "link", "delete", _OUTSIDE], capture_output=True, timeout=_DEADLINE_S, check=False)
        wait_until(lambda: not _linked(), "the link of the node to disappear", timeout_s=_DEADLINE_S)


def make_cgroups() -> None:
    """Create the node's group in every hierarchy; in the cpuset hierarchy, copy the allowed CPUs and memory nodes."""
    for hierarchy in _hierarchies():
        group = hierarchy / CGROUP
        group.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (group / name).exists():
                (group / name).write_text((hierarchy / name).read_text())


def remove_cgroups() -> None:
    """Wait until the node's groups contain no processes, which takes a moment after a kill, and remove them."""
    wait_until(_removed, f"the control groups {CGROUP} to be empty", timeout_s=_DEADLINE_S)


def _removed() -> bool:
    removed = True
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / CGROUP, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:
                removed = False
    return removed


def left(folder: Path) -> list[str]:
    """Return the remaining resources of a node whose files were in ``folder``; none if it has ended."""
    found = [_OUTSIDE] if _linked() else []
    found += [f"route {line}" for line in run("ip", "route").splitlines() if ADDRESS in line]
    found += [str(hierarchy / CGROUP) for hierarchy in _hierarchies() if (hierarchy / CGROUP).exists()]
    found += [
        f"mount {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line
    ]
    found += [f"process {process.name}" for process in Path("/proc").glob("[0-9]*") if _belongs(process, folder)]
    return found + ([str(folder)] if folder.exists() else [])


def _belongs(process: Path, folder: Path) -> bool:
    try:
        names_folder = str(folder) in (process / "cmdline").read_text(errors="replace")
        return names_folder or CGROUP in (process / "cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _hierarchies() -> Iterator[Path]:
    """Yield the mount points of the control group hierarchies: one for each controller of v1, and the tree of v2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(place)


def _linked() -> bool:
    return Path(f"/sys/class/net/{_OUTSIDE}").exists()
