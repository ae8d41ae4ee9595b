"""Render the Helm chart into plain manifests under ``deploy/``, for users without Helm, and copy the CRDs into it.

    python hack/chart.py [--check]

Invariant: the generated files depend only on ``crds/``, ``charts/asyncflow`` and the pinned Helm. ``--check`` names
each file that differs from the generated text, and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from kube.build import binary

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "charts" / "asyncflow"
NAMESPACE: Final = "asyncflow-system"
KUBERNETES: Final = "1.34.0"
"""The version that charts are rendered for when no cluster is queried."""

_PLAIN: Final = {"crds": {"install": False}, "masterKey": {"existingSecret": "asyncflow-operator-master"}}
_VARIANTS: Final[Mapping[str, dict[str, Any]]] = {
    "cluster.yaml": _PLAIN,
    "namespaced.yaml": {**_PLAIN, "namespaces": ["asyncflow-jobs"]},
}
_HEADER: Final = f"""\
# Made by `python hack/chart.py` from charts/asyncflow: change that, not this file.
#   kubectl apply -f crds/ -f deploy/{{name}}
#   kubectl -n {NAMESPACE} create secret generic asyncflow-operator-master \\
#     --from-literal=master.key="$(openssl rand -hex 32)"
"""
_DEADLINE_S: Final = 60.0


class ChartError(RuntimeError):
    """Helm ended with an error."""


def helm(*arguments: str, values: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run Helm and return its output; ``values`` are passed as a file. Raises ChartError with Helm's error text."""
    options = [] if values is None else ["--values", "-"]
    result = subprocess.run(
        [binary("helm"), *arguments, *options],
        input=json.dumps(values or {}),
        env=env,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if result.returncode != 0:
        raise ChartError(f"helm {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def template(values: Mapping[str, Any] | None = None) -> str:
    """Return the chart rendered as text, with ``values`` on top of its defaults."""
    return helm(
        *("template", "asyncflow", str(CHART), "--namespace", NAMESPACE, "--kube-version", KUBERNETES),
        values=values or {},
    )


def objects(values: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the objects of the rendered chart, with ``values`` on top of its defaults."""
    return [document for document in yaml.load_all(template(values), Loader=yaml.CSafeLoader) if document]


def made() -> dict[Path, str]:
    """Return the text of every generated file, by path."""
    files = {CHART / "files" / "crds" / file.name: file.read_text() for file in (ROOT / "crds").glob("*.yaml")}
    for name, values in _VARIANTS.items():
        namespaces = "".join(_namespace(each) for each in (NAMESPACE, *values.get("namespaces", ())))
        files[ROOT / "deploy" / name] = _HEADER.format(name=name) + namespaces + template(values)
    return files


def out_of_date() -> list[str]:
    """Return each file that differs from its generated text, and each that is no longer generated."""
    files = made()
    found = {path for folder in {path.parent for path in files} for path in folder.glob("*.yaml")}
    wrong = [path for path, text in files.items() if path not in found or path.read_text() != text]
    return sorted(str(path.relative_to(ROOT)) for path in (*wrong, *(found - files.keys())))


def _namespace(name: str) -> str:
    metadata: dict[str, Any] = {"name": name}
    if name == NAMESPACE:
        metadata["labels"] = {"pod-security.kubernetes.io/enforce": "restricted"}
    return "---\n" + yaml.safe_dump({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}, sort_keys=False)


def main() -> None:
    """Write the files, or with ``--check`` print which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a file is out of date")
    if parser.parse_args().check:
        wrong = out_of_date()
        print(*(f"{path} is out of date: python hack/chart.py" for path in wrong), sep="\n", end="\n" if wrong else "")
        sys.exit(1 if wrong else 0)
    for path, text in made().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
