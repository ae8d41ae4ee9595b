"""The virtual environment of TransferQueue, created once in ``.bench/peer``.

It contains only packages that the running environment lacks. Others, such as torch, which is large, are imported from
the running environment.

Invariant: an environment is complete or absent, and its creation changes nothing outside ``.bench``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PEER = "TransferQueue==0.1.11"
_ROOT = Path(__file__).parents[2]
_INSTALL_S = 1800.0

RAY_ENV = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "TQ_NUM_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
}
"""Variables that TransferQueue needs on a machine with fewer CPUs than it requests from Ray."""


def peer_python(folder: Path = _ROOT / ".bench") -> Path:
    """Return the interpreter that can import TransferQueue; create its environment if necessary."""
    home = folder / "peer"
    python, stamp = home / "bin" / "python", home / PEER
    if not stamp.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        packages = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (packages / "zz_ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = [word for file in _ROOT.glob("constraints.txt") for word in ("-c", str(file))]
        subprocess.run([*map(str, install), *constraints, PEER], check=True, timeout=_INSTALL_S, env=_clean())
        subprocess.run(
            [str(python), "-c", "import transfer_queue"], check=True, timeout=300, env={**_clean(), **RAY_ENV}
        )
        stamp.touch()
    return python


def prepare_libraries() -> None:
    """Make this process and its children find the Debian packages of Mooncake and Redis (``hack/debian.py``)."""
    sys.path.append(str(_ROOT / "hack"))
    import debian

    debian.prepare()


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
