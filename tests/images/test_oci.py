"""Layers and images as files."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from images.oci import Entry, Image, make_layer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ASYNCFLOW_IMAGE_CACHE", str(folder))
    return folder


def test_a_layer_holds_copies_contents_links_and_the_folders_above(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!")
    tool.chmod(0o700)
    entries = [
        Entry(path="/usr/bin/tool", source=tool),
        Entry(path="/etc/name", content=b"me", mode=0o644),
        Entry(path="/bin", link="usr/bin"),
        Entry(path="/tmp", mode=0o1777),
    ]
    with tarfile.open(make_layer("base", entries).path) as layer:
        found = {member.name: (member.type, oct(member.mode)) for member in layer}
        assert layer.extractfile("etc/name").read() == b"me"
        assert layer.getmember("bin").linkname == "usr/bin"
        assert layer.getmember("usr/bin/tool").mtime == int(tool.stat().st_mtime)
    assert found["usr/bin/tool"] == (tarfile.REGTYPE, "0o755")
    assert found["etc/name"] == (tarfile.REGTYPE, "0o644")
    assert found["usr"] == found["usr/bin"] == found["etc"] == (tarfile.DIRTYPE, "0o755")
    assert found["tmp"] == (tarfile.DIRTYPE, "0o1777")


def test_a_layer_is_made_once_and_again_when_what_it_is_made_of_changes(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    first = make_layer("base", [Entry(path="/file", source=file)])
    made = first.path.stat().st_ino
    assert make_layer("base", [Entry(path="/file", source=file)]).path.stat().st_ino == made
    file.write_text("newer")
    second = make_layer("base", [Entry(path="/file", source=file)])
    assert second.digest != first.digest
    assert list(cache.iterdir()) == [second.path]


def test_a_layer_that_could_not_be_made_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError):
        make_layer("base", [Entry(path="/file", source=folder)])
    assert list(cache.iterdir()) == []


def test_an_image_is_a_layout_in_which_every_digest_holds() -> None:
    layers = [make_layer(name, [Entry(path=f"/{name}", content=name.encode())]) for name in ("one", "two")]
    out = io.BytesIO()
    Image(name="registry/name:1", layers=layers, config={"User": "1:1"}).write(out)
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        content = {member.name: archive.extractfile(member).read() for member in archive}
    blobs = {name: text for name, text in content.items() if name.startswith("blobs/")}
    assert all(name == f"blobs/sha256/{hashlib.sha256(text).hexdigest()}" for name, text in blobs.items())
    (manifest,) = json.loads(content["index.json"])["manifests"]
    assert manifest["annotations"] == {"io.containerd.image.name": "registry/name:1"}
    described = json.loads(blobs[f"blobs/{manifest['digest'].replace(':', '/')}"])
    config = json.loads(blobs[f"blobs/{described['config']['digest'].replace(':', '/')}"])
    assert config["config"] == {"User": "1:1"}
    assert config["rootfs"]["diff_ids"] == [layer.digest for layer in layers]
    assert [layer["digest"] for layer in described["layers"]] == [layer.digest for layer in layers]
