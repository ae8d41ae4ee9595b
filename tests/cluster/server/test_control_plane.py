"""The control plane itself: real, alone on its ports, telling who asked for what, and gone when its owner is."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kube import build, servers
from kube.folder import owner, place_of
from kube.plane import ControlPlane, KubectlError
from kube.process import PlaneError, Restarted, wait_until
from kube.rest import Refused

HACK = Path(__file__).parents[3] / "hack"
PODS = "/api/v1/namespaces/{}/pods"


def a_role(verbs: list[str]) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "reader"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": verbs}],
    }


def bound_to(subject: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "reader"},
        "subjects": [subject],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
    }


def wait_allowed(plane: ControlPlane, namespace: str, **subject: Any) -> None:
    """Wait until the API server knows a binding that lets ``subject`` list pods: it counts a little later."""
    attributes = {"namespace": namespace, "verb": "list", "resource": "pods"}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {**subject, "resourceAttributes": attributes},
    }
    reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    plane.wait_until(lambda: plane.api.create(reviews, review)["status"]["allowed"], "a binding to count", timeout_s=10)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_it_is_the_pinned_version(plane: ControlPlane) -> None:
    said = plane.api.get("/version")["gitVersion"]
    assert said.startswith("v1.34.")
    assert said == build.version("kube") or "KUBEBUILDER_ASSETS" in os.environ


def test_a_user_may_do_what_rbac_grants(plane: ControlPlane, namespace: str) -> None:
    jane = plane.api_of("jane", "developers")
    with pytest.raises(Refused) as refused:
        jane.get(PODS.format(namespace))
    assert (refused.value.status, refused.value.reason) == (403, "Forbidden")
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    plane.api.create(f"{roles}/roles", a_role(["list"]))
    plane.api.create(f"{roles}/rolebindings", bound_to({"kind": "Group", "name": "developers"}))
    wait_allowed(plane, namespace, user="jane", groups=["developers"])
    assert jane.get(PODS.format(namespace))["items"] == []


def test_a_service_account_is_one_to_rbac_and_to_the_audit_log(plane: ControlPlane, namespace: str) -> None:
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    plane.api.create(f"{roles}/roles", a_role(["list"]))
    subject = {"kind": "ServiceAccount", "name": "operator", "namespace": namespace}
    plane.api.create(f"{roles}/rolebindings", bound_to(subject))
    operator = plane.service_account(namespace, "operator")
    wait_allowed(plane, namespace, user=f"system:serviceaccount:{namespace}:operator")
    assert plane.kubectl("get", "pods", "-n", namespace, kubeconfig=operator) == ""
    with pytest.raises(KubectlError, match='cannot list resource "secrets"') as refused:
        plane.kubectl("get", "secrets", "-n", namespace, kubeconfig=operator)
    assert refused.value.code == 1
    asked = plane.requests(user=f"system:serviceaccount:{namespace}:operator")
    seen = {(request.verb, request.group, request.kind, request.namespace, request.code) for request in asked}
    assert ("list", "", "pods", namespace, 200) in seen
    assert ("list", "", "secrets", namespace, 403) in seen
    assert not any(request.is_write for request in asked)


def test_what_is_stored_survives_a_restart_of_the_server(plane: ControlPlane, namespace: str) -> None:
    before = plane.process("apiserver").pid
    plane.restart("apiserver")
    assert plane.process("apiserver").pid != before
    assert plane.api.exists(f"/api/v1/namespaces/{namespace}")


def test_a_server_that_dies_is_told_with_the_end_of_its_log() -> None:
    plane = ControlPlane(apiserver_flags=["--no-such-flag"])
    with pytest.raises(PlaneError, match=r"(?s)waited for the API server.*apiserver ended with 1.*unknown flag"):
        plane.start()
    with pytest.raises(PlaneError, match="is not running"):
        _ = plane.folder


def test_a_process_that_gave_up_as_expected_is_started_again_by_who_waits(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    life = "import sys; lives = open(sys.argv[1], 'a'); lives.write('x'); lives.close(); sys.exit(int(sys.argv[2]))"
    gives_up = Restarted("operator", [sys.executable, "-c", life, lives, "3"], log=tmp_path / "log", status=3)
    gives_up.start()
    wait_until(lambda: lives.exists() and lives.stat().st_size >= 3, "three lives", needs=[gives_up])
    gives_up.end()
    fails = Restarted("operator", [sys.executable, "-c", life, lives, "1"], log=tmp_path / "log", status=3)
    fails.start()
    with pytest.raises(PlaneError, match="operator ended with 1"):
        wait_until(lambda: False, "nothing", needs=[fails])
    fails.end()


def test_a_port_that_was_taken_meanwhile_costs_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    with socket.create_server((servers.LOOPBACK, 0)) as taken:

        def ports(count: int) -> list[int]:
            tries.append(free_ports(count))
            return [*tries[-1][:-2], taken.getsockname()[1], tries[-1][-1]] if len(tries) == 1 else tries[-1]

        free_ports = servers.free_ports
        monkeypatch.setattr(servers, "free_ports", ports)
        with ControlPlane() as plane:
            assert plane.api.exists("/api/v1/namespaces/default")
    assert len(tries) == 2


def test_it_dies_with_its_owner_and_the_next_one_tidies_up(plane: ControlPlane) -> None:
    text = "from kube.plane import *\np = ControlPlane(); p.start()\n"
    text += "print(p.folder, p.process('etcd').pid, p.process('apiserver').pid, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", text],
        env=os.environ | {"PYTHONPATH": str(HACK)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        folder, *pids = process.stdout.readline().split()
        process.kill()
    plane.wait_until(lambda: not any(alive(int(pid)) for pid in pids), "the orphans to be gone")
    assert owner(Path(folder)) is None
    assert owner(plane.folder) == os.getpid()
    os.utime(folder, (0, 0))
    with pytest.raises(PlaneError):
        ControlPlane(apiserver_flags=["--no-such-flag"]).start()
    assert not Path(folder).exists()


def test_people_have_it_by_name() -> None:
    name = f"test-{os.getpid()}"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kube", *arguments, "--name", name],
            env=os.environ | {"PYTHONPATH": str(HACK)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    try:
        up = run("up")
        assert up.returncode == 0, up.stderr
        assert run("env").stdout == up.stdout
        assert run("up").stderr.startswith(f"{name} is up already")
        shell = f"eval '{up.stdout}'; kubectl get namespace default -o name"
        said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=True)
        assert said.stdout == "namespace/default\n"
    finally:
        assert run("down").returncode == 0
    assert owner(place_of(name)) is None
    assert not place_of(name).exists()
    assert run("env").returncode == 1


def test_a_server_can_hang_and_go_on(plane: ControlPlane) -> None:
    plane.process("apiserver").send(signal.SIGSTOP)
    try:
        with pytest.raises(OSError, match="timed out"):
            plane.api.request("GET", "/version", timeout_s=0.3)
    finally:
        plane.process("apiserver").send(signal.SIGCONT)
    assert plane.api.get("/version")
