"""The chapters of the end-to-end test, each a function of the scene. They share state only through the cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

from asyncflow.api.names import CONTROL_PORT, HTTP_PORT
from e2e.scene import NAMESPACE, RELEASE, SYSTEM, Json, Scene
from images.recipes import PREFIX, ROOT, image
from kube.process import PlaneError

IMAGES: Final = ("operator", "runtime-cpu")
ACCURACY: Final = 0.85
_HERE: Final = Path(__file__).parent
_TRAINED_S: Final = 1200.0
_SHOWN: Final = 6
"""The number of times that the state of a job is recorded while it trains."""
_AUDIT_S: Final = 60.0
_RESTRICTED: Final = "pod-security.kubernetes.io/enforce=restricted"
_OPERATOR: Final = f"system:serviceaccount:{SYSTEM}:{RELEASE}-operator"
_STAYS: Final = {
    "Secret/asyncflow-operator-master": "jobs' certificates are derived from it: the chart keeps it on purpose",
    "Lease/asyncflow-operator": "says who led last",
    "ConfigMap/kube-root-ca.crt": "Kubernetes' own",
    "ServiceAccount/default": "Kubernetes' own",
}
"""Objects that may remain in the operator's namespace after its removal, with the reason."""


def load_images(scene: Scene) -> None:
    """Build the project's images, and load them into the node."""
    scene.transcript.chapter("Our images, made offline")
    for name in IMAGES:
        with scene.transcript.timed(f"make {name}"):
            made = image(name)
        with scene.transcript.timed(f"load {made.name}"):
            scene.node.load(made)


def install(scene: Scene) -> None:
    """Install the chart, in namespaces that enforce the restricted Pod Security Standard."""
    scene.transcript.chapter("The chart")
    scene.kubectl("create", "namespace", SYSTEM)
    scene.kubectl("label", "namespace", SYSTEM, NAMESPACE, _RESTRICTED)
    chart = str(ROOT / "charts" / "asyncflow")
    images = ("--set", f"image.repository={PREFIX}/operator", "--set", f"runtime.prefix={PREFIX}")
    scene.helm("install", RELEASE, chart, "--namespace", SYSTEM, *images, "--wait", "--timeout", "120s")
    scene.kubectl("--namespace", SYSTEM, "get", "pods")


def train(scene: Scene) -> None:
    """Train the unchanged quickstart."""
    scene.transcript.chapter("examples/quickstart.yaml trains")
    ledger = _begin(scene, "quickstart", _HERE / "quickstart")
    scene.kubectl("get", "rljobs,transferqueues,weightsyncs,pods,services,persistentvolumeclaims")
    _ask_driver(scene, "quickstart")
    _finish(scene, "quickstart", ledger)


def disturb(scene: Scene) -> None:
    """Train it again, while rollouts are added and removed and processes are killed."""
    job = "quickstart-disturbed"
    scene.transcript.chapter("The same with more steps, disturbed")
    ledger = _begin(scene, job, _HERE / "disturbed")
    _reach(scene, job, 5)
    trainer = scene.uid(f"{job}-trainer-0")

    scene.kubectl("scale", f"rlj/{job}", "--replicas", "4")
    scene.wait(lambda: scene.status(job).get("readyRollouts") == 4, "4 rollouts that have caught up")
    scene.show(job)
    _lose(scene, job, "rollout-1", lambda: scene.kubectl(*_forced(f"{job}-rollout-1")))
    _same_trainer(scene, job, trainer)

    _lose(scene, job, "storage-0", lambda: scene.kill(f"{job}-storage-0"))
    _lose(scene, job, "driver-0", lambda: scene.kill(f"{job}-driver-0"))
    _lose(scene, job, "trainer-0", lambda: scene.kill(f"{job}-trainer-0"))
    trainer = scene.uid(f"{job}-trainer-0")

    scene.kubectl("scale", f"rlj/{job}", "--replicas", "1")
    rollouts = f"asyncflow.dev/job={job},asyncflow.dev/role=rollout"
    scene.wait(lambda: len(scene.left("pods", namespace=NAMESPACE, selector=rollouts)) == 1, "the others to be drained")
    scene.show(job)
    _same_trainer(scene, job, trainer)
    _finish(scene, job, ledger)
    scene.kubectl("get", "events", "--field-selector", f"involvedObject.name={job}", "--sort-by", ".lastTimestamp")


def clean(scene: Scene) -> None:
    """Delete the jobs, then the chart, and check the remaining objects."""
    scene.transcript.chapter("What is left")
    scene.kubectl("delete", "rlj", "--all")
    kinds = scene.kinds()
    own = "app.kubernetes.io/part-of=asyncflow"
    scene.wait(lambda: not scene.left(*kinds, namespace=NAMESPACE, selector=own), "all that the jobs owned to be gone")
    scene.kubectl(
        "get", "all,persistentvolumeclaims,configmaps,secrets,serviceaccounts,poddisruptionbudgets,networkpolicies"
    )
    _requests(scene)
    scene.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
    scene.wait(
        lambda: not scene.left("pods", "deployments", "replicasets", namespace=SYSTEM), "the operator's pods to be gone"
    )
    left = [each for each in scene.left(*kinds, namespace=SYSTEM) if each not in _STAYS]
    scene.transcript.check("left in its namespace beside master key and Lease", holds=not left, found=left)


def _begin(scene: Scene, job: str, overlay: Path) -> Path:
    """Create the volumes and the job; return the folder of the ledger."""
    ledger, _ = (scene.make_volume(f"{job}-{volume}") for volume in ("ledger", "checkpoints"))
    scene.apply(overlay)
    scene.wait(lambda: scene.status(job).get("phase") == "Running", f"{job} to be running", timeout_s=_TRAINED_S)
    return ledger / job


def _ask_driver(scene: Scene, job: str) -> None:
    """Query a driver and send it a command through kubectl port-forward, as the guide describes."""
    driver, secrets = f"{job}-driver-0", scene.status(job)["secrets"]
    with scene.forwarded(driver, HTTP_PORT) as port:
        status = json.loads(_curl(f"http://127.0.0.1:{port}/v1/status"))
    scene.transcript.check("the driver says how it goes", holds=status["phase"] == "Running", found=status["phase"])
    with tempfile.TemporaryDirectory() as folder, scene.forwarded(driver, CONTROL_PORT) as port:
        authority, header = Path(folder, "ca.crt"), Path(folder, "header")
        authority.write_bytes(scene.secret(secrets["viewer"]["name"], "ca.crt"))
        header.write_bytes(b"Authorization: Bearer " + scene.secret(secrets["keys"]["name"], "token"))
        to = ("--cacert", str(authority), "--connect-to", f"driver-0:{port}:127.0.0.1:{port}", "--request", "POST")
        answers = [
            _curl(*to, *with_token, "--write-out", " %{http_code}", f"https://driver-0:{port}/v1/checkpoint")
            for with_token in ((), ("--header", f"@{header}"))
        ]
    found = [answer.rpartition(" ")[2] for answer in answers]
    scene.transcript.check("it takes orders with the job's token alone", holds=found == ["401", "202"], found=found)


def _curl(*arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", "20", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_AUDIT_S, check=False)
    if result.returncode != 0:
        raise PlaneError(f"curl ended with {result.returncode}: {result.stderr}")
    return result.stdout


def _finish(scene: Scene, job: str, ledger: Path) -> None:
    """Wait until the job has ended, and check its accuracy and the audit of its samples."""
    steps = scene.status(job)["steps"]
    every = steps // _SHOWN
    for step in range(scene.status(job).get("step", 0) + every, steps, every):
        _reach(scene, job, step)
        scene.show(job)
    scene.wait(lambda: _ended(scene, job), f"{job} to have finished", timeout_s=_TRAINED_S)
    scene.show(job)
    status = scene.status(job)
    scene.transcript.check("the job has succeeded", holds=status["phase"] == "Succeeded", found=status["phase"])
    step, accuracy, greedy = scene.evaluation(job)
    scene.transcript.check(
        f"accuracy >= {ACCURACY} on 512 held-out prompts", holds=accuracy >= ACCURACY, found=accuracy
    )
    scene.transcript.check(f"greedy >= {ACCURACY}, both at the last step", holds=greedy >= ACCURACY, found=greedy)
    scene.transcript.check("the last evaluation is that of the last step", holds=step == steps, found=step)
    _audit(scene, job, ledger)


def _audit(scene: Scene, job: str, folder: Path) -> None:
    command = [sys.executable, "-m", "asyncflow", "audit", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_AUDIT_S, check=False)
    scene.transcript.command(f"asyncflow audit {folder}", result.stdout + result.stderr)
    account = {words[:-1]: int(number) for words, number in _rows(result.stdout)}
    for what in ("lost", "duplicated"):
        found = account.get((what,), -1)
        scene.transcript.check(f"{job}: samples {what}", holds=found == 0 and result.returncode == 0, found=found)


def _rows(printed: str) -> list[tuple[tuple[str, ...], str]]:
    return [(tuple(line.split()), line.split()[-1]) for line in printed.splitlines()]


def _lose(scene: Scene, job: str, replica: str, lose: Callable[[], object]) -> None:
    """Lose the pod of a replica; wait until a new pod replaces it, the job advances, and all its pods are ready."""
    name = f"{job}-{replica}"
    lost, step = scene.uid(name), scene.status(job).get("step", 0)
    lose()
    scene.wait(lambda: scene.uid(name) not in ("", lost) and _ready(scene, name), f"another {name} to be ready")
    _reach(scene, job, step + 2)
    scene.wait(lambda: _ended(scene, job) or _whole(scene, job), "every pod of the job to be ready")


def _same_trainer(scene: Scene, job: str, uid: str) -> None:
    found = scene.uid(f"{job}-trainer-0")
    scene.transcript.check("nothing about rollouts restarted the trainer", holds=found == uid, found=f"pod {found[:8]}")


def _reach(scene: Scene, job: str, step: int) -> None:
    def there() -> bool:
        return _ended(scene, job) or scene.status(job).get("step", 0) >= step

    scene.wait(there, f"step {step}", timeout_s=_TRAINED_S)
    if scene.status(job)["phase"] == "Failed":
        raise PlaneError(f"{job} has failed: {scene.status(job)['conditions']}")


def _ended(scene: Scene, job: str) -> bool:
    return scene.status(job).get("phase") in ("Succeeded", "Failed")


def _whole(scene: Scene, job: str) -> bool:
    return _is_ready(scene.status(job))


def _ready(scene: Scene, name: str) -> bool:
    pod = scene.pod(name)
    return pod is not None and _is_ready(pod["status"])


def _is_ready(status: Json) -> bool:
    return any((each["type"], each["status"]) == ("Ready", "True") for each in status.get("conditions", ()))


def _forced(pod: str) -> tuple[str, ...]:
    return ("delete", "pod", pod, "--force", "--grace-period=0")


def _requests(scene: Scene) -> None:
    """Record the operator's requests to the API server, and check that none lacked a permission."""
    requests = scene.node.plane.requests(user=_OPERATOR)
    writes = Counter(f"{each.verb} {each.resource}" for each in requests if each.is_write)
    scene.transcript.say(f"the operator made {len(requests)} requests, among them {dict(writes.most_common())}")
    forbidden = sorted({f"{each.verb} {each.resource}" for each in requests if each.code == HTTPStatus.FORBIDDEN})
    scene.transcript.check("requests that its rights did not cover", holds=not forbidden, found=forbidden)
