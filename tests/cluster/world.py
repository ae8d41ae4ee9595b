"""A namespace as its user sees it, with an RLJob in it: what the tests of the operator change, wait for and compare."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from asyncflow.api.document import parse
from asyncflow_operator.cluster.kinds import BY_NAME
from kube.plane import ControlPlane, PlaneError
from kube.rest import Refused

ROOT = Path(__file__).parents[2]
OURS = "/apis/asyncflow.dev/v1alpha1"
WHOLE = {"driver": 1, "controller": 1, "storage": 2, "trainer": 1, "rollout": 2}
"""Pods of the quickstart."""
DECISIONS = "decisions"
"""Folder of the shared operator's decision log, in that of the control plane."""
ACTIVE = ("Pending", "Starting", "Running")
Change = Callable[[dict[str, Any]], object]


def quickstart(namespace: str, name: str = "quickstart") -> dict[str, Any]:
    """Return the manifest of the quickstart."""
    manifest: dict[str, Any] = parse((ROOT / "examples/quickstart.yaml").read_text(), source="quickstart").data
    manifest["metadata"] = {"name": name, "namespace": namespace}
    return manifest


class World:
    """One namespace of a plane."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace

    @classmethod
    def new(cls, plane: ControlPlane, namespace: str) -> Self:
        """Make the namespace first."""
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        return cls(plane, namespace)

    def apply(self, change: Change = lambda _: None) -> None:
        """Apply the quickstart after ``change``, as kubectl does."""
        manifest = quickstart(self.namespace)
        change(manifest["spec"])
        self.kubectl("apply", "-f", "-", manifest=manifest)

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.plane.kubectl("-n", self.namespace, *arguments, **options)

    def job(self, name: str = "quickstart") -> dict[str, Any]:
        return self.plane.api.get(f"{OURS}/namespaces/{self.namespace}/rljobs/{name}")

    def exists(self, name: str = "quickstart") -> bool:
        return self.plane.api.exists(f"{OURS}/namespaces/{self.namespace}/rljobs/{name}")

    def edit(self, **spec: Any) -> None:
        """Change parts of the job's spec."""
        self.plane.api.patch(f"{OURS}/namespaces/{self.namespace}/rljobs/quickstart", {"spec": spec})

    def phase(self) -> str:
        return str(self.job().get("status", {}).get("phase", ""))

    def restarts(self) -> dict[str, int]:
        """Return what the job's status says of failures, by role."""
        return dict(self.job().get("status", {}).get("restarts", {}))

    def condition(self, kind: str) -> dict[str, str]:
        conditions = self.job().get("status", {}).get("conditions", ())
        return next((each for each in conditions if each["type"] == kind), {})

    def objects(self) -> set[tuple[str, str]]:
        """Everything that the operator made, events aside."""
        labels = {"labelSelector": "app.kubernetes.io/managed-by=asyncflow-operator"}
        return {
            (kind.plural, each["metadata"]["name"])
            for kind in BY_NAME.values()
            if not kind.optional
            for each in self.plane.api.get(kind.path(self.namespace), **labels)["items"]
        }

    def pods(self, role: str = "") -> dict[str, dict[str, Any]]:
        pods = self.plane.api.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return {
            pod["metadata"]["name"]: pod
            for pod in pods
            if role in ("", pod["metadata"]["labels"]["asyncflow.dev/role"])
        }

    def attempts(self, role: str = "") -> dict[str, str]:
        return {name: pod["metadata"]["labels"]["asyncflow.dev/attempt"] for name, pod in self.pods(role).items()}

    def running_by_role(self) -> Counter[str]:
        """The pods that run and are not on their way out, by role."""
        return Counter(
            pod["metadata"]["labels"]["asyncflow.dev/role"]
            for pod in self.pods().values()
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        )

    def is_whole(self, **others: int) -> bool:
        return self.running_by_role() == Counter(WHOLE | others) and len(self.pods()) == sum((WHOLE | others).values())

    def annotate(self, pod: str, **annotations: str) -> None:
        """Have something happen to a pod: see hack/kube/kwok/pod.yaml."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}"
        named = {f"kwok.test/{key.replace('_', '-')}": value for key, value in annotations.items()}
        self.plane.api.patch(path, {"metadata": {"annotations": named}})

    def until(self, condition: Callable[[], object], what: str, *, timeout_s: float = 120) -> None:
        def holds() -> object:
            try:
                return condition()
            except Refused as refused:
                if refused.status != 404:
                    raise
                return False

        try:
            self.plane.wait_until(holds, what, timeout_s=timeout_s)
        except PlaneError as late:
            pods = {name: pod["status"].get("phase") for name, pod in self.pods().items()}
            late.add_note(f"the pods are {pods}, and the job says {self.condition('WhyPending')}")
            raise

    def until_whole(self, **others: int) -> None:
        self.until(lambda: self.is_whole(**others), f"the pods {WHOLE | others}")
