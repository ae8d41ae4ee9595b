"""The private network, mount and process namespaces of a node, and their first process, the init.

Invariant: the init is the child of a process that ends with its parent, so it does not outlive this process. When it
ends, the kernel kills all processes inside and removes the namespaces' mounts, interfaces and packet filter rules.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from images.recipes import compile_pause
from kube.process import PlaneError, Process, wait_until
from node import machine

_SCRIPT: Final = Path(__file__).with_name("init.sh")
_BEGIN_S: Final = 10.0
_EMPTY_FOLDERS: Final = (Path("/var/lib/cni"), Path("/var/lib/kubelet"))
"""Fixed paths that Kubernetes uses: in the namespaces of the node they are mounts in memory."""


class Cell:
    """The namespaces of one node. folder: the folder for its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Path] = []
        self._process: Process | None = None
        self.init = 0

    def start(self) -> None:
        """Create the namespaces, and connect their network to this machine."""
        machine.disconnect()
        machine.make_cgroups()
        for place in _EMPTY_FOLDERS:
            if not place.exists():
                place.mkdir()
                self._made.append(place)
        pause = compile_pause(self._folder)
        own = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")
        self._process = Process("init", [*own, "bash", _SCRIPT, self._folder, pause], log=self._folder / "log" / "init")
        self._process.start()
        wait_until(
            (self._folder / "begun").exists, "the namespaces of the node", timeout_s=_BEGIN_S, needs=[self._process]
        )
        self.init = int(Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text())
        machine.connect(self.init)

    def process(self, name: str, *command: str | Path) -> Process:
        """Return a server that runs inside, not yet started."""
        return Process(name, self.inside(*command), log=self._folder / "log" / name)

    def inside(self, *command: str | Path) -> list[str | Path]:
        """Return the command line that runs ``command`` inside."""
        if not self.init:
            raise PlaneError("the node is not running")
        return ["nsenter", "--target", str(self.init), "--mount", "--net", "--pid", *command]

    def end(self) -> None:
        """End everything inside, and remove what the node had outside of its folder."""
        if self._process is not None:
            self._process.end()
        self._process, self.init = None, 0
        machine.disconnect()
        machine.remove_cgroups()
        for place in self._made:
            place.rmdir()
        self._made.clear()
