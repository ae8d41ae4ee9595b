"""The pod of a publisher, and what is beside it."""

from pathlib import Path
from typing import Any

import pytest

from asyncflow.api.load import load
from asyncflow.api.weights import WeightSync
from asyncflow_operator.desired import Desired
from asyncflow_operator.observed import Manifest, Owner, SyncState


def state(**spec: Any) -> SyncState:
    sync = WeightSync.model_validate({"metadata": {"name": "fleet", "namespace": "team-a"}, "spec": spec})
    return SyncState(owner=Owner(kind="WeightSync", namespace="team-a", name="fleet", uid="uid-w"), sync=sync)


def beside(desired: Desired, kind: str, **spec: Any) -> Manifest:
    return next(each for each in desired.sync_supporting(state(**spec)) if each["kind"] == kind)


CLAIM = {"source": {"model": "pvc://exports/math", "watch": True}, "keep": 3}


def test_it_serves_where_its_followers_dial_and_reads_the_claim(desired: Desired):
    pod = desired.sync_pod(state(**CLAIM), 4)
    (container,) = pod["spec"]["containers"]
    command = container["command"]
    assert command[command.index("role") + 1] == "publisher"
    assert command[command.index("--driver") + 1] == "tcp://*:5571"
    assert command[command.index("--attempt") + 1] == "4"
    assert [port["name"] for port in container["ports"]] == ["rpc", "http"]
    assert {"name": "model", "mountPath": "/mnt/exports", "readOnly": True} in container["volumeMounts"]
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "exports"}} in pod["spec"]["volumes"]
    service = beside(desired, "Service", **CLAIM)
    assert service["metadata"]["name"] == "fleet-publisher"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["ownerReferences"][0]["kind"] == "WeightSync"


def test_its_certificate_is_its_own_and_followers_have_another(desired: Desired):
    owner = state(**CLAIM).owner
    (config,) = [each for each in desired.sync_pod(state(**CLAIM), 0)["spec"]["volumes"] if each["name"] == "config"]
    (secret,) = [each["secret"] for each in config["projected"]["sources"] if "secret" in each]
    assert secret["name"] == desired.secrets(owner).name("publisher") != desired.certificate(owner, "follower")
    assert [item["key"] for item in secret["items"]] == ["ca.crt", "0.crt", "0.key"]


def test_only_its_family_and_its_followers_reach_it(desired: Desired):
    spec = beside(desired, "NetworkPolicy", **CLAIM)["spec"]
    peers = spec["ingress"][0]["from"]
    labels = [peer["podSelector"]["matchLabels"] for peer in peers]
    assert labels == [{"asyncflow.dev/weights": "fleet"}, {"asyncflow.dev/follows": "fleet"}]
    watching = spec["ingress"][1]
    assert [port["port"] for port in watching["ports"]] == ["http"]


def test_it_and_its_followers_read_the_manifest(desired: Desired, tmp_path: Path):
    spec = CLAIM | {"follower": {"engine": {"name": "vllm"}, "maxLength": 1024}}
    file = tmp_path / "job.yaml"
    file.write_text(beside(desired, "ConfigMap", **spec)["data"]["job.yaml"])
    sync = load(file)
    assert isinstance(sync, WeightSync)
    assert sync.spec == state(**spec).sync.spec
    assert sync.metadata.uid == "uid-w"


def test_its_pod_is_as_the_user_says(desired: Desired):
    publisher = {
        "resources": {"cpu": "2", "memory": "8Gi"},
        "template": {"image": "mine:1", "env": [{"name": "HF_HOME", "value": "/cache"}]},
    }
    (container,) = desired.sync_pod(state(**CLAIM, publisher=publisher), 0)["spec"]["containers"]
    assert container["image"] == "mine:1"
    assert container["resources"]["limits"]["memory"] == str(8 << 30)
    assert {"name": "HF_HOME", "value": "/cache"} in container["env"]


def test_one_that_follows_a_job_has_no_pod(desired: Desired):
    with pytest.raises(ValueError, match="publishes no model"):
        desired.sync_pod(state(source={"job": "math"}), 0)
