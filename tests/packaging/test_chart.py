"""The chart as Helm renders it: what is asked of a cluster, and what is refused before one is asked."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

import chart
from asyncflow.api.names import HTTP_PORT, LABEL_ROLE, MANAGED
from asyncflow_operator.cluster.kinds import BY_NAME, EVENT, LEASE, NODE, REFERRED, Kind
from asyncflow_operator.drivers import LEADERS
from asyncflow_operator.settings import PREFIX, Settings
from chart import CHART, ChartError

Object = dict[str, Any]
Render = Callable[..., list[Object]]

ALL_ON: Object = {
    "metrics": {
        "namespaces": ["monitoring"],
        "serviceMonitor": {"enabled": True},
        "podMonitor": {"enabled": True},
        "rules": {"enabled": True},
    },
    "dashboards": {"enabled": True, "annotations": {"folder": "RL"}},
    "image": {"digest": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
}
NAMESPACED: Object = {"namespaces": ["team-a", "team-b"]}
VARIANTS = {"default": {}, "namespaced": NAMESPACED, "all": ALL_ON, "all namespaced": ALL_ON | NAMESPACED}
SCALED_BY_CLUSTER = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def rendered(request: pytest.FixtureRequest, render: Render) -> list[Object]:
    return render(request.param)


def of(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def rules(objects: list[Object]) -> Iterator[Object]:
    """Yield what the operator may do, users apart."""
    for role in of(objects, "ClusterRole") + of(objects, "Role"):
        if not any(label.startswith("rbac.authorization.k8s.io") for label in role["metadata"]["labels"]):
            yield from role["rules"]


@pytest.mark.usefixtures("render")
def test_lint_finds_nothing() -> None:
    assert "0 chart(s) failed" in chart.helm("lint", str(CHART), "--strict", "--kube-version", chart.KUBERNETES)


@pytest.mark.usefixtures("render")
def test_what_is_made_from_the_chart_is_up_to_date() -> None:
    assert chart.out_of_date() == []


def released(name: str, values: Object | None = None) -> list[Object]:
    text = chart.helm("template", name, str(CHART), "--kube-version", chart.KUBERNETES, values=values or {})
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]


@pytest.mark.parametrize(
    ("release", "override"),
    [("r" * 53, ""), ("r", "r" * 63), ("team.a", ""), ("true", "")],
    ids=["longest", "longest override", "with a dot", "no word"],
)
@pytest.mark.usefixtures("render")
def test_every_name_that_a_release_may_have_is_one_of_a_service(release: str, override: str) -> None:
    (service,) = of(released(release, {"fullnameOverride": override}), "Service")
    assert re.fullmatch("[a-z]([-a-z0-9]{,61}[a-z0-9])?", service["metadata"]["name"])
    assert service["spec"]["selector"]["app.kubernetes.io/instance"] == release


@pytest.mark.usefixtures("render")
def test_a_release_whose_name_cannot_be_one_is_refused_with_what_to_do() -> None:
    with pytest.raises(ChartError, match='"1a-operator" is not a valid name of a Service: choose a release name'):
        released("1a")


def test_the_chart_has_the_version_of_the_package() -> None:
    from asyncflow import __version__

    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == __version__


def test_the_crds_are_those_of_the_repository_and_stay(render: Render) -> None:
    found = {each["metadata"]["name"]: each for each in of(render(), "CustomResourceDefinition")}
    crds = (chart.ROOT / "crds").glob("*.yaml")
    ours = [yaml.load(file.read_text(), Loader=yaml.CSafeLoader) for file in crds]
    assert found.keys() == {each["metadata"]["name"] for each in ours}
    for each in ours:
        assert found[each["metadata"]["name"]]["spec"] == each["spec"]
        assert found[each["metadata"]["name"]]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert of(render({"crds": {"install": False}}), "CustomResourceDefinition") == []


def test_no_rule_says_everything_and_nobody_reads_secrets(rendered: list[Object]) -> None:
    for rule in rules(rendered):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) == {"create", "patch"}


def test_the_operator_may_touch_exactly_the_kinds_that_it_knows(render: Render) -> None:
    def resource(kind: Kind) -> tuple[str, str]:
        return kind.api_version.rpartition("/")[0], kind.plural

    granted = {(group, each) for rule in rules(render()) for group in rule["apiGroups"] for each in rule["resources"]}
    statuses = {("asyncflow.dev", f"{plural}/status") for plural in ("rljobs", "transferqueues", "weightsyncs")}
    statuses |= {("kueue.x-k8s.io", "workloads/status")}
    assert granted == {resource(kind) for kind in (*BY_NAME.values(), *REFERRED, EVENT, LEASE, NODE)} | statuses


def test_users_who_may_view_read_all_subresources_and_editors_scale(render: Render) -> None:
    objects = render()
    roles = {role["metadata"]["name"].rpartition("-")[2]: role["rules"] for role in of(objects, "ClusterRole")}
    allowed = {
        (verb, resource)
        for role in ("view", "edit")
        for rule in roles[role]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        if "/" in resource
    }
    subresources = {
        f"{crd['spec']['names']['plural']}/{subresource}"
        for crd in of(objects, "CustomResourceDefinition")
        for version in crd["spec"]["versions"]
        for subresource in version["subresources"]
    }
    scales = {each for each in subresources if each.endswith("/scale")}
    assert {each for verb, each in allowed if verb == "get"} == subresources
    assert {each for verb, each in allowed if verb == "patch"} == scales


def test_what_is_watched_may_be_listed_and_watched(render: Render) -> None:
    verbs: dict[str, set[str]] = {}
    for rule in rules(render()):
        for resource in rule["resources"]:
            verbs.setdefault(resource, set()).update(rule["verbs"])
    for kind in BY_NAME.values():
        assert ({"list", "watch"} <= verbs[kind.plural]) == (kind.watched != "never"), kind.plural


def test_a_namespaced_operator_has_nothing_of_the_cluster(render: Render) -> None:
    objects = render(NAMESPACED | {"crds": {"install": False}})
    assert {each["kind"] for each in objects} & SCALED_BY_CLUSTER == set()
    granted = {
        each["metadata"]["namespace"] for each in of(objects, "Role") if each["metadata"]["name"].endswith("-jobs")
    }
    assert granted == set(NAMESPACED["namespaces"])


def test_two_replicas_that_avoid_each_other(render: Render) -> None:
    objects = render()
    (deployment,) = of(objects, "Deployment")
    (budget,) = of(objects, "PodDisruptionBudget")
    assert deployment["spec"]["replicas"] == 2
    assert "podAntiAffinity" in deployment["spec"]["template"]["spec"]["affinity"]
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow", "else two that are not ready hold up a drain"
    assert of(render({"replicas": 1}), "PodDisruptionBudget") == []


def test_every_variable_is_a_setting(rendered: list[Object]) -> None:
    (deployment,) = of(rendered, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    named = {variable["name"].removeprefix(PREFIX).lower() for variable in container["env"]}
    assert named <= set(Settings.model_fields)
    assert {name for name, field in Settings.model_fields.items() if field.is_required()} <= named


def test_the_operator_reaches_whatever_it_asks(render: Render) -> None:
    (policy,) = of(render(), "NetworkPolicy")
    asked = [rule for rule in policy["spec"]["egress"] if {"port": HTTP_PORT} in rule["ports"]]
    selectors = [peer["podSelector"] for rule in asked for peer in rule["to"]]
    for role in LEADERS:
        labels = {**MANAGED, LABEL_ROLE: role}
        assert any(selects(selector, labels) for selector in selectors), role
    assert not any(selects(selector, {**MANAGED, LABEL_ROLE: "rollout"}) for selector in selectors)


def selects(selector: Object, labels: Object) -> bool:
    asked = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in asked)
    named = selector.get("matchLabels", {})
    return named.items() <= labels.items() and all(labels.get(each["key"]) in each["values"] for each in asked)


def test_pods_of_the_operator_are_not_taken_for_pods_of_a_job(rendered: list[Object]) -> None:
    (deployment,) = of(rendered, "Deployment")
    assert deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/managed-by"] != "asyncflow-operator"


def test_nothing_needs_the_prometheus_operator_unless_it_is_asked_for(render: Render) -> None:
    assert not [each for each in render() if each["apiVersion"].startswith("monitoring.coreos.com")]
    asked = {each["kind"] for each in render(ALL_ON) if each["apiVersion"].startswith("monitoring.coreos.com")}
    assert asked == {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def test_the_rules_are_those_of_the_file(render: Render) -> None:
    (rule,) = of(render(ALL_ON), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())


def test_a_key_is_made_unless_there_is_one(render: Render) -> None:
    (secret,) = of(render(), "Secret")
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert secret["immutable"]
    assert len(secret["data"]["master.key"]) >= 64
    given = render({"masterKey": {"existingSecret": "mine", "key": "k"}})
    (deployment,) = of(given, "Deployment")
    volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
    assert of(given, "Secret") == []
    assert volumes["master-key"]["secret"]["secretName"] == "mine"
    assert volumes["master-key"]["secret"]["items"] == [{"key": "k", "path": "master.key"}]


def test_a_name_that_yaml_takes_for_a_number_stays_a_name(render: Render) -> None:
    names: Object = {
        "namespaces": ["2024", "on"],
        "masterKey": {"existingSecret": "1e3", "key": "0x1"},
        "serviceAccount": {"name": "7"},
        "priorityClassName": "1",
        "resources": {"requests": {"cpu": 0.5}},
    }
    objects = render(names)
    assert {each["metadata"]["namespace"] for each in of(objects, "Role")} == {"2024", "on", chart.NAMESPACE}
    (deployment,) = of(objects, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    key = next(volume["secret"] for volume in pod["volumes"] if volume["name"] == "master-key")
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("7", "1")
    assert (key["secretName"], key["items"][0]["key"]) == ("1e3", "0x1")
    assert pod["containers"][0]["resources"]["requests"]["cpu"] == 0.5
    assert of(render({"masterKey": {"key": "0x1"}}), "Secret")[0]["data"].keys() == {"0x1"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": "two"}, "replicas"),
        ({"replicas": 0}, "replicas"),
        ({"image": {"tag": "latest"}}, "tag"),
        ({"image": {"digest": "sha256:abc"}}, "digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"repo": "x"}}, "repo"),
        ({"namespaces": "all"}, "namespaces"),
        ({"namespaces": ["Team_A"]}, "namespaces"),
        ({"namespaces": ["a", "a"]}, "namespaces"),
        ({"crds": {"install": "yes"}}, "install"),
        ({"masterKey": {"value": "secret"}}, "value"),
        ({"resources": {"limits": {"memory": "lots"}}}, "memory"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "gpu"),
        ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
        ({"metrics": {"podMonitor": {"interval": "3m"}}}, "interval"),
        ({"networkPolicy": {"apiServerPorts": []}}, "apiServerPorts"),
        ({"rbac": {"clusterAdmin": True}}, "clusterAdmin"),
        ({"workers": 0}, "workers"),
        ({"podLabels": {"app.kubernetes.io/name": "x"}}, "podLabels"),
        ({"dashboards": {"labels": {"helm.sh/chart": "x"}}}, "dashboards"),
        ({"fullnameOverride": "a.b"}, "fullnameOverride"),
        ({"fullnameOverride": "1a"}, "fullnameOverride"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Object, said: str, render: Render) -> None:
    with pytest.raises(ChartError, match=re.escape(said)):
        render(values)


def test_the_schema_knows_every_value_and_nothing_else() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) - {"global"} == set(values)
