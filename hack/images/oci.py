"""Layers and images as files: a layer is an uncompressed tar, an image is an OCI layout in one tar.

Invariant: a cached layer is complete, and its name contains a hash of its inputs, so it is never stale. The cache holds
one layer of each name.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

_BUFFER: Final = 1 << 20
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_INDEX: Final = "application/vnd.oci.image.index.v1+json"
_ARCHITECTURE: Final = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A path of a layer, below /: a copy of ``source``, the bytes ``content``, a link to ``link``, or a folder."""

    path: str
    source: Path | None = None
    content: bytes | None = None
    link: str | None = None
    mode: int = 0o755

    def made_from(self) -> str:
        """Return a description of the entry's inputs, without reading the source file."""
        if self.source is None:
            return repr((self.path, self.content, self.link, self.mode))
        stat = self.source.stat()
        return repr((self.path, str(self.source), stat.st_size, stat.st_mtime_ns, stat.st_mode))

    def put(self, archive: tarfile.TarFile) -> None:
        """Write the entry. A copy keeps its modification time, by which Python decides whether bytecode is fresh."""
        info = tarfile.TarInfo(self.path.lstrip("/"))
        info.mode = self.mode
        if self.source is not None:
            stat = self.source.stat()
            info.size, info.mtime = stat.st_size, int(stat.st_mtime)
            info.mode = 0o755 if stat.st_mode & 0o100 else 0o644
            with self.source.open("rb") as file:
                archive.addfile(info, file)
        elif self.content is not None:
            info.size = len(self.content)
            archive.addfile(info, io.BytesIO(self.content))
        else:
            info.type = tarfile.DIRTYPE if self.link is None else tarfile.SYMTYPE
            info.linkname = self.link or ""
            archive.addfile(info)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer in the cache."""

    path: Path
    digest: str

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.path.stat().st_size


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image: its full name with a tag, its layers, and the configuration of its containers."""

    name: str
    layers: Sequence[Layer]
    config: Mapping[str, Any] = field(default_factory=dict)

    def write(self, out: IO[bytes]) -> None:
        """Write the image as an OCI layout; ``out`` may be a pipe."""
        config = _json(
            {
                "architecture": _ARCHITECTURE[os.uname().machine],
                "os": "linux",
                "config": dict(self.config),
                "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in self.layers]},
            }
        )
        layers = [{"mediaType": _LAYER, "digest": layer.digest, "size": layer.size} for layer in self.layers]
        manifest = _json(
            {"schemaVersion": 2, "mediaType": _MANIFEST, "config": _described(_CONFIG, config), "layers": layers}
        )
        named = _described(_MANIFEST, manifest) | {"annotations": {"io.containerd.image.name": self.name}}
        with tarfile.open(fileobj=out, mode="w|", bufsize=_BUFFER, format=tarfile.PAX_FORMAT) as archive:
            _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
            _add(archive, "index.json", _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [named]}))
            for blob in (manifest, config):
                _add(archive, _blob(_digest(blob)), blob)
            for layer in {layer.digest: layer for layer in self.layers}.values():
                info = tarfile.TarInfo(_blob(layer.digest))
                info.size = layer.size
                with layer.path.open("rb") as file:
                    archive.addfile(info, file)


def cache() -> Path:
    """Return the folder of the layers; ``ASYNCFLOW_IMAGE_CACHE`` overrides it."""
    chosen = os.environ.get("ASYNCFLOW_IMAGE_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "asyncflow" / "images"


def make_layer(name: str, entries: Iterable[Entry]) -> Layer:
    """Return the layer of these entries and their parent folders, from the cache if it is there."""
    listed = _with_folders(entries)
    key = hashlib.sha256("\n".join(entry.made_from() for entry in listed).encode()).hexdigest()[:16]
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{name}.{key}.*.tar"):
        return Layer(path=path, digest=f"sha256:{path.name.split('.')[-2]}")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{name}.") as file:
        hashing = _Hashing(file)
        with tarfile.open(fileobj=hashing, mode="w|", bufsize=_BUFFER, format=tarfile.PAX_FORMAT) as archive:
            for entry in listed:
                entry.put(archive)
        file.flush()
        for old in folder.glob(f"{name}.*.tar"):
            old.unlink()
        path = folder / f"{name}.{key}.{hashing.sha256.hexdigest()}.tar"
        os.link(file.name, path)
    return Layer(path=path, digest=f"sha256:{hashing.sha256.hexdigest()}")


class _Hashing(io.RawIOBase):
    """A file that hashes the bytes written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return self._file.write(data)


def _with_folders(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in the order of paths, the last entry of each path, with their missing parent folders."""
    by_path = {entry.path: entry for entry in entries}
    for path in list(by_path):
        for parent in Path(path).parents:
            if str(parent) not in by_path and str(parent) != "/":
                by_path[str(parent)] = Entry(path=str(parent))
    return [by_path[path] for path in sorted(by_path)]


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _described(kind: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(content), "size": len(content)}


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
