"""Certificates of a job's processes on a real API server: who is given which, and how they are renewed."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from one_job import OneJob
from scripted_driver import ScriptedDrivers
from world import OURS

from asyncflow.identity import ProcessIdentity
from asyncflow.rpc.tls import Credentials
from kube.plane import ControlPlane
from operator_process import OperatorProcess

ALONE = f"{OURS}/namespaces/jobs/transferqueues"
SECRETS = "/api/v1/namespaces/jobs/secrets"


@pytest.fixture
def job(kwok_plane: ControlPlane, shared_operator: OperatorProcess, drivers: ScriptedDrivers) -> Iterator[OneJob]:
    begun = OneJob(kwok_plane, "jobs", "sealed", drivers.of("jobs", "sealed")).create()
    begun.until_phase("Running")
    yield begun
    begun.delete()


def mounted(job: OneJob, pod: str) -> dict[str, bytes]:
    """Return the files of Secrets that a kubelet would give to the pod."""
    spec = job.pods()[pod]["spec"]
    assert not any("secret" in volume for volume in spec["volumes"])
    sources = [source for volume in spec["volumes"] for source in volume.get("projected", {}).get("sources", ())]
    files: dict[str, bytes] = {}
    for secret in (source["secret"] for source in sources if "secret" in source):
        data = job.plane.api.get(f"{SECRETS}/{secret['name']}")["data"]
        files |= {item["path"]: base64.b64decode(data[item["key"]]) for item in secret["items"]}
    return files


def identity(certificate: bytes) -> str:
    names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    (uri,) = names.value.get_values_for_type(x509.UniformResourceIdentifier)
    return uri


def test_each_pod_has_its_own_certificate_which_is_renewed_and_there_before_it(job: OneJob) -> None:
    uid = job.job()["metadata"]["uid"]
    seen = {pod: mounted(job, pod) for pod in job.pods()}
    for pod, files in seen.items():
        role, _, index = pod.rpartition("-")
        assert identity(files["tls/tls.crt"]) == ProcessIdentity(uid, role, int(index)).uri
    assert ("token" in seen["driver-0"], "token" in seen["rollout-0"]) == (True, False)

    everything = {key: value for part in job.status()["secrets"] for key, value in _of(job, part).items()}
    authority = x509.load_pem_x509_certificate(seen["driver-0"]["tls/ca.crt"]).public_key()
    keys = [value for value in everything.values() if b"PRIVATE KEY" in value]
    assert keys
    assert not any(_public(key) == authority for key in keys), "the authority's key leaves the operator"

    before = job.plane.api.get(f"{SECRETS}/{job.status()['secrets']['rollout']['name']}")
    record = job.status()["secrets"]["rollout"]
    old = {"data": {"0.crt": base64.b64encode(b"the one of the last period").decode()}}
    job.plane.api.patch(f"{SECRETS}/{record['name']}", old)
    job.plane.api.patch(
        f"{job.path}/status", {"status": {"secrets": {"rollout": record | {"period": record["period"] - 1}}}}
    )
    job.until(lambda: job.status()["secrets"]["rollout"]["period"] == record["period"], "the renewal")
    after = job.plane.api.get(f"{SECRETS}/{record['name']}")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["data"] == before["data"]

    job.edit(transferQueue={"storageUnits": 4}, rollout={"replicas": 3, "maxReplicas": 3})
    job.until(lambda: {"storage-3", "rollout-2"} <= job.pods().keys(), "more units and rollouts")
    for role, index in (("storage", 3), ("rollout", 2)):
        assert identity(mounted(job, f"{role}-{index}")["tls/tls.crt"]) == ProcessIdentity(uid, role, index).uri
        name = job.status()["secrets"][role]["name"]
        asked = [each for each in job.plane.requests() if each.is_write]
        written = [each.at for each in asked if each.resource == "secrets" and each.name == name]
        made = [each.at for each in asked if each.resource == "pods" and each.name == f"sealed-{role}-{index}"]
        assert written[-1] < made[0]


def test_whoever_uses_a_queue_that_stands_alone_finds_a_certificate(
    kwok_plane: ControlPlane, shared_operator: OperatorProcess, tmp_path: Path
) -> None:
    queue = {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "TransferQueue"}
    made = kwok_plane.api.create(ALONE, queue | {"metadata": {"name": "open"}, "spec": {"storageUnits": 1}})
    path = "{.status.secrets.client.name}"

    def name() -> str:
        return kwok_plane.kubectl("-n", "jobs", "get", "transferqueue", "open", "-o", f"jsonpath={path}")

    kwok_plane.wait_until(name, "the Secret of clients to be on record")
    for file, value in kwok_plane.api.get(f"{SECRETS}/{name()}")["data"].items():
        (tmp_path / file).write_bytes(base64.b64decode(value))
    assert Credentials(tmp_path).process == ProcessIdentity(made["metadata"]["uid"], "client", 0)
    kwok_plane.api.delete(f"{ALONE}/open")


def _of(job: OneJob, part: str) -> dict[str, bytes]:
    return {f"{part}/{key}": value for key, value in job.secret(part).items()}


def _public(key: bytes) -> object:
    return load_pem_private_key(key, None).public_key()
