"""The browser that the tests of the page drive: Chromium, from Debian's package where the machine lacks it.

    python hack/browser.py          # installs it where it is lacking, as root, and prints where it is

Invariant: what the machine has is used as it is; where it cannot be had, one sentence says what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS: Final = ("--no-sandbox", "--disable-dev-shm-usage")
"""Of a headless browser in a container, which opens only what the tests serve: no user namespaces, 64 MiB of shm."""
_INSTALL_S: Final = 600.0
_APT: Final = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")


class BrowserError(RuntimeError):
    """There is no browser, and none could be installed."""


def find() -> str:
    """Return the path of a Chromium; ``CHROMIUM`` names another one. Raises BrowserError where there is none."""
    given = os.environ.get("CHROMIUM")
    found = next(filter(None, map(shutil.which, (given,) if given else NAMES)), None)
    if found is None:
        raise BrowserError(
            f"{given or 'Chromium'} is not here: apt-get install chromium, or name one in CHROMIUM; "
            "the tests of the page need it"
        )
    return found


def prepare() -> str:
    """Return the path of a Chromium, installing it where that is needed and possible. Raises BrowserError."""
    try:
        return find()
    except BrowserError:
        if os.geteuid() != 0 or shutil.which("apt-get") is None or os.environ.get("CHROMIUM"):
            raise
    print("installing Debian's chromium", file=sys.stderr)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]):
        ended = subprocess.run(
            [*_APT, *command], env=environment, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
        if ended.returncode != 0:
            raise BrowserError(f"`apt-get {' '.join(command)}` ended with {ended.returncode}: {ended.stderr.strip()}")
    return find()


if __name__ == "__main__":
    try:
        print(prepare())
    except BrowserError as error:
        sys.exit(str(error))
