"""Chromium for the tests of the page: find it, or install Debian's package if the machine has none.

    python hack/browser.py          # prints the path of Chromium; as root, installs it first if it is missing

Invariant: a browser that is already installed is used as it is. If none can be installed, the error says what to
install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS: Final = ("--no-sandbox", "--disable-dev-shm-usage")
"""Flags for a headless browser in a container without user namespaces and with 64 MiB of shared memory. It opens only
pages that the tests serve.
"""
_INSTALL_S: Final = 600.0
_APT: Final = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")


class BrowserError(RuntimeError):
    """No browser is installed, and none could be installed."""


def find() -> str:
    """Return the path of Chromium, or of the binary that ``CHROMIUM`` names. Raises BrowserError if there is none."""
    chosen = os.environ.get("CHROMIUM")
    found = next(filter(None, map(shutil.which, (chosen,) if chosen else NAMES)), None)
    if found is None:
        raise BrowserError(
            f"{chosen or 'Chromium'} is not installed, and the tests of the page need it: "
            "run `apt-get install chromium`, or set CHROMIUM to another binary"
        )
    return found


def prepare() -> str:
    """Return the path of Chromium; install it if it is missing and this is possible. Raises BrowserError."""
    try:
        return find()
    except BrowserError:
        if os.geteuid() != 0 or shutil.which("apt-get") is None or os.environ.get("CHROMIUM"):
            raise
    print("installing Debian's chromium", file=sys.stderr)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]):
        result = subprocess.run(
            [*_APT, *command], env=environment, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
        if result.returncode != 0:
            raise BrowserError(f"`apt-get {' '.join(command)}` ended with {result.returncode}: {result.stderr.strip()}")
    return find()


if __name__ == "__main__":
    try:
        print(prepare())
    except BrowserError as error:
        sys.exit(str(error))
