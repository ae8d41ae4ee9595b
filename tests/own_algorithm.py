"""The package of docs/guide/own/algorithm.md, as pip installs it."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "own" / "algorithm.md"


def block(kind: str) -> str:
    """Return the first block of the page in the language ``kind``."""
    found = re.search(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def install(folder: Path) -> Path:
    """Return the folder in which pip has installed the package, without a network; it is built in ``folder``."""
    (folder / "softclip.py").write_text(block("python"))
    (folder / "pyproject.toml").write_text(block("toml"))
    target = folder / "installed"
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-compile"]
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", str(target), str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target
