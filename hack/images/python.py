"""The files that a Python program needs at run time, from the running interpreter and environment.

There are three parts, which change at different rates: the interpreter with its standard library; the distributions
that a requirement needs, read from their metadata as pip does; and the shared libraries that all of them link, found
by ``ldd``. Invariant: a file has the same path in the image as here, except for the environment, which moves to
``VENV``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.metadata import Distribution, EntryPoints, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import debian
from images.oci import Entry

VENV: Final = "/opt/asyncflow"
_SITE: Final = Path(sysconfig.get_path("purelib"))
SITE: Final = f"{VENV}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
_BASE: Final = Path(sys.base_prefix)
_STDLIB: Final = Path(sysconfig.get_path("stdlib"))
_INTERPRETER: Final = Path(sys.executable).resolve()
_NOT_RUN: Final = ("site-packages", "test", "idlelib", "ensurepip", "tkinter", "turtledemo", "lib2to3")
_DYNAMIC: Final = ("libgcc_s.so.1",)
"""Libraries that glibc loads by name; no binary links them."""
_ELF: Final = b"\x7fELF"
_LINKS: Final = re.compile(r"(?:=> )?(/\S+) \(0x")
_DEADLINE_S: Final = 120.0


class ImageError(RuntimeError):
    """An image could not be built."""


def interpreter() -> list[Entry]:
    """Return the interpreter, its standard library, and an otherwise empty environment around it."""
    stdlib = (
        Entry(path=str(file), source=file)
        for file in _STDLIB.rglob("*")
        if file.is_file() and not _unwanted(file.relative_to(_STDLIB).parts)
    )
    shared = (Entry(path=str(file), source=file) for file in (_BASE / "lib").glob("libpython3*.so*") if file.is_file())
    home = f"home = {_INTERPRETER.parent}\ninclude-system-site-packages = false\n"
    names = ("python", "python3", f"python3.{sys.version_info.minor}")
    return [
        *stdlib,
        *shared,
        Entry(path=str(_INTERPRETER), source=_INTERPRETER),
        Entry(path=f"{VENV}/pyvenv.cfg", content=home.encode(), mode=0o644),
        *(Entry(path=f"{VENV}/bin/{name}", link=str(_INTERPRETER)) for name in names),
    ]


def distributions(requires: Sequence[str], extras: Iterable[str], *, without: Sequence[str]) -> list[Distribution]:
    """Return the dependencies of a distribution with these ``requires`` and ``extras``, sorted by name.

    without: prefixes of the names to leave out. Raises ImageError if a dependency is not installed.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    wanted = [need for extra in ("", *extras) for need in _needs(requires, extra)]
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name.startswith(tuple(without)):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError as error:
            raise ImageError(f"{requirement} is not installed in {sys.prefix}") from error
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                wanted += _needs(found[name].requires or (), extra)
    return [found[name] for name in sorted(found)]


def installed(needed: Iterable[Distribution]) -> list[Entry]:
    """Return the files and command-line programs of distributions."""
    return [entry for each in needed for entry in (*_files(each), *command_lines(each.entry_points))]


def command_lines(points: EntryPoints) -> list[Entry]:
    """Return the programs that pip generates for entry points."""
    text = "#!{python}\nimport sys\nfrom {module} import {first}\nsys.exit({called}())\n"
    python = f"{VENV}/bin/python"
    return [
        Entry(
            path=f"{VENV}/bin/{point.name}",
            content=text.format(
                python=python, module=point.module, first=point.attr.partition(".")[0], called=point.attr
            ).encode(),
        )
        for point in points.select(group="console_scripts")
    ]


def programs(packages: Collection[str]) -> list[Entry]:
    """Return the programs of Debian packages; after this call, ``linked`` finds the libraries of these packages.

    Raises ImageError for a package that ``debian`` does not list.
    """
    if unknown := set(packages) - {*debian.LIBRARIES.values(), *debian.PROGRAMS.values()}:
        raise ImageError(f"hack/debian.py does not know {', '.join(sorted(unknown))}")
    if packages:
        debian.prepare()
    found = {name: shutil.which(name) for name, package in debian.PROGRAMS.items() if package in packages}
    return [Entry(path=f"/usr/bin/{name}", source=Path(path).resolve()) for name, path in found.items() if path]


def linked(entries: Collection[Entry]) -> list[Entry]:
    """Return the shared libraries that the binaries among ``entries`` link and ``entries`` does not contain."""
    have = {entry.path for entry in entries}
    binaries = [str(entry.source) for entry in entries if entry.source is not None and _is_binary(entry.source)]
    named = (Path(sysconfig.get_config_var("LIBDIR")), *(Path("/lib").glob("*-linux-gnu")))
    extra = (folder / name for name in _DYNAMIC for folder in named if (folder / name).exists())
    found = {*_ldd(binaries), *extra}
    return [Entry(path=_place(library), source=library) for library in sorted(found) if _place(library) not in have]


def _needs(requires: Iterable[str], extra: str) -> Iterator[Requirement]:
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is None:
            if not extra:
                yield requirement
        elif requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _files(each: Distribution) -> Iterator[Entry]:
    if each.files is None:
        raise ImageError(f"{each.name} does not say which files it has: no RECORD")
    for file in each.files:
        source = Path(str(file.locate()))
        if ".." not in file.parts and source.is_file():
            yield Entry(path=f"{SITE}/{file}", source=source)


def _ldd(binaries: Sequence[str]) -> set[Path]:
    """Return the libraries that binaries link, directly or indirectly, without those that ldd does not find."""
    text = subprocess.run(["ldd", *binaries], capture_output=True, text=True, timeout=_DEADLINE_S, check=False).stdout
    return {Path(path) for path in _LINKS.findall(text)}


def _place(library: Path) -> str:
    """Return the path of a library in the image. A library of the environment moves with the environment."""
    whole = library.parent.resolve() / library.name
    return f"{SITE}/{whole.relative_to(_SITE)}" if whole.is_relative_to(_SITE) else str(debian.place(library))


def _is_binary(file: Path) -> bool:
    if file.suffix and ".so" not in file.suffixes:
        return False
    with file.open("rb") as binary:
        return binary.read(len(_ELF)) == _ELF


def _unwanted(parts: tuple[str, ...]) -> bool:
    return parts[0] in _NOT_RUN or parts[0].startswith("config-") or parts[-1].endswith(".a")
