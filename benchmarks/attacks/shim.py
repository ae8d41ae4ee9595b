"""Disk and clock faults for all processes of a run, by a library that is preloaded into them."""

from __future__ import annotations

import errno
import mmap
import os
import struct
import subprocess
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
_LAYOUT = struct.Struct("<qi244s")


def build(folder: Path) -> Path:
    """Compile the library into ``folder``."""
    made = folder / "shim.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl"], check=True, timeout=60)
    return made


class Shim:
    """Controls the library ``made`` in processes that were started with ``env``, and in their children."""

    def __init__(self, made: Path, folder: Path) -> None:
        self.synced = folder / "synced"
        self.synced.touch()
        control = folder / "control"
        control.write_bytes(_LAYOUT.pack(0, 0, b""))
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._clock = 0
        self.env = {
            **os.environ,
            "LD_PRELOAD": str(made),
            "ATTACK_CONTROL": str(control),
            "ATTACK_SYNCED": str(self.synced),
        }

    def set_clock(self, offset_s: int) -> None:
        """Shift the system clock of the processes by ``offset_s`` seconds."""
        self._clock = offset_s
        self._write(0, "")

    def fail(self, number: int, path: str) -> None:
        """Make disk calls on paths that contain ``path`` fail with errno ``number``, until ``heal``."""
        self._write(number, path)

    def heal(self) -> None:
        """Make the disk work again."""
        self._write(0, "")

    def fail_for(self, seconds: float, number: int, path: str) -> str:
        """Make the disk fail for ``seconds``, and return a description."""
        self.fail(number, path)
        time.sleep(seconds)
        self.heal()
        return f"{errno.errorcode[number]} for {seconds:.2f} s"

    def _write(self, number: int, path: str) -> None:
        self._map[:] = _LAYOUT.pack(self._clock, 0, path.encode())
        self._map[:] = _LAYOUT.pack(self._clock, number, path.encode())
