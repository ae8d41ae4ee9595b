"""Libraries and programs for the tests of the queue's backends, from Debian packages if the machine lacks them.

    python hack/debian.py          # prints LD_LIBRARY_PATH and PATH as shell assignments

``mooncake-transfer-engine`` links libibverbs, which no Python package contains, and Redis is a program. Installed
packages are used as they are. Missing ones are downloaded with their dependencies and unpacked into the cache, so the
machine does not change and root is not needed.

Invariant: the folder of unpacked packages is complete or absent.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

LIBRARIES: Final = {
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""The package of each library. A library comes after those that it needs."""
PROGRAMS: Final = {"redis-server": "redis-server"}
_CACHE: Final = Path.home() / ".cache" / "asyncflow" / "debian"
_FETCH_S: Final = 300.0


class DebianError(RuntimeError):
    """A package could not be downloaded or unpacked."""


def environment(*, say: Callable[[str], None] = lambda _: None) -> dict[str, str]:
    """Return the PATH and LD_LIBRARY_PATH that find everything, {} if all is installed; fetch missing packages."""
    lacking = sorted({package for name, package in LIBRARIES.items() if not _loads(name)})
    lacking += [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    if not lacking:
        return {}
    root = _unpacked(lacking, say=say)
    libraries = [str(path.parent) for path in sorted(root.rglob("*.so.*"))]
    return {
        "PATH": os.pathsep.join([str(root / "usr/bin"), os.environ.get("PATH", os.defpath)]),
        "LD_LIBRARY_PATH": os.pathsep.join(dict.fromkeys([*libraries, *_given("LD_LIBRARY_PATH")])),
    }


def prepare(*, say: Callable[[str], None] = lambda _: None) -> None:
    """Make this process and its children find everything."""
    found = environment(say=say)
    os.environ.update(found)
    for name in LIBRARIES if found else ():
        places = (Path(folder) / name for folder in found["LD_LIBRARY_PATH"].split(os.pathsep))
        ctypes.CDLL(next((str(path) for path in places if path.exists()), name), mode=ctypes.RTLD_GLOBAL)


def place(file: Path) -> Path:
    """Return the path that a file has once its package is installed, for a file that may be unpacked in the cache."""
    return Path("/", *file.relative_to(_CACHE).parts[1:]) if file.is_relative_to(_CACHE) else file


def _given(variable: str) -> list[str]:
    return [os.environ[variable]] if os.environ.get(variable) else []


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _unpacked(packages: list[str], *, say: Callable[[str], None]) -> Path:
    key = hashlib.sha256(f"{packages} {platform.machine()} {platform.freedesktop_os_release()}".encode())
    root = _CACHE / key.hexdigest()[:12]
    if not root.exists():
        say(f"fetching Debian's {', '.join(packages)} into {root}")
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=root.parent) as folder:
            made = Path(folder) / "root"
            made.mkdir()
            for file in _fetched(packages, Path(folder)):
                _run("dpkg-deb", "--extract", str(file), str(made))
            try:
                made.rename(root)
            except OSError:
                if not root.exists():
                    raise
    return root


def _fetched(packages: list[str], folder: Path) -> list[Path]:
    """Download the packages and their missing dependencies, with apt's lists in ``folder``."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    apart = {
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(word for name, value in apart.items() for word in ("-o", f"{name}={value}"))]
    _run(*apt, "update")
    _run(*apt, "install", "--yes", "--download-only", "--no-install-recommends", *packages)
    return sorted((folder / "cache" / "archives").glob("*.deb"))


def _run(*command: str) -> None:
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FETCH_S, check=False
        )
    except FileNotFoundError as missing:
        wanted = " ".join(sorted({*LIBRARIES.values(), *PROGRAMS.values()}))
        raise DebianError(
            f"{missing.filename} is missing, so this is not Debian. Install the equivalents of the packages {wanted}"
        ) from missing
    if result.returncode != 0:
        raise DebianError(f"`{' '.join(command)}` ended with {result.returncode}: {result.stderr.strip()}")


if __name__ == "__main__":
    try:
        for variable, value in environment(say=lambda line: print(line, file=sys.stderr)).items():
            print(f"{variable}={value}")
    except DebianError as error:
        sys.exit(str(error))
