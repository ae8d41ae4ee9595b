"""Loader of plug-ins (engines, backends, transports), found by entry point, both built-in and third-party ones.

Invariants: no module of a plug-in is imported before the plug-in is loaded by name. An option in the manifest that its
plug-in does not define is refused with an error message.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from asyncflow.errors import ManifestError, in_one_line

Options = TypeVar("Options", bound=msgspec.Struct)


class NoOptions(msgspec.Struct, frozen=True):
    """Options of a plug-in that has none."""


@contextmanager
def importing() -> Iterator[None]:
    """Exclude the objects made by imports in this context from garbage collection, now and in future.

    Imported modules stay until the process ends. For torch and transformers, scanning them takes a third of the time of
    their import and of the exit of the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def installed(group: str) -> list[str]:
    """Return the names of the plug-ins that installed packages offer in ``group``, sorted."""
    return sorted(_offered(group))


def load_plugin(group: str, name: str, *, kind: type[Any], where: str, built_in: Iterable[str] = ()) -> type[Any]:
    """Return the plug-in class ``name``, a subclass of ``kind``.

    where: the field of the manifest that names it; built_in: further names that the field may have, for the error.
    Raises ManifestError if no package offers it, it cannot be imported, it is no complete subclass of ``kind``, or an
    attribute seems to be misspelt.
    """
    found = _offered(group)
    if name not in found:
        what = f"no installed package offers {name!r} in {group}"
        known = ", ".join(sorted({*found, *built_in}))
        raise ManifestError(what, where=where, hint=f"Install its package, or use one of: {known}")
    try:
        with importing():
            loaded = found[name].load()
    except Exception as error:  # the module of a user may raise anything
        why = in_one_line(error, folder=_folder_of(found[name].module))
        hint = "Install what it needs, e.g. pip install 'asyncflow[torch]', or correct it or its entry point"
        raise ManifestError(f"{name!r} cannot be imported: {why}", where=where, hint=hint) from error
    if not (isinstance(loaded, type) and issubclass(loaded, kind)):
        raise ManifestError(f"{name!r} is no {kind.__name__}", where=where, hint=f"Correct its entry point in {group}")
    if absent := ", ".join(sorted(getattr(loaded, "__abstractmethods__", ()))):
        hint = f"Define what the base class {kind.__name__} requires"
        raise ManifestError(f"{name!r}: the class {loaded.__name__} lacks {absent}", where=where, hint=hint)
    for attribute, meant in _misspelt(loaded, kind):
        what = f"{name!r}: nothing uses {attribute} of the class {loaded.__name__}"
        hint = f"If it replaces {meant} of {kind.__name__}, correct its name; otherwise begin its name with _"
        raise ManifestError(what, where=where, hint=hint)
    return loaded


def _misspelt(loaded: type[Any], kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield each public attribute of a plug-in that nearly has the name of one of ``kind`` that it does not replace.

    It would be ignored without a word, and the default be used.
    """
    own = {name for each in loaded.__mro__ if not issubclass(kind, each) for name in vars(each)}
    replaceable = [name for name in dir(kind) if not name.startswith("_") and name not in own]
    for name in sorted(own):
        if not (name.startswith("_") or hasattr(kind, name)):
            yield from ((name, meant) for meant in get_close_matches(name, replaceable, n=1, cutoff=0.8))


def find_installed() -> None:
    """Cache the entry points of the installed packages, for this process and the processes forked from it."""
    _select(tuple(sys.path))


def _folder_of(module: str) -> Path:
    """Return the folder of the top-level package or module to which ``module`` belongs."""
    spec = find_spec(module.partition(".")[0])
    return Path(spec.origin if spec is not None and spec.origin is not None else module).parent


def _offered(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in _select(tuple(sys.path))(group=group)}


@lru_cache(maxsize=1)
def _select(_path: tuple[str, ...]) -> Callable[..., Iterable[EntryPoint]]:
    """Return the function that selects entry points of the packages on sys.path.

    The entry points are read once, since they are in hundreds of files. A package that is installed afterwards is seen
    only by processes that start after that.
    """
    return entry_points().select


def read_options(options: Mapping[str, Any], shape: type[Options], *, where: str) -> Options:
    """Return a plug-in's options as an instance of ``shape``, whose fields all have defaults.

    Raises ManifestError for an option that ``shape`` does not define, or whose value has another type.
    """
    known = shape.__struct_fields__
    if unknown := sorted(options.keys() - set(known)):
        hint = f"Known: {', '.join(known) or 'none'}"
        raise ManifestError(f"unknown option {', '.join(unknown)}", where=where, hint=hint)
    try:
        return msgspec.convert(dict(options), shape)
    except msgspec.ValidationError as wrong:
        choices = {name: get_args(kind) for name, kind in get_type_hints(shape).items() if get_origin(kind) is Literal}
        refused = [name for name, known in choices.items() if options.get(name, known[0]) not in known]
        hints = [f"Set {name} to one of {', '.join(map(str, choices[name]))}" for name in refused]
        raise ManifestError(str(wrong), where=where, hint=". ".join(hints)) from wrong
