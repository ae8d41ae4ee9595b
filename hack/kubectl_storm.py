"""Random changes that users make with kubectl, from a seed, on a control plane of ``kube`` that simulates pods.

Jobs and a stand-alone queue are edited, also to refused specs, scaled, suspended, deleted and created again. Objects
that the operator created for them are deleted and edited, and lose labels and owners. Foreign objects appear under
names that the jobs need. Processes are killed, quotas are added and removed, and the operator is killed. Then the
changes stop, and the cluster must soon match the last specs. The operator must not have changed a foreign object.

Invariant: every foreign object is compared with its original from its creation until the storm removes it.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from asyncflow_operator.cluster.kinds import BY_NAME, CONFIG, CUSTOM_KINDS, POD, QUEUE, RLJOB, SYNC, Kind
from driver_double import DriverDouble
from kube.plane import ControlPlane
from kube.rest import Refused
from operator_process import OperatorProcess

Json = dict[str, Any]

SETTLE_S: Final = 180.0
"""Seconds within which the cluster must match the specs after the last change; the operator retries a refused object
after a minute at most.
"""
QUIET_S: Final = 5.0
_EDIT: Final = {"fieldManager": "kubectl-edit"}
_EXPECTED: Final = frozenset((400, 403, 404, 409, 422))
"""HTTP statuses for a change that conflicts with another one, is invalid, or exceeds the quota."""
_GONE: Final = 404
_QUEUE_KILLS: Final = 8
"""Fewer than the number of failures after which a role of a stand-alone queue is no longer restarted."""
_LABELS: Final = "app.kubernetes.io/managed-by=asyncflow-operator"
_ROLES: Final = ("driver", "controller", "storage", "rollout", "trainer")
_BUDGET: Final = {"maxRestarts": 100_000, "windowSeconds": 100_000, "backoffSeconds": 0}
_KINDS: Final = tuple(kind for kind in BY_NAME.values() if kind is not RLJOB and not kind.optional)
_SECRET: Final = BY_NAME["Secret"]
_CLAIM: Final = BY_NAME["PersistentVolumeClaim"]
_EDITS: Final[dict[str, Json]] = {
    "ConfigMap": {"data": {"job.yaml": "theirs"}},
    "Service": {"spec": {"selector": {"app": "theirs"}}},
    "ServiceAccount": {"automountServiceAccountToken": True},
    "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": {"app": "theirs"}}}},
    "PodDisruptionBudget": {"spec": {"minAvailable": 0}},
    "TransferQueue": {"spec": {"storageUnits": 4}},
}


def jobs_of(manifest: Json, namespace: str) -> dict[str, Json]:
    """Return two jobs like ``manifest``, by name, with few pods that may fail often; one has a claim for the ledger."""
    made = {}
    for name in ("a", "b"):
        made[name] = json.loads(json.dumps(manifest)) | {"metadata": {"name": name, "namespace": namespace}}
        spec = made[name]["spec"]
        spec["rollout"] |= {"replicas": 2, "minReplicas": 0, "maxReplicas": 6}
        spec["failurePolicy"] = dict.fromkeys(_ROLES, _BUDGET)
    made["b"]["spec"]["storage"] |= {"ledger": {"claim": {"size": "1Gi"}}}
    return made


class Storm:
    """One series of changes in a namespace of its own.

    jobs: manifests by name; queue: name of a stand-alone queue; events: the changes, in order; foreign: the original
    states of foreign objects, by path.
    """

    def __init__(
        self,
        plane: ControlPlane,
        operator: OperatorProcess,
        drivers: DriverDouble,
        *,
        namespace: str,
        jobs: dict[str, Json],
        queue: str,
        seed: int,
    ) -> None:
        self._api = plane.api
        self._plane = plane
        self._operator = operator
        self._drivers = drivers
        self._namespace = namespace
        self._jobs = jobs
        self._queue = queue
        self._dice = random.Random(seed)
        self._killed: Counter[tuple[str, str]] = Counter()
        self.foreign: dict[str, str] = {}
        self.events: list[str] = []

    def begin(self) -> None:
        """Create the jobs and the queue, and wait until they run."""
        for name in self._jobs:
            self._make(name)
        queue = {"apiVersion": QUEUE.api_version, "kind": QUEUE.name, "spec": {"storageUnits": 1}}
        self._api.create(QUEUE.path(self._namespace), queue | {"metadata": {"name": self._queue}})
        self._until_settled()

    def run(self, count: int) -> None:
        """Make ``count`` changes, most of them while the operator is still handling the previous one."""
        kinds: dict[Callable[[], str], int] = {
            self._edit: 5,
            self._edit_to_refused_spec: 2,
            self._scale: 5,
            self._suspend_or_resume: 2,
            self._delete_a_pod: 5,
            self._delete_an_object: 6,
            self._edit_an_object: 5,
            self._relabel: 4,
            self._disown: 1,
            self._take_a_name: 5,
            self._remove_foreign: 4,
            self._kill_a_process: 5,
            self._quota: 2,
            self._delete_a_job: 1,
            self._kill_the_operator: 1,
        }
        while len(self.events) < count:
            act = self._dice.choices(list(kinds), weights=list(kinds.values()))[0]
            try:
                done = act()
            except Refused as refused:
                if refused.status not in _EXPECTED:
                    raise
                done = ""
            if done:
                self.events.append(done)
            time.sleep(self._dice.choice((0.0, 0.0, 0.1, 0.3, 1.0)))
            self._provision()

    def settle(self) -> float:
        """End the disturbances, wait until the cluster matches the specs and stays so, and return the seconds."""
        self.check_foreign()
        for path in list(self.foreign):
            self._remove(path)
        self._api.delete(f"/api/v1/namespaces/{self._namespace}/resourcequotas")
        for name, manifest in self._jobs.items():
            if not self._exists(name):
                self._make(name)
            self._drivers.resume(self._namespace, name)
            spec = manifest["spec"]
            change = {"suspend": False, "rollout": spec["rollout"], "transferQueue": spec["transferQueue"]}
            self._api.patch(self._path(name), {"spec": change | {"trainer": {"replicas": spec["trainer"]["replicas"]}}})
        started = time.monotonic()
        self._until_settled()
        took = time.monotonic() - started
        self._wait_until_quiet()
        return took

    def check_foreign(self) -> None:
        """Raise AssertionError if a foreign object differs from its original."""
        for path in self.foreign:
            assert self._is(path), f"{path} was touched, by one of {self._writers(path)}, after {self.events[-20:]}"

    # Changes to jobs.

    def _edit(self) -> str:
        name = self._some_job()
        spec = self._jobs[name]["spec"]
        part, change = self._dice.choice(
            [
                ("rollout", {"replicas": self._dice.randint(1, 4), "engine": spec["rollout"]["engine"]}),
                ("transferQueue", {"storageUnits": self._dice.randint(1, 3)}),
                ("trainer", {"replicas": self._dice.randint(1, 2)}),
                ("algorithm", {"learningRate": self._dice.choice((1e-3, 1e-4))}),
                ("template", {"env": [{"name": "A", "value": str(self._dice.randint(0, 9))}]}),
            ]
        )
        self._patch(self._path(name), {"spec": {part: change}})
        spec[part] = spec.get(part, {}) | change
        return f"edit {name}.{part}"

    def _edit_to_refused_spec(self) -> str:
        name = self._some_job()
        change = self._dice.choice(({"rollout": {"engine": {"name": "vllm"}}}, {"model": {"dtype": "bfloat16"}}))
        self._patch(self._path(name), {"spec": change})
        if "model" in change:
            time.sleep(0.3)
            self._patch(self._path(name), {"spec": {"model": {"dtype": None}}})
        return f"edit {name} to what is not done yet"

    def _scale(self) -> str:
        name = self._some_job()
        count = self._dice.randint(1, 4)
        match self._dice.choice(("job", "child", "queue")):
            case "job":
                self._patch(f"{self._path(name)}/scale", {"spec": {"replicas": count}})
                self._jobs[name]["spec"]["rollout"]["replicas"] = count
                return f"scale {name} to {count}"
            case "child":
                if QUEUE.path(self._namespace, name) in self.foreign:
                    return ""
                self._patch(f"{QUEUE.path(self._namespace, name)}/scale", {"spec": {"replicas": count}})
                return f"scale tq/{name} to {count}"
        self._patch(f"{QUEUE.path(self._namespace, self._queue)}/scale", {"spec": {"replicas": min(count, 3)}})
        return f"scale tq/{self._queue} to {min(count, 3)}"

    def _suspend_or_resume(self) -> str:
        name = self._some_job()
        suspend = self._dice.random() < 0.5
        if not suspend:
            self._drivers.resume(self._namespace, name)
        self._patch(self._path(name), {"spec": {"suspend": suspend}})
        return f"suspend {name}: {suspend}"

    def _delete_a_job(self) -> str:
        name = self._some_job()
        self._api.delete(self._path(name))
        self._plane.wait_until(lambda: not self._exists(name), f"{name} to go")
        self._make(name)
        return f"delete {name} and make it again"

    def _make(self, name: str) -> None:
        self._drivers.resume(self._namespace, name)
        self._api.create(RLJOB.path(self._namespace), self._jobs[name])

    # Changes to objects that the operator created.

    def _delete_a_pod(self) -> str:
        pod = self._some(POD)
        if pod is None:
            return ""
        grace = {"gracePeriodSeconds": "0"} if self._dice.random() < 0.5 else {}
        self._api.delete(_path(POD, pod), **grace)
        return f"delete {_called(POD, pod)}"

    def _delete_an_object(self) -> str:
        kind = self._dice.choice([kind for kind in _KINDS if kind is not POD])
        raw = self._some(kind)
        if raw is None:
            return ""
        self._api.delete(_path(kind, raw))
        return f"delete {_called(kind, raw)}"

    def _edit_an_object(self) -> str:
        kind = BY_NAME[self._dice.choice(list(_EDITS))]
        raw = self._some(kind)
        if raw is None:
            return ""
        self._patch(_path(kind, raw), _EDITS[kind.name])
        return f"edit {_called(kind, raw)}"

    def _relabel(self) -> str:
        kind = self._dice.choice([kind for kind in _KINDS if kind not in CUSTOM_KINDS])
        raw = self._some(kind)
        if raw is None:
            return ""
        labels = raw["metadata"]["labels"]
        some = self._dice.sample(sorted(labels), self._dice.randint(1, len(labels)))
        value = self._dice.choice((None, "7", "theirs"))
        self._patch(_path(kind, raw), {"metadata": {"labels": dict.fromkeys(some, value)}})
        return f"relabel {_called(kind, raw)}: {value}"

    def _disown(self) -> str:
        kind = self._dice.choice([kind for kind in _KINDS if kind not in CUSTOM_KINDS and kind is not POD])
        raw = self._some(kind)
        if raw is None:
            return ""
        disowned = self._patch(_path(kind, raw), {"metadata": {"ownerReferences": None}})
        self.foreign[_path(kind, raw)] = _identity(disowned)
        return f"disown {_called(kind, raw)}"

    def _take_a_name(self) -> str:
        """Replace an object that a job needs with a foreign object of the same name."""
        kind = self._dice.choice([kind for kind in _KINDS if kind not in (SYNC, _SECRET)])
        raw = self._some(kind)
        if raw is None:
            return ""
        meta = {"name": raw["metadata"]["name"]}
        if self._dice.random() < 0.5:
            meta |= {"labels": raw["metadata"]["labels"]}
        body = {key: value for key, value in raw.items() if key not in ("metadata", "status")} | {"metadata": meta}
        for field in ("clusterIP", "clusterIPs", "nodeName", "volumeName"):
            body.get("spec", {}).pop(field, None)
        self._api.delete(_path(kind, raw), gracePeriodSeconds="0")
        time.sleep(self._dice.choice((0.0, 0.0, 0.05)))
        made = self._api.create(kind.path(self._namespace), body)
        self.foreign[_path(kind, made)] = _identity(made)
        return f"take the name of {_called(kind, raw)}"

    def _remove_foreign(self) -> str:
        if not self.foreign:
            return ""
        path = self._dice.choice(sorted(self.foreign))
        self.check_foreign()
        self._remove(path)
        return f"remove {path}"

    def _remove(self, path: str) -> None:
        self._patch(path, {"metadata": {"finalizers": None}})
        self._api.delete(path, gracePeriodSeconds="0")
        self._plane.wait_until(lambda: not self._is(path), f"{path} to go")
        del self.foreign[path]

    def _is(self, path: str) -> bool:
        """Return whether a foreign object exists and equals its original."""
        try:
            return _identity(self._api.get(path)) == self.foreign[path]
        except Refused as refused:
            if refused.status != _GONE:
                raise
            return False

    # Failures and quotas.

    def _kill_a_process(self) -> str:
        pod = self._some(POD)
        if pod is None or pod.get("status", {}).get("phase") != "Running":
            return ""
        labels = pod["metadata"]["labels"]
        role = (labels.get("asyncflow.dev/queue"), labels.get("asyncflow.dev/role"))
        if role[0] == self._queue and self._killed[role] >= _QUEUE_KILLS:
            return ""
        self._killed[role] += 1
        self._patch(_path(POD, pod), {"metadata": {"annotations": {"kwok.test/exit": self._dice.choice(("1", "137"))}}})
        return f"kill {_called(POD, pod)}"

    def _quota(self) -> str:
        path = f"/api/v1/namespaces/{self._namespace}/resourcequotas"
        if self._api.get(path)["items"]:
            self._api.delete(path)
            return "lift the quota"
        pods = str(self._dice.randint(4, 12))
        self._api.create(path, {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": pods}}})
        return f"a quota of {pods} pods"

    def _kill_the_operator(self) -> str:
        self._operator.process.end()
        self._operator.start()
        return "kill the operator"

    def _provision(self) -> None:
        """Create a volume for every pending claim, as a provisioner does."""
        for claim in self._api.get(_CLAIM.path(self._namespace))["items"]:
            waits = claim["status"].get("phase") == "Pending" and not claim["spec"].get("volumeName")
            uid = claim["metadata"]["uid"]
            if not waits or self._api.exists(f"/api/v1/persistentvolumes/{uid}"):
                continue
            spec = {"capacity": {"storage": "1Gi"}, "accessModes": claim["spec"]["accessModes"]}
            spec |= {"hostPath": {"path": "/tmp"}, "persistentVolumeReclaimPolicy": "Retain"}
            spec |= {"claimRef": {"namespace": self._namespace, "name": claim["metadata"]["name"], "uid": uid}}
            self._api.create("/api/v1/persistentvolumes", {"metadata": {"name": uid}, "spec": spec})

    # Reading the cluster.

    def _some_job(self) -> str:
        return self._dice.choice(sorted(self._jobs))

    def _some(self, kind: Kind) -> Json | None:
        """Return a random object with the operator's label; None if there is none."""
        items = [
            {"apiVersion": kind.api_version, "kind": kind.name} | raw
            for raw in self._api.get(kind.path(self._namespace), labelSelector=_LABELS)["items"]
            if _path(kind, raw) not in self.foreign and "deletionTimestamp" not in raw["metadata"]
        ]
        items.sort(key=lambda raw: str(raw["metadata"]["name"]))
        return self._dice.choice(items) if items else None

    def _path(self, job: str) -> str:
        return RLJOB.path(self._namespace, job)

    def _exists(self, job: str) -> bool:
        return self._api.exists(self._path(job))

    def _patch(self, path: str, change: Json) -> Json:
        return self._api.patch(path, change, query=_EDIT)

    def _until_settled(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while differences := self.differences():
            assert time.monotonic() < deadline, f"{differences}, after {self.events}"
            self._provision()
            time.sleep(0.3)

    def differences(self) -> list[str]:
        """Return the differences between the cluster and the specs."""
        pods = self._api.get(POD.path(self._namespace))["items"]
        found = []
        for name, manifest in self._jobs.items():
            job = self._api.get(self._path(name))
            status, spec = job.get("status", {}), manifest["spec"]
            units = spec["transferQueue"]["storageUnits"]
            wanted = {"driver": 1, "controller": 1, "storage": units, "trainer": spec["trainer"]["replicas"]}
            found += self._of(name, "asyncflow.dev/job", pods, wanted | {"rollout": spec["rollout"]["replicas"]})
            conditions = {each["type"]: each for each in status.get("conditions", ())}
            for kind, value in (("Accepted", "True"), ("Ready", "True"), ("WhyPending", "False")):
                if conditions.get(kind, {}).get("status") != value:
                    found.append(f"{name}: {kind} {conditions.get(kind)}")
            if status.get("phase") != "Running" or status.get("observedGeneration") != job["metadata"]["generation"]:
                found.append(f"{name}: {status.get('phase')} {status.get('observedGeneration')}")
            found += self._objects_of(job, units)
        queue = self._api.get(QUEUE.path(self._namespace, self._queue))
        wanted = {"controller": 1, "storage": queue["spec"]["storageUnits"]}
        return found + self._of(self._queue, "asyncflow.dev/queue", pods, wanted)

    def _of(self, name: str, label: str, pods: list[Json], wanted: dict[str, int]) -> list[str]:
        """Return the difference between the wanted and the running pods of a job or of a stand-alone queue."""
        running = Counter(
            pod["metadata"]["labels"].get("asyncflow.dev/role", "")
            for pod in pods
            if pod["metadata"].get("labels", {}).get(label) == name and _runs(pod)
        )
        return [] if running == Counter(wanted) else [f"{name}: {dict(running)} instead of {wanted}"]

    def _objects_of(self, job: Json, units: int) -> list[str]:
        """Return the errors of a job's objects other than pods: a missing owner or label, or a wrong content."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        found = []
        for kind, each in (
            (CONFIG, name),
            (BY_NAME["ServiceAccount"], name),
            (BY_NAME["Service"], f"{name}-driver"),
            (BY_NAME["PodDisruptionBudget"], name),
            (BY_NAME["NetworkPolicy"], name),
            (BY_NAME["NetworkPolicy"], f"{name}.rewards"),
            (QUEUE, name),
            (SYNC, name),
        ):
            raw = self._api.find(kind.path(self._namespace, each)) or {"metadata": {}}
            owners = [owner["uid"] for owner in raw["metadata"].get("ownerReferences", ())]
            edit = _EDITS.get(kind.name, {})
            if owners != [uid] or "asyncflow.dev/job" not in raw["metadata"].get("labels", {}):
                found.append(f"{kind.name}/{each} is not the job's")
            elif kind is QUEUE and raw["spec"]["storageUnits"] != units:
                found.append(f"{kind.name}/{each} has {raw['spec']['storageUnits']} units")
            elif edit and kind is not QUEUE and _agrees(raw, edit):
                found.append(f"{kind.name}/{each} still has a foreign edit")
        return found

    def _wait_until_quiet(self) -> None:
        """Wait until the operator stops writing. Raises AssertionError if it does not stop."""
        deadline = time.monotonic() + SETTLE_S
        before = self._writes()
        while True:
            time.sleep(QUIET_S)
            after = self._writes()
            if after == before:
                return
            assert time.monotonic() < deadline, f"the operator keeps writing, after {self.events}"
            before = after

    def _writers(self, path: str) -> list[str]:
        """Return the last writes to an object, with their users, the latest last."""
        return [
            f"{each.at:%H:%M:%S.%f} {each.user} {each.agent.partition('/')[0]} {each.verb}: {each.code}"
            for each in self._plane.requests()
            if each.is_write and each.path.startswith(path)
        ][-12:]

    def _writes(self) -> float:
        verbs = ("create", "patch", "delete")
        return sum(self._operator.total("asyncflow_operator_api_requests_total", verb=verb) for verb in verbs)


def _identity(raw: Json) -> str:
    """Return the parts of an object that another manager could change, without those that Kubernetes itself writes: the
    status, and the annotations and names with which it binds claims and pods.
    """
    meta = {key: raw["metadata"].get(key) for key in ("uid", "labels", "ownerReferences")}
    annotations = raw["metadata"].get("annotations") or {}
    meta["annotations"] = {key: value for key, value in annotations.items() if ".kubernetes.io/" not in key}
    content = {key: value for key, value in raw.items() if key in ("spec", "data", "automountServiceAccountToken")}
    if "spec" in content:
        spec = content["spec"].items()
        content["spec"] = {key: value for key, value in spec if key not in ("nodeName", "volumeName")}
    return json.dumps(meta | content, sort_keys=True)


def _agrees(raw: Any, change: Any) -> bool:
    if isinstance(change, dict):
        return isinstance(raw, dict) and all(_agrees(raw.get(key), value) for key, value in change.items())
    return bool(raw == change)


def _path(kind: Kind, raw: Json) -> str:
    return kind.path(raw["metadata"]["namespace"], raw["metadata"]["name"])


def _called(kind: Kind, raw: Json) -> str:
    return f"{kind.name}/{raw['metadata']['name']}"


def _runs(pod: Json) -> bool:
    leaves = "deletionTimestamp" in pod["metadata"] or "kwok.test/exit" in pod["metadata"].get("annotations", {})
    return pod.get("status", {}).get("phase") == "Running" and not leaves
