"""Access of the end-to-end test to its cluster: read objects, change them, and kill processes.

Invariant: objects are read through the API server, as a user does; processes are killed through the node, as the
kernel does. Every wait has a deadline and names its condition.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from e2e.transcript import Transcript
from images.recipes import ROOT
from kube.build import binary
from kube.process import PlaneError
from kube.rest import Refused
from node.node import Node
from node.servers import NAME as NODE_NAME

NAMESPACE: Final = "default"
SYSTEM: Final = "asyncflow-system"
RELEASE: Final = "asyncflow"
_JOBS: Final = f"/apis/asyncflow.dev/v1alpha1/namespaces/{NAMESPACE}/rljobs"
_PODS: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
_HELM_DEADLINE_S: Final = 180.0
_SOON_S: Final = 300.0
_FORWARDS: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")
_EVALUATED: Final = re.compile(r"evaluated θ_(\d+): (\d+) prompts, accuracy ([\d.]+), greedy ([\d.]+)")

Json = dict[str, Any]


class Scene:
    """A node, and the transcript of the test on it."""

    def __init__(self, node: Node, transcript: Transcript) -> None:
        self.node = node
        self.transcript = transcript
        self._shown = ""

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl, and record the command and its output."""
        printed = self.node.plane.kubectl(*arguments)
        self.transcript.command(f"kubectl {' '.join(arguments)}", printed)
        return printed

    def helm(self, *arguments: str) -> None:
        """Run Helm, and record the command and its output. Raises PlaneError if it ends with an error."""
        result = subprocess.run(
            [binary("helm"), *arguments],
            env=os.environ
            | {"KUBECONFIG": str(self.node.plane.admin), "HELM_CACHE_HOME": str(self.node.folder / "helm")},
            capture_output=True,
            text=True,
            timeout=_HELM_DEADLINE_S,
            check=False,
        )
        words, printed = f"helm {' '.join(arguments)}", result.stdout + result.stderr
        self.transcript.command(words.replace(f"{ROOT}/", ""), printed.replace(f"{ROOT}/", ""))
        if result.returncode != 0:
            raise PlaneError(f"helm {arguments[0]} ended with {result.returncode}")

    def make_volume(self, claim: str) -> Path:
        """Create the PersistentVolume for a claim of this name; the cluster has no provisioner."""
        place = self.node.folder / "volumes" / claim
        place.mkdir(parents=True)
        here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}
        spec = {
            "storageClassName": "e2e",
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "claimRef": {"namespace": NAMESPACE, "name": claim},
            "local": {"path": str(place)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        }
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim}, "spec": spec}
        self.node.plane.api.create("/api/v1/persistentvolumes", volume)
        self.transcript.say(f"PersistentVolume {claim}, which nobody provisions here: {place}")
        return place

    def apply(self, overlay: Path) -> None:
        """Apply a kustomize folder, which may refer to files outside of it."""
        options = ("--load-restrictor", "LoadRestrictionsNone")
        manifest = self.node.plane.kubectl("kustomize", *options, str(overlay))
        words = f"kubectl kustomize {' '.join(options)} {overlay.relative_to(ROOT)} | kubectl apply -f -"
        self.transcript.command(words, self.node.plane.kubectl("apply", "-f", "-", manifest=manifest))

    def status(self, job: str) -> Json:
        """Return the status of a job."""
        return dict(self.node.plane.api.get(f"{_JOBS}/{job}").get("status", {}))

    def pod(self, name: str) -> Json | None:
        """Return a pod; None if it does not exist or is being deleted."""
        try:
            pod = self.node.plane.api.get(f"{_PODS}/{name}")
        except Refused as refused:
            if refused.status != HTTPStatus.NOT_FOUND:
                raise
            return None
        return None if pod["metadata"].get("deletionTimestamp") else pod

    def uid(self, name: str) -> str:
        """Return the UID of a pod; "" if it does not exist or is being deleted."""
        pod = self.pod(name)
        return str(pod["metadata"]["uid"]) if pod else ""

    def secret(self, name: str, key: str) -> bytes:
        """Return an entry of a Secret in the namespace of the jobs."""
        data = self.node.plane.api.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}")["data"]
        return base64.b64decode(data[key])

    @contextlib.contextmanager
    def forwarded(self, pod: str, port: int) -> Iterator[int]:
        """Run ``kubectl port-forward`` during the body, and yield the local port that leads to the pod's port."""
        options = ("--kubeconfig", str(self.node.plane.admin), "--pod-running-timeout", "30s")
        command = [str(binary("kubectl")), "port-forward", *options, f"pod/{pod}", f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
            try:
                line = running.stdout.readline() if running.stdout is not None else ""
                if (found := _FORWARDS.match(line)) is None:
                    raise PlaneError(f"kubectl port-forward of {pod} printed: {line}")
                yield int(found[1])
            finally:
                running.terminate()

    def kill(self, name: str) -> None:
        """Kill the process of a pod, as the kernel does when memory runs out."""
        pod = self.pod(name)
        if pod is None:
            raise PlaneError(f"cannot kill {name}: the pod does not exist")
        container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        self.node.kill(container)
        self.transcript.say(f"SIGKILL to the process of {name}")

    def show(self, job: str) -> None:
        """Record the state of a job if it has changed since the last call."""
        table = self.node.plane.kubectl("get", "rlj", job)
        row = table.rpartition(" ")[0]
        if row != self._shown:
            self._shown = row
            self.transcript.command(f"kubectl get rlj {job}", table)

    def wait(self, condition: Callable[[], object], what: str, *, timeout_s: float = _SOON_S) -> None:
        """Wait until ``condition`` holds, and record how long it took."""
        with self.transcript.timed(f"waited for {what}"):
            self.node.wait_until(condition, what, timeout_s=timeout_s)

    def evaluation(self, job: str) -> tuple[int, float, float]:
        """Return step, accuracy and greedy accuracy of the last evaluation that the driver reported."""
        found = _EVALUATED.findall(self.node.plane.kubectl("logs", f"{job}-driver-0"))
        step, _, accuracy, greedy = found[-1] if found else ("0", "", "nan", "nan")
        return int(step), float(accuracy), float(greedy)

    def left(self, *kinds: str, namespace: str, selector: str = "") -> list[str]:
        """Return the existing objects of some kinds, as ``kind/name``."""
        options = ("--selector", selector) if selector else ()
        printed = self.node.plane.kubectl(
            *("get", ",".join(kinds), "--namespace", namespace, "--output", "json", *options)
        )
        items = json.loads(printed)["items"]
        return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in items)

    def kinds(self) -> list[str]:
        """Return every kind of namespaced object, except events, which only describe the past."""
        listed = self.node.plane.kubectl("api-resources", "--namespaced", "--verbs", "list", "--output", "name").split()
        return [kind for kind in listed if not kind.startswith("events")]
