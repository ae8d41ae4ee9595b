"""The flow of a job as a graph: what follows from a manifest, and which graphs are refused."""

import io

import pytest

from asyncflow.api.graph import flaws, graph_of, trained_columns
from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job
from asyncflow.api.names import EVAL, TRAIN
from asyncflow.api.rewards import MOST_DETAILS
from asyncflow.driver.tasks import tasks_of
from asyncflow.errors import ManifestError
from asyncflow.plan import plan

MANIFEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: graph}
spec:
  model: {source: "tiny://reverse-digits"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  algorithm: {steps: 3, kl: {coefficient: 0.1}}
  sampling: {maxTokens: 8}
"""


def job(*overrides: str) -> RLJob:
    return load_job(io.StringIO(MANIFEST), overrides)


def task(name: str, *, reads: str, writes: str, more: str = "") -> str:
    return f"{{name: {name}, function: 'm:f', reads: [{reads}], writes: [{{name: {writes}}}]{more}}}"


def tasks(*written: str) -> str:
    return f"tasks=[{', '.join(written)}]"


def test_a_job_without_tasks_of_its_own_has_those_of_every_job() -> None:
    graph = graph_of(job().spec)
    assert [[one.name for one in layer] for layer in graph.layers(TRAIN)] == [["rollout"], ["advantage"], ["train"]]
    assert [[one.name for one in layer] for layer in graph.layers(EVAL)] == [["rollout"], ["score"]]
    assert not list(flaws(graph))
    assert trained_columns(job().spec) == ()


def test_the_reward_as_a_role_stands_behind_rollouts_in_both_partitions() -> None:
    spec = job("reward.role={replicas: 3, groups: true, order: longest}", "environment={function: calculator}").spec
    graph = graph_of(spec)
    layers = [["rollout"], ["reward"], ["advantage"], ["train"]]
    assert [[one.name for one in layer] for layer in graph.layers(TRAIN)] == layers
    assert [[one.name for one in layer] for layer in graph.layers(EVAL)] == [["rollout"], ["reward"], ["score"]]
    assert not list(flaws(graph))
    declared = {(one.partition, one.name): one for one in tasks_of(spec)}
    for partition in (TRAIN, EVAL):
        assert declared[partition, "rollout"].writes == ["response_ids", "logprobs", "versions", "loss_mask"]
        reward = declared[partition, "reward"]
        assert (reward.needs, reward.writes) == (["task", "response_ids", "loss_mask"], ["reward"])
        assert (reward.groups, reward.order) == (True, "longest")
    assert trained_columns(spec) == ("loss_mask",), "the trainer is given rewards in every job"
    assert spec.output_bytes == job("environment={function: calculator}").spec.output_bytes


def test_a_task_that_needs_no_reward_does_not_wait_for_the_role() -> None:
    spec = job("reward.role={}", tasks(task("a", reads="response_ids", writes="x"))).spec
    assert [sorted(one.name for one in layer) for layer in graph_of(spec).layers(TRAIN)] == [
        ["rollout"],
        ["a", "reward"],
        ["advantage"],
        ["train"],
    ]


def test_users_tasks_stand_before_the_advantage_and_the_reference_beside_it() -> None:
    spec = job(
        "reference={replicas: 2, order: oldest}",
        tasks(
            task("b", reads="response_ids, x", writes="z"), task("a", reads="task", writes="x", more=", groups: true")
        ),
    ).spec
    graph = graph_of(spec)
    assert [sorted(one.name for one in layer) for layer in graph.layers(TRAIN)] == [
        ["a", "rollout"],
        ["b", "reference"],
        ["advantage"],
        ["train"],
    ]
    declared = {(one.partition, one.name): one for one in tasks_of(spec)}
    assert declared[TRAIN, "advantage"].needs == ["reward", "z", "x"]
    assert {"ref_logprobs", "x", "z", "advantage"} <= set(declared[TRAIN, "train"].needs)
    assert declared[TRAIN, "reference"].order == "oldest"
    assert declared[TRAIN, "a"].groups
    assert declared[EVAL, "score"].needs == ["reward"]
    assert trained_columns(spec) == ("z", "x", "ref_logprobs")


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (
            [task("a", reads="nothing", writes="x")],
            r"spec\.tasks\[0\]\.reads.*task a reads the column 'nothing', which no task",
        ),
        (
            [task("a", reads="reward", writes="logprobs")],
            r"'logprobs' has two writers: the task rollout and",
        ),
        ([task("a", reads="reward", writes="task")], r"'task' has two writers: the driver and the task a"),
        (
            [task("a", reads="reward", writes="x"), task("b", reads="reward", writes="x")],
            r"spec\.tasks\[1\]\.writes.*two writers",
        ),
        ([task("a", reads="z", writes="x"), task("b", reads="x", writes="z")], r"a, b, advantage, train wait for each"),
        ([task("a", reads="advantage", writes="x")], r"wait for each other.*come before advantage"),
        ([task("train", reads="reward", writes="x")], r"two tasks are called 'train'"),
        ([task("reference", reads="reward", writes="x")], r"'reference' is the name of a task of every job"),
        ([task("reward", reads="logprobs", writes="x")], r"'reward' is the name of a task of every job"),
        ([task("a", reads="reward", writes="x", more=", replicas: 0")], r"replicas = 0.*too small"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(written: list[str], says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        job(tasks(*written))


def test_what_tasks_write_has_room_in_the_queue() -> None:
    bare, more = job().spec, job(tasks(task("a", reads="reward", writes="x")), "reference={}").spec
    room = {name: size for name, size in more.output_bytes.items() if name not in bare.output_bytes}
    assert room == {"x": 8 * 8, "ref_logprobs": 4 * 8}
    assert more.bytes_of_interval > bare.bytes_of_interval


def test_the_columns_of_a_sample_have_the_bytes_of_their_dtypes() -> None:
    """Token ids and log-probabilities of 4 bytes, versions of 8, masks of 1; an advantage for each turn."""
    bare = {"response_ids": 32, "logprobs": 32, "versions": 64, "reward": 4, "details": MOST_DETAILS, "advantage": 4}
    assert job().spec.output_bytes == bare
    turns = job("environment={function: calculator, maxTurns: 3}", "algorithm.credit=turn").spec
    assert turns.output_bytes == bare | {"loss_mask": 8, "advantage": 12}


def test_all_that_is_wrong_is_said_at_once() -> None:
    written = [task("a", reads="nothing", writes="x"), task("a", reads="reward", writes="x")]
    with pytest.raises(ManifestError) as refused:
        job(tasks(*written))
    assert str(refused.value).count("spec.tasks") == 3


def test_a_task_without_a_function_is_a_clients_and_no_role_of_the_plan() -> None:
    own = "tasks=[{name: mark, reads: [response_ids], writes: [{name: novelty}]}]"
    made = job(own, "trainer.external=true")
    (mark,) = [one for one in graph_of(made.spec).tasks if one.name == "mark"]
    assert mark.role == "client"
    assert list(made.spec.own_tasks) == ["mark"]
    assert not {role.name for role in plan(made).roles} & {"client", "task-mark", "trainer"}
    assert trained_columns(made.spec) == ("novelty",), "the trainer waits for it"
    with pytest.raises(ManifestError, match=r"needs your own process.*Set trainer\.external: true"):
        job(own)
