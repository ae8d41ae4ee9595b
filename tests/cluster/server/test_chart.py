"""The chart on a real API server: installed, upgraded and taken away by Helm, and no more allowed than it says."""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import chart
from asyncflow import __version__
from asyncflow.api.document import parse
from chart import CHART, NAMESPACE, ChartError
from kube.plane import ControlPlane
from kube.rest import DRY_RUN, Api, Refused

pytestmark = pytest.mark.timeout(900)
"""Helm is built by whoever needs it first."""

ROOT = chart.ROOT
EXAMPLES = sorted(file for file in (ROOT / "examples").rglob("*.yaml") if file.name != "keda.yaml")
"""All but that of a kind which this cluster does not know."""
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/asyncflow-operator-master"
RLJOBS = "/apis/asyncflow.dev/v1alpha1/{}rljobs"
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/weightsyncs.asyncflow.dev"
TRANSPORT = "transport: {default: host,"
"""The first field of a WeightSync's spec, as the definition says it."""

PODS = "/api/v1/namespaces/upgrade/pods"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:asyncflow-operator"
OPERATOR = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/asyncflow-operator"

Helm = Callable[..., str]


@pytest.fixture(scope="module")
def bare() -> Iterator[ControlPlane]:
    """A cluster that does not know AsyncFlow."""
    with ControlPlane(audited=True) as running:
        yield running


@pytest.fixture(scope="module")
def helm(bare: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    home = tmp_path_factory.mktemp("helm")
    homes = {f"HELM_{what}_HOME": str(home / what.lower()) for what in ("CACHE", "CONFIG", "DATA")}
    env = os.environ | homes | {"KUBECONFIG": str(bare.admin)}
    return lambda *arguments, values=None: chart.helm(*arguments, "--namespace", NAMESPACE, values=values, env=env)


@pytest.fixture
def install(helm: Helm) -> Iterator[Helm]:
    """Installs or upgrades the release; what the test leaves of it goes."""

    def run(values: dict[str, Any] | None = None, *, source: Path = CHART) -> str:
        return helm("upgrade", "--install", "asyncflow", str(source), "--create-namespace", values=values)

    yield run
    helm("uninstall", "asyncflow", "--ignore-not-found")


def operator(plane: ControlPlane) -> Api:
    """Requests as the service account of the operator."""
    return plane.api_of(ACCOUNT, "system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}")


def allowed(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except Refused as refused:
        if refused.status != 403:
            raise
        return False
    return True


def namespaces(plane: ControlPlane, *names: str) -> None:
    for name in names:
        if not plane.api.exists(f"/api/v1/namespaces/{name}"):
            plane.api.create("/api/v1/namespaces", {"metadata": {"name": name}})


def test_a_cluster_without_any_definitions_takes_it_whole(bare: ControlPlane, helm: Helm, install: Helm) -> None:
    install()
    manifest = helm("get", "manifest", "asyncflow")
    made = bare.kubectl("get", "-f", "-", "-o", "name", manifest=manifest).splitlines()
    assert len(made) == len([each for each in yaml.safe_load_all(manifest) if each])
    bare.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", manifest=manifest)


def test_monitors_are_refused_by_name_where_their_definitions_lack(install: Helm) -> None:
    with pytest.raises(ChartError, match='no matches for kind "ServiceMonitor"'):
        install({"metrics": {"serviceMonitor": {"enabled": True}}})


def test_the_operators_pod_keeps_the_restricted_standard(bare: ControlPlane, install: Helm) -> None:
    install()
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    bare.api.patch(f"/api/v1/namespaces/{NAMESPACE}", label)
    deployment = bare.api.get(OPERATOR)
    pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
    pod = {"metadata": {"name": "one"}, "spec": deployment["spec"]["template"]["spec"]}
    bare.api.create(pods, pod, query=DRY_RUN)
    pod["spec"]["containers"][0]["securityContext"] = {}
    with pytest.raises(Refused, match="violates PodSecurity"):
        bare.api.create(pods, pod, query=DRY_RUN)


def test_an_upgrade_changes_definitions_and_keeps_key_and_jobs(
    bare: ControlPlane, install: Helm, tmp_path: Path
) -> None:
    install()
    namespaces(bare, "upgrade")
    job = RLJOBS.format("namespaces/upgrade/") + "/quickstart"
    with working(bare, tmp_path):
        assert begun(bare, "quickstart").endswith(f":{__version__}")
        bare.wait_until(lambda: driver_record(bare.api.get(job)).get("whole"), "the driver's pod to be on record")
    before, key = bare.api.get(job), bare.api.get(SECRET)["data"]
    pod = bare.api.get(f"{PODS}/quickstart-driver-0")
    assert len(base64.b64decode(key["master.key"])) == 64

    newer = Path(shutil.copytree(CHART, tmp_path / "asyncflow"))
    file = newer / "files" / "crds" / "asyncflow.dev_weightsyncs.yaml"
    assert TRANSPORT in file.read_text()
    later = "later: {type: string}\n" + 14 * " "
    file.write_text(file.read_text().replace(TRANSPORT, later + TRANSPORT))
    install({"image": {"tag": "9.9.9"}, "runtime": {"tag": "9.9.9"}}, source=newer)

    served = bare.api.get(DEFINITION)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert "later" in served["properties"]["spec"]["properties"]
    assert bare.api.get(SECRET)["data"] == key
    with working(bare, tmp_path):
        assert begun(bare, "later").endswith(":9.9.9")
    after = bare.api.get(job)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert bare.api.get(f"{PODS}/quickstart-driver-0")["metadata"] == pod["metadata"]
    bare.kubectl("delete", "rlj,tq,ws,pods", "--all", "--wait=false", "-n", "upgrade")


def driver_record(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job.get("status", {}).get("failures", {}).get("driver", {}))


def begun(plane: ControlPlane, name: str) -> str:
    """Make a job and wait for its driver's pod; give the image."""
    job = parse((ROOT / "examples" / "quickstart.yaml").read_text(), source=name).data | {"metadata": {"name": name}}
    plane.kubectl("apply", "-n", "upgrade", "-f", "-", manifest=job)
    driver = f"{PODS}/{name}-driver-0"
    plane.wait_until(lambda: plane.api.exists(driver), f"the driver's pod of {name}")
    return str(plane.api.get(driver)["spec"]["containers"][0]["image"])


def test_uninstalling_keeps_definitions_jobs_and_key_and_installing_finds_them(
    bare: ControlPlane, helm: Helm, install: Helm
) -> None:
    install()
    namespaces(bare, "kept")
    bare.kubectl("apply", "-n", "kept", "-f", str(ROOT / "examples" / "quickstart.yaml"))
    key = bare.api.get(SECRET)["data"]
    helm("uninstall", "asyncflow")
    assert bare.api.exists(RLJOBS.format("namespaces/kept/") + "/quickstart")
    assert not bare.api.exists(OPERATOR)
    install()
    assert bare.api.get(SECRET)["data"] == key


def test_an_operator_of_the_cluster_sees_jobs_and_nodes_and_no_secret(bare: ControlPlane, install: Helm) -> None:
    install()
    api = operator(bare)
    assert allowed(api, RLJOBS.format(""))
    assert allowed(api, "/api/v1/pods")
    assert allowed(api, "/api/v1/nodes")
    for closed in ("/api/v1/secrets", SECRET, "/api/v1/namespaces", "/apis/apps/v1/deployments"):
        assert not allowed(api, closed), closed


def test_an_operator_of_a_namespace_sees_nothing_beside_it(bare: ControlPlane, install: Helm) -> None:
    namespaces(bare, "inside", "outside")
    install({"namespaces": ["inside"]})
    api = operator(bare)
    assert allowed(api, RLJOBS.format("namespaces/inside/"))
    for closed in (RLJOBS.format("namespaces/outside/"), RLJOBS.format(""), "/api/v1/nodes", "/api/v1/pods"):
        assert not allowed(api, closed), closed


@pytest.mark.parametrize("scope", ["cluster", "namespaced"])
def test_an_operator_as_it_is_deployed_begins_a_job_and_is_refused_nothing(
    bare: ControlPlane, install: Helm, tmp_path: Path, scope: str
) -> None:
    namespaces(bare, scope)
    install({"namespaces": [scope] if scope == "namespaced" else []})
    before = len(bare.requests(user=ACCOUNT))
    with working(bare, tmp_path):
        bare.kubectl("apply", "-n", scope, "-f", str(ROOT / "examples" / "quickstart.yaml"))
        driver = f"/api/v1/namespaces/{scope}/pods/quickstart-driver-0"
        bare.wait_until(lambda: bare.api.exists(driver), "the driver's pod")
    requests = bare.requests(user=ACCOUNT)[before:]
    assert [request for request in requests if request.code == 403] == []
    assert any(request.kind == "secrets" and request.is_write for request in requests)


@contextmanager
def working(plane: ControlPlane, folder: Path) -> Iterator[None]:
    """The operator as it is deployed works, and ends well."""
    process = started(plane, folder)
    try:
        yield
    finally:
        process.terminate()
        code = process.wait(timeout=30)
    assert code == 0, (folder / "log").read_text()


def started(plane: ControlPlane, folder: Path) -> "subprocess.Popen[bytes]":
    """The operator with what its Deployment gives it, outside of a pod."""
    (container,) = plane.api.get(OPERATOR)["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    key = folder / "master.key"
    key.write_bytes(base64.b64decode(plane.api.get(SECRET)["data"]["master.key"]))
    ours = {
        "ASYNCFLOW_OPERATOR_NAMESPACE": NAMESPACE,
        "ASYNCFLOW_OPERATOR_KEY_FILE": str(key),
        "ASYNCFLOW_OPERATOR_HTTP_PORT": "0",
        "ASYNCFLOW_OPERATOR_KUBECONFIG": str(plane.service_account(NAMESPACE, "asyncflow-operator")),
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("operator", "runtime")),
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "asyncflow_operator", *container["args"]],
            env=os.environ | given | ours,
            stdout=log,
            stderr=log,
        )


@pytest.mark.parametrize("file", sorted((ROOT / "deploy").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_plain_manifests_are_accepted(plane: ControlPlane, file: Path) -> None:
    namespaces(plane, *(each["metadata"]["name"] for each in parts(file) if each["kind"] == "Namespace"))
    plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(file))


def test_every_example_is_accepted(plane: ControlPlane, namespace: str) -> None:
    files = [word for file in EXAMPLES for word in ("-f", str(file))]
    said = plane.kubectl("apply", "--dry-run=server", "--validate=strict", "-n", namespace, *files).splitlines()
    assert len(said) == len(EXAMPLES)
    assert all(line.endswith("created (server dry run)") for line in said)


def parts(file: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]
