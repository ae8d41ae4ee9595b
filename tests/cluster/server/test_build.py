"""Builds are whole or absent, made once, and explain themselves; ``go`` is a stand-in here."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kube import build
from kube.build import BuildError

GO = """#!/bin/bash
echo "$@" >> {calls}
sleep 0.3
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    calls = tmp_path / "calls"
    calls.touch()
    set_go(tmp_path, GO.format(calls=calls))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("ASYNCFLOW_KUBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    return calls


def set_go(tmp_path: Path, script: str) -> None:
    go = tmp_path / "path" / "go"
    go.parent.mkdir(exist_ok=True)
    go.write_text(script)
    go.chmod(go.stat().st_mode | stat.S_IXUSR)


def test_two_who_build_at_once_build_once(calls: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.binary("kube-apiserver", say=said.append), range(2))
    assert first == second
    assert first.read_text() == "made\n"
    assert len(calls.read_text().splitlines()) == 1
    assert [line.split()[0] for line in said].count("built") == 1
    assert any("another process is building kube" in line for line in said)


def test_the_binary_knows_its_version_and_its_names(calls: Path) -> None:
    folder = build.build("kube")
    assert "gitVersion=v1.34." in calls.read_text()
    assert {"etcd", "kube-apiserver", "kubelet", "kubectl"} <= {path.name for path in folder.iterdir()}
    assert folder.parent.name.startswith(f"kube-{build.version('kube')}-")


def test_prometheus_is_built_without_what_finds_targets_in_clouds(calls: Path) -> None:
    build.build("promtool")
    assert "-tags remove_all_sd" in calls.read_text()


def test_a_change_of_the_pins_is_another_build(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.build("kwok")
    pins = tmp_path / "gomod" / "kwok"
    pins.mkdir(parents=True)
    for name in ("go.mod", "go.sum"):
        (pins / name).write_bytes((build.MODULES / "kwok" / name).read_bytes() + b"\n")
    monkeypatch.setattr(build, "MODULES", pins.parent)
    assert build.build("kwok") != before
    assert len(calls.read_text().splitlines()) == 2


def test_a_build_that_fails_leaves_nothing_but_its_log(calls: Path, tmp_path: Path) -> None:
    set_go(tmp_path, "#!/bin/bash\necho no such module; exit 1\n")
    with pytest.raises(BuildError, match=r"(?s)ended with 1.*no such module"):
        build.build("kwok")
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".log", ".lock"}
    set_go(tmp_path, GO.format(calls=calls))
    assert build.binary("kwok").exists()


def test_without_go_it_says_what_to_install(calls: Path, tmp_path: Path) -> None:
    (tmp_path / "path" / "go").unlink()
    with pytest.raises(BuildError, match="Install Go, or set KUBEBUILDER_ASSETS"):
        build.binary("etcd")
    assert calls.read_text() == ""


def test_given_binaries_are_taken(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    (tmp_path / "etcd").touch()
    assert build.binary("etcd") == tmp_path / "etcd"
    with pytest.raises(BuildError, match="which has no kubectl"):
        build.binary("kubectl")
    assert calls.read_text() == ""
    assert build.binary("kube-scheduler").name == "kube-scheduler"
