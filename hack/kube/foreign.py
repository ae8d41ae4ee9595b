"""CustomResourceDefinitions of Kueue and Volcano, from their pinned Go modules.

Kueue's module contains its definitions. Volcano's module contains only Go types; ``controller-gen``, the tool that
Volcano uses, generates the definitions from them. Invariant: a folder of definitions is complete or absent, and its
name contains a hash of all inputs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from kube.build import MODULES, BuildError, Say, build, cache
from kube.plane import ControlPlane

NEWEST: Final = "definitions"
OLDER: Final = "definitions-older"
"""The definitions of a Kueue release without v1beta2."""
_WANTED: Final = ("workloads", "resourceflavors", "workloadpriorityclasses")
_VOLCANO: Final = "volcano.sh/apis/pkg/apis/scheduling/v1beta1"
_PATH: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_DEADLINE_S: Final = 600.0


def install(plane: ControlPlane, *, kueue: str = NEWEST) -> None:
    """Install the kinds of Volcano, and of the newest or an older Kueue, in ``plane``."""
    files = [*definitions(kueue).glob("kueue*.yaml"), *definitions(NEWEST).glob("scheduling*.yaml")]
    for file in sorted(files):
        definition: dict[str, Any] = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        path = f"{_PATH}/{definition['metadata']['name']}"
        if not plane.api.exists(path):
            plane.api.create(_PATH, _admissible(definition))
        plane.wait_until(partial(_established, plane, path), f"{path} to be established")


def definitions(module: str = NEWEST, *, say: Say = lambda _: None) -> Path:
    """Return the folder with the definitions; create it if necessary. Raises BuildError."""
    pins = hashlib.sha256(b"".join((MODULES / module / name).read_bytes() for name in ("go.mod", "go.sum")))
    home = cache() / f"{module}-{pins.hexdigest()[:12]}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{home.name}.", dir=home.parent) as folder:
            made = Path(folder) / "made"
            made.mkdir()
            bases = _source(module, "sigs.k8s.io/kueue") / "config" / "components" / "crd" / "bases"
            for plural in _WANTED:
                shutil.copy(bases / f"kueue.x-k8s.io_{plural}.yaml", made)
            if module == NEWEST:
                generator = build("controller-gen", say=say) / "controller-gen"
                _go(module, [generator, "crd", f"paths={_VOLCANO}", f"output:crd:dir={made}"])
            for file in made.iterdir():
                file.chmod(0o644)
            if not home.exists():
                made.rename(home)
    return home


def _source(module: str, name: str) -> Path:
    """Return the folder of a pinned module, whose checksum Go verifies."""
    return Path(json.loads(_go(module, ["go", "mod", "download", "-json", name]))["Dir"])


def _go(module: str, command: list[str | Path]) -> str:
    result = subprocess.run(
        command,
        cwd=MODULES / module,
        env=os.environ | {"CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if result.returncode != 0:
        raise BuildError(
            f"`{' '.join(map(str, command))}` ended with {result.returncode}: {result.stdout}{result.stderr}"
        )
    return result.stdout


def _admissible(definition: dict[str, Any]) -> dict[str, Any]:
    """Return a definition with the approval annotation that the API server requires for ``*.k8s.io`` groups."""
    metadata = definition["metadata"]
    approved = {"api-approved.kubernetes.io": "unapproved, a test's"} | metadata.get("annotations", {})
    return definition | {"metadata": metadata | {"annotations": approved}}


def _established(plane: ControlPlane, path: str) -> bool:
    conditions = plane.api.get(path).get("status", {}).get("conditions") or ()
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
