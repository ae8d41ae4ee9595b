import pytest

from asyncflow_operator.capacity import amount, free, needs


@pytest.mark.parametrize(
    ("written", "meant"), [("500m", 0.5), ("16", 16.0), ("1536Gi", 1536 * 2.0**30), ("2k", 2000.0), ("what", 0.0)]
)
def test_quantities(written: str, meant: float) -> None:
    assert amount(written) == meant


def container(cpu: str, **more: str) -> dict[str, object]:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


def test_a_pod_needs_its_containers_together_or_its_largest_init_container() -> None:
    spec = {"containers": [container("1"), container("500m")], "initContainers": [container("4")]}
    assert needs(spec) == {"cpu": 4.0, "pods": 1.0}
    spec["initContainers"] = [container("1"), container("250m", restartPolicy="Always")]
    assert needs(spec) == {"cpu": 1.75, "pods": 1.0}
    assert needs(spec | {"overhead": {"cpu": "250m"}})["cpu"] == 2.0


def test_what_is_left_of_nodes_that_take_pods() -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"cpu": "8", "npu": "16"}}
    nodes = [
        {"metadata": {"name": "a"}, "status": ready},
        {"metadata": {"name": "cordoned"}, "status": ready, "spec": {"unschedulable": True}},
        {"metadata": {"name": "lost"}, "status": ready | {"conditions": [{"type": "Ready", "status": "Unknown"}]}},
    ]
    left = list(free(nodes, {"a": {"npu": 4.0}}))
    assert [node.name for node in left] == ["a"]
    assert left[0].free == {"cpu": 8.0, "npu": 12.0}
