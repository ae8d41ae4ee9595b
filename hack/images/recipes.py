"""The images that a cluster with AsyncFlow needs, by name.

``operator`` and ``runtime-cpu`` are AsyncFlow's images; a node needs ``pause`` and ``coredns``. Invariant: images share
equal layers. The layers are the system, then the distributions, then the project's own wheel, which changes most often.
"""

from __future__ import annotations

import compileall
import py_compile
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path
from shutil import copytree
from typing import Final, NamedTuple

from asyncflow import __version__
from images import dockerfile
from images.oci import Entry, Image, Layer, make_layer
from images.python import (
    SITE,
    ImageError,
    command_lines,
    distributions,
    installed,
    interpreter,
    linked,
    programs,
)
from kube.build import binary

ROOT: Final = Path(__file__).resolve().parents[2]
PREFIX: Final = "localhost/asyncflow"
"""A name without a registry would be looked up in a public registry, which does not have these images."""
_CERTIFICATES: Final = "/etc/ssl/certs/ca-certificates.crt"
_CUDA: Final = ("nvidia-", "cuda-", "triton")
"""Dependencies of torch from PyPI that torch from the CPU index does not have. They are left out, except for the
libraries that torch links.
"""
_SOURCES: Final = ("pyproject.toml", "README.md", "runtime", "operator")
_WHEEL_DEADLINE_S: Final = 300.0
_COMPILE_DEADLINE_S: Final = 60.0


def image(name: str) -> Image:
    """Return the image of this name; build the layers that are not in the cache."""
    return RECIPES[name](name)


def _own_image(name: str) -> Image:
    parsed = dockerfile.read(ROOT / "images" / name / "Dockerfile")
    wheel = _wheel()
    needed = installed(distributions(wheel.requires, parsed.extras, without=_CUDA))
    tools = programs(parsed.packages)
    libraries = linked([*interpreter(), *needed, *tools])
    layers = (
        _system(),
        make_layer(f"{name}-needs", [*needed, *tools, *libraries]),
        make_layer("asyncflow", wheel.entries),
    )
    return Image(name=f"{PREFIX}/{name}:{__version__}", layers=layers, config=parsed.config)


@cache
def _system() -> Layer:
    entries = interpreter()
    return make_layer("python", [*entries, *linked(entries), *_etc()])


def _etc() -> list[Entry]:
    """Return files and folders that the base images of the Dockerfiles have and programs expect."""
    return [
        Entry(path="/etc/passwd", content=b"root:x:0:0:root:/root:/sbin/nologin\n", mode=0o644),
        Entry(path="/etc/group", content=b"root:x:0:\n", mode=0o644),
        Entry(path="/etc/nsswitch.conf", content=b"passwd: files\ngroup: files\nhosts: files dns\n", mode=0o644),
        Entry(path=_CERTIFICATES, source=Path(_CERTIFICATES)),
        Entry(path="/tmp", mode=0o1777),
        Entry(path="/proc"),
        Entry(path="/sys"),
        Entry(path="/dev"),
    ]


class _Wheel(NamedTuple):
    """The project's own distribution: its requirements, and its files as pip installs them, with bytecode."""

    requires: list[str]
    entries: list[Entry]


@cache
def _wheel() -> _Wheel:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        _unpack_wheel(Path(folder), site)
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(site, quiet=2, stripdir=str(site), prependdir=SITE, invalidation_mode=mode)
        entries = [
            Entry(path=f"{SITE}/{file.relative_to(site)}", content=file.read_bytes(), mode=0o644)
            for file in sorted(site.rglob("*"))
            if file.is_file()
        ]
        own = Distribution.at(next(site.glob("*.dist-info")))
        return _Wheel(own.requires or [], [*entries, *command_lines(own.entry_points)])


def _unpack_wheel(folder: Path, site: Path) -> None:
    """Build the wheel and unpack it into ``site``. The build uses a copy, because setuptools writes into its source."""
    source = folder / "source"
    source.mkdir()
    for name in _SOURCES:
        if (ROOT / name).is_dir():
            copytree(ROOT / name, source / name)
        else:
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    result = subprocess.run(
        [*pip, "--wheel-dir", str(folder), str(source)],
        capture_output=True,
        text=True,
        timeout=_WHEEL_DEADLINE_S,
        check=False,
    )
    if result.returncode != 0:
        raise ImageError(f"AsyncFlow's wheel could not be built:\n{result.stderr}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site)


def _pause(_: str) -> Image:
    with tempfile.TemporaryDirectory() as folder:
        program = compile_pause(Path(folder))
        layer = make_layer("pause", [Entry(path="/pause", content=program.read_bytes())])
    return Image(name="localhost/pause:1", layers=(layer,), config={"Entrypoint": ["/pause"]})


def compile_pause(folder: Path) -> Path:
    """Compile the program that only reaps processes: the first process of a pod, and of the node itself."""
    source = Path(__file__).with_name("pause.c")
    command: Sequence[str | Path] = ["gcc", "-Os", "-static", "-s", "-o", folder / "pause", source]
    subprocess.run(command, timeout=_COMPILE_DEADLINE_S, check=True)
    return folder / "pause"


def _coredns(_: str) -> Image:
    layer = make_layer("coredns", [Entry(path="/coredns", source=binary("coredns")), *_etc()])
    return Image(name="localhost/coredns:1", layers=(layer,), config={"Entrypoint": ["/coredns"]})


RECIPES: Final[dict[str, Callable[[str], Image]]] = {
    "pause": _pause,
    "coredns": _coredns,
    "operator": _own_image,
    "runtime-cpu": _own_image,
}
