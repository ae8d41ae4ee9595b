"""A cluster with one real node.

    with Node() as node:
        node.load(image("runtime-cpu"))
        node.plane.kubectl("get", "nodes")

Invariant: after ``start`` the node is Ready and resolves names. After ``stop`` nothing of it remains. After the death
of this process, its processes have ended, and the next node removes its files and its control group.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from images.oci import Image
from images.recipes import image
from kube.build import Say, binary
from kube.folder import Folder
from kube.plane import ControlPlane
from kube.process import PlaneError, Process, wait_until
from node import machine, servers
from node.cell import Cell

PLACE: Final = "node"
_HERE: Final = Path(__file__).parent
_SYSTEM_IMAGES: Final = ("pause", "coredns")
_BINARIES: Final = ("kubelet", "coredns", "kubectl")
_IMPORT_DEADLINE_S: Final = 600.0
_READY_S: Final = 120.0
_API_FLAGS: Final = ("--enable-admission-plugins=NodeRestriction", "--kubelet-preferred-address-types=InternalIP")


class Node:
    """A control plane and a node. audited: record every request; say: receives progress messages."""

    def __init__(self, *, audited: bool = False, say: Say = lambda _: None) -> None:
        self._say = say
        self._folder: Folder | None = None
        self._cell: Cell | None = None
        self._processes: list[Process] = []
        self.plane = ControlPlane(
            with_=("kcm", "sched"), audited=audited, address=machine.HOST, apiserver_flags=_API_FLAGS, say=say
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def folder(self) -> Path:
        """The folder for all files of the node, removed by ``stop``."""
        if self._folder is None:
            raise PlaneError("the node is not running")
        return self._folder.path

    def start(self) -> None:
        """Start the control plane and the node. Raises PlaneError or BuildError, after cleaning up."""
        machine.check()
        for name in _BINARIES:
            binary(name, say=self._say)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the node and the control plane, and remove their files."""
        if self._cell is not None:
            self._cell.end()
        for process in self._processes:
            process.end()
        self.plane.stop()
        if self._folder is not None:
            self._folder.remove()
        self._processes.clear()
        self._cell = self._folder = None

    def load(self, wanted: Image) -> None:
        """Load an image into the node, as if it had been pulled."""
        command = self.inside("ctr", "--address", servers.socket(self.folder), "--namespace", "k8s.io")
        with subprocess.Popen(
            [*command, "images", "import", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as importing:
            assert importing.stdin is not None
            try:
                wanted.write(importing.stdin)
                _, errors = importing.communicate(timeout=_IMPORT_DEADLINE_S)
            finally:
                importing.kill()
        if importing.returncode != 0:
            raise PlaneError(f"{wanted.name} could not be imported: {errors.decode().strip()}")

    def inside(self, *command: str | Path) -> list[str | Path]:
        """Return the command line that runs ``command`` in the namespaces of the node."""
        if self._cell is None:
            raise PlaneError("the node is not running")
        return self._cell.inside(*command)

    def kill(self, container: str) -> None:
        """Kill the first process of a container, by the container's id, as the kernel does when memory runs out."""
        ctr = ("ctr", "--address", servers.socket(self.folder), "--namespace", "k8s.io")
        machine.run(*self.inside(*ctr, "tasks", "kill", "--signal", "SIGKILL", container))

    def wait_until(self, condition: Callable[[], object], what: str, *, timeout_s: float) -> None:
        """Wait until ``condition`` holds. Raises PlaneError at the deadline, or immediately if a server ended."""
        wait_until(condition, what, timeout_s=timeout_s, needs=self._processes)

    def _start(self) -> None:
        self._folder = Folder.named(PLACE)
        folder = self._folder.path
        (folder / "log").mkdir()
        self._cell = Cell(folder)
        self._cell.start()
        self._say("namespaces and network")
        system = {name: image(name) for name in _SYSTEM_IMAGES}
        self._launch("containerd", *servers.containerd(folder, pause=system["pause"].name))
        self.plane.start()
        self._say("control plane")
        self.wait_until(servers.socket(folder).exists, "containerd to listen", timeout_s=_READY_S)
        self._launch("kubelet", *servers.kubelet(folder, self.plane))
        self._launch("proxy", *servers.proxy(folder, self.plane))
        for each in system.values():
            self.load(each)
        self.plane.kubectl("apply", "-f", str(_HERE / "coredns.yaml"))
        self.wait_until(self._is_ready, "the node to be Ready", timeout_s=_READY_S)
        self._say("kubelet: the node is Ready")
        self.wait_until(self._resolves, "CoreDNS to be available", timeout_s=_READY_S)
        self._say("cluster DNS")

    def _launch(self, name: str, *command: str | Path) -> None:
        if self._cell is None:
            raise PlaneError("the node is not running")
        process = self._cell.process(name, *command)
        self._processes.append(process)
        process.start()

    def _is_ready(self) -> bool:
        nodes = self.plane.api.get("/api/v1/nodes")["items"]
        return any(_holds(node, "Ready") for node in nodes)

    def _resolves(self) -> bool:
        return _holds(self.plane.api.get("/apis/apps/v1/namespaces/kube-system/deployments/coredns"), "Available")


def _holds(item: dict[str, Any], condition: str) -> bool:
    held = {(each["type"], each["status"]) for each in item.get("status", {}).get("conditions", ())}
    return (condition, "True") in held
