"""Engines, back ends and transports come from entry points, AsyncFlow's own as those of third parties.

Invariant: nothing of a plug-in is imported before it is loaded by name, and what a manifest says to one either has a
meaning or is refused in words.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import msgspec

from asyncflow.errors import ManifestError

Own = TypeVar("Own", bound=msgspec.Struct)


class NoOptions(msgspec.Struct, frozen=True):
    """Options of a plug-in that has none."""


@contextmanager
def importing() -> Iterator[None]:
    """Keep the garbage collector off what is imported, then and later: it stays, and torch and transformers are so much
    that looking through them takes a third of the time of their import and of the end of the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def installed(group: str) -> list[str]:
    """Return the names that the installed packages offer in ``group``."""
    return sorted(_offered(group))


def load_plugin(group: str, name: str, *, kind: type[Any], where: str) -> type[Any]:
    """Return the class, a ``kind``, that is offered as ``name``.

    where: the place in the manifest that names it. Raises ManifestError where there is none, where it cannot be
    imported, or where it is something else.
    """
    found = _offered(group)
    if name not in found:
        what = f"no installed package offers {name!r} in {group}"
        raise ManifestError(what, where=where, hint=f"Install its package, or give one of: {', '.join(sorted(found))}")
    try:
        with importing():
            loaded = found[name].load()
    except (ImportError, AttributeError) as error:
        hint = "Install what it needs, e.g. pip install 'asyncflow[torch]', or correct its entry point"
        raise ManifestError(f"{name!r} cannot be imported: {error}", where=where, hint=hint) from error
    if not (isinstance(loaded, type) and issubclass(loaded, kind)):
        raise ManifestError(f"{name!r} is no {kind.__name__}", where=where, hint=f"It is found in {group}")
    return loaded


def find_installed() -> None:
    """Find what the installed packages offer, for this process and those that are forked from it."""
    _select(tuple(sys.path))


def _offered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in _select(tuple(sys.path))(group=group)}


@lru_cache(maxsize=1)
def _select(_path: tuple[str, ...]) -> Callable[..., Iterable[EntryPoint]]:
    """Return the choice among what the packages on sys.path offer: read once, as they are hundreds of files.

    What is installed later there is seen by the next process that is started.
    """
    return entry_points().select


def read_options(options: Mapping[str, Any], shape: type[Own], *, where: str) -> Own:
    """Return a plug-in's own options as its ``shape``, whose fields all have defaults.

    Raises ManifestError for an option that ``shape`` does not know, or whose value is not of its type.
    """
    known = shape.__struct_fields__
    if unknown := sorted(options.keys() - set(known)):
        hint = f"Known: {', '.join(known) or 'none'}"
        raise ManifestError(f"unknown option {', '.join(unknown)}", where=where, hint=hint)
    try:
        return msgspec.convert(dict(options), shape)
    except msgspec.ValidationError as wrong:
        raise ManifestError(str(wrong), where=where) from wrong
