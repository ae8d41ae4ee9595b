"""Build the Kubernetes binaries that the tests need from the Go modules pinned under ``gomod/``.

    python hack/kube/build.py kube kwok helm

Binaries in the folder ``KUBEBUILDER_ASSETS`` are used instead of built ones. Invariant: a folder
``<cache>/<target>-<version>-<key>/bin`` is complete or absent, and its key is a hash of all inputs, so it is never
stale. Only the binaries are kept.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MODULES: Final = Path(__file__).parent / "gomod"
_BUILD_DEADLINE_S: Final = 3600.0
_LEAST_GO: Final = "1.26"
_ENVTEST: Final = frozenset(("etcd", "kube-apiserver", "kubectl"))
_NO_GO: Final = (
    f"Go {_LEAST_GO} or newer is needed to build Kubernetes for the tests, and there is no `go` on the PATH. Install "
    "Go, or set KUBEBUILDER_ASSETS to a folder with etcd, kube-apiserver and kubectl 1.34"
)


class BuildError(RuntimeError):
    """A binary could not be built or found."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A binary to build from a package of one module.

    module: its folder under ``gomod``; pin: the required module whose version names the build; sources: files of this
    repository that are compiled in; links: more names for the binary; tags: build tags; stamps: Go packages whose
    version variables the build sets, since otherwise Kubernetes reports v0.0.0-master.
    """

    module: str
    pin: str
    package: str
    sources: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    tags: tuple[str, ...] = field(default=(), repr=False)
    stamps: tuple[str, ...] = ()


_SERVERS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl")
TARGETS: Final = {
    "kube": Target(
        module="kube",
        pin="k8s.io/kubernetes",
        package="./cmd/kube",
        sources=("cmd/kube/main.go",),
        links=_SERVERS,
        stamps=("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"),
    ),
    "fake-device-plugin": Target(
        module="kube",
        pin="k8s.io/kubelet",
        package="./cmd/fake-device-plugin",
        sources=("cmd/fake-device-plugin/main.go",),
    ),
    "kwok": Target(module="kwok", pin="sigs.k8s.io/kwok", package="sigs.k8s.io/kwok/cmd/kwok"),
    "helm": Target(module="helm", pin="helm.sh/helm/v3", package="helm.sh/helm/v3/cmd/helm"),
    "promtool": Target(
        module="prometheus",
        pin="github.com/prometheus/prometheus",
        package="github.com/prometheus/prometheus/cmd/promtool",
        tags=("remove_all_sd",),
    ),
    "controller-gen": Target(
        module="definitions",
        pin="sigs.k8s.io/controller-tools",
        package="sigs.k8s.io/controller-tools/cmd/controller-gen",
    ),
    "coredns": Target(module="coredns", pin="github.com/coredns/coredns", package="github.com/coredns/coredns"),
}
_HOME_OF: Final = {name: target for target, what in TARGETS.items() for name in (target, *what.links)}

Say = Callable[[str], None]


def _silent(_: str) -> None:
    return


def cache() -> Path:
    """Return the folder of the builds; ``ASYNCFLOW_KUBE_CACHE`` overrides it."""
    chosen = os.environ.get("ASYNCFLOW_KUBE_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "asyncflow" / "kube"


def binary(name: str, *, say: Say = _silent) -> Path:
    """Return the path of a binary such as ``kube-apiserver``; build it if necessary."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        path = Path(assets) / name
        if path.exists():
            return path.absolute()
        if name in _ENVTEST:
            raise BuildError(
                f"KUBEBUILDER_ASSETS is {assets}, which has no {name}. Add it there, or unset the variable"
            )
    return build(_HOME_OF[name], say=say) / name


def build(name: str, *, say: Say = _silent) -> Path:
    """Return the folder with the binaries of a target; build them if necessary. Concurrent callers build them once."""
    location = _location(name)
    if not location.exists():
        location.parent.mkdir(parents=True, exist_ok=True)
        with _locked(location.with_name(f"{location.name}.lock"), what=name, say=say):
            if not location.exists():
                _make(name, location, say=say)
    return location / "bin"


def version(name: str) -> str:
    """Return the version that a target is pinned to, such as ``v1.34.4``."""
    target = TARGETS[name]
    text = (MODULES / target.module / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s+{re.escape(target.pin)} (v\S+)", text, flags=re.MULTILINE)
    if found is None:
        raise BuildError(f"{MODULES / target.module}/go.mod does not require {target.pin}")
    return found.group(1)


def _location(name: str) -> Path:
    target = TARGETS[name]
    made_from = hashlib.sha256(f"{target} {platform.system()} {platform.machine()}".encode())
    made_from.update(",".join(target.tags).encode())
    for source in ("go.mod", "go.sum", *target.sources):
        made_from.update((MODULES / target.module / source).read_bytes())
    return cache() / f"{name}-{version(name)}-{made_from.hexdigest()[:12]}"


def _make(name: str, location: Path, *, say: Say) -> None:
    target = TARGETS[name]
    if shutil.which("go") is None:
        raise BuildError(_NO_GO)
    log = location.with_name(f"{location.name}.log")
    say(f"building {name} {version(name)} from Go modules, which takes minutes without Go's cache; log: {log}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{location.name}.", dir=location.parent) as folder:
        made = Path(folder) / "home"
        (made / "bin").mkdir(parents=True)
        _compile(target, version(name), made / "bin" / name, log)
        for link in target.links:
            (made / "bin" / link).symlink_to(name)
        made.rename(location)
    log.unlink()
    say(f"built {name} {version(name)} in {time.monotonic() - began:.0f} s: {location / 'bin'}")


def _compile(target: Target, release: str, output: Path, log: Path) -> None:
    major, minor, _ = release.removeprefix("v").split(".", 2)
    values = {"gitVersion": release, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = (f"-X {package}.{key}={value}" for package in target.stamps for key, value in values.items())
    go = ["nice", "-n", "19", "go", "build", "-trimpath", "-buildvcs=false", "-tags", ",".join(target.tags)]
    go += ["-ldflags", " ".join(("-s -w", *stamps))]
    with log.open("wb") as out:
        result = subprocess.run(
            [*go, "-o", str(output), target.package],
            cwd=MODULES / target.module,
            env=os.environ | {"CGO_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=_BUILD_DEADLINE_S,
            check=False,
        )
    if result.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise BuildError(f"`go build {target.package}` ended with {result.returncode}; the end of {log}:\n{tail}")


@contextmanager
def _locked(path: Path, *, what: str, say: Say) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel releases when the process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is building {what}; waiting for it")
            _wait_for_lock(file.fileno(), what)
        yield


def _wait_for_lock(descriptor: int, what: str) -> None:
    deadline = time.monotonic() + _BUILD_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.2)
        else:
            return
    raise BuildError(f"waited {_BUILD_DEADLINE_S:.0f} s for another process that builds {what}")


def main() -> int:
    """Build the targets that the command line names, and print their folders."""
    parser = argparse.ArgumentParser(description="Build Kubernetes and its tools from pinned Go modules, once.")
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS), metavar="TARGET", help=", ".join(TARGETS))
    try:
        for name in parser.parse_args().targets:
            print(build(name, say=lambda line: print(line, file=sys.stderr, flush=True)))
    except (BuildError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
