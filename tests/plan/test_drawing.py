"""The drawing of a job's tasks: no box covers another, no line crosses one, and every column is named."""

import io
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from asyncflow.algorithms.base import algorithm_of
from asyncflow.api.load import load_job
from asyncflow.plan import JobPlan, plan
from asyncflow.plan.drawing import svg, text

MANIFEST = """
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: drawn}
spec:
  model: {source: "tiny://reverse-digits"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  algorithm: {steps: 3, kl: {coefficient: 0.1}}
  sampling: {maxTokens: 8}
"""
TASKS = """tasks=[
  {name: a, function: 'm:f', reads: [response_ids], writes: [{name: x}], replicas: 3},
  {name: b, function: 'm:f', reads: [task, x, logprobs], writes: [{name: w}], order: longest},
  {name: c, function: 'm:f', reads: [x, reward], writes: [{name: z}, {name: v}]}]"""
PPO = ("algorithm.name=ppo", "reference={}")
Box = tuple[float, float, float, float]


def planned(*overrides: str) -> JobPlan:
    job = load_job(io.StringIO(MANIFEST), overrides)
    algorithm = algorithm_of(job.spec)
    return plan(job, decided=algorithm.writes, critic=algorithm.critic)


def boxes_and_points(drawing: str) -> tuple[list[Box], list[list[tuple[float, float]]]]:
    root = ElementTree.fromstring(drawing)
    tag = "{http://www.w3.org/2000/svg}"
    boxes = [
        (float(box.get("x", 0)), float(box.get("y", 0)), float(box.get("width", 0)), float(box.get("height", 0)))
        for box in root.iter(f"{tag}rect")
        if box.get("rx")
    ]
    paths = [path.get("d", "") for path in root.iter(f"{tag}path") if path.get("marker-end")]
    return boxes, [[(float(x), float(y)) for x, y in re.findall(r"(-?\d+),(-?\d+)", path)] for path in paths]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("reference={}",),
        (TASKS,),
        (TASKS, "reference={replicas: 2}"),
        (TASKS, *PPO),
        (*PPO, "critic.role={}", "environment={function: calculator}"),
    ],
)
def test_boxes_lie_apart_and_lines_beside_them(overrides: tuple[str, ...]) -> None:
    job = planned(*overrides)
    boxes, lines = boxes_and_points(svg(job, "train"))
    assert len(boxes) == 1 + len(job.graph.of("train")) + len(job.graph.companions)
    for number, (x, y, width, height) in enumerate(boxes):
        for left, top, *_ in boxes[:number]:
            assert abs(left - x) >= width or abs(top - y) >= height
        for line in lines:
            inside = [(px, py) for px, py in line if x < px < x + width and y < py < y + height]
            assert not inside
            level = [(a, b) for a, b in pairwise(line) if a[1] == b[1]]
            assert not [a for a, b in level if y < a[1] < y + height and a[0] <= x and b[0] >= x + width]


def test_it_names_every_task_and_column() -> None:
    drawing = svg(planned(TASKS, "reference={replicas: 2}"), "train")
    for word in ("rollout x 1", "task-a x 3", "reference x 2", "rows, longest", "ref_logprobs", "advantage"):
        assert word in drawing
    assert drawing == svg(planned(TASKS, "reference={replicas: 2}"), "train")


@pytest.mark.parametrize(("more", "where"), [((), "inside trainer"), (("critic.role={}",), "critic x 1")])
def test_the_critic_stands_beside_the_task_that_asks_it(more: tuple[str, ...], where: str) -> None:
    job = planned(*PPO, *more)
    tree = text(job, "train")
    at = next(number for number, line in enumerate(tree) if "─ train [" in line)
    assert tree[at + 1].strip() == f"⇄  critic [{where}] ─> values  (as before the step)"
    assert len(tree) == at + 2
    drawing = svg(job, "train")
    boxes, lines = boxes_and_points(drawing)
    (left, top, width, height), below = boxes[-2:]
    assert (below[0], below[1] > top + height) == (left, True), "the critic's box is the one below that of train"
    two_way = [line for line in lines if line[0][0] == line[-1][0]]
    assert len(two_way) == 1
    assert (two_way[0][0][1], two_way[0][-1][1]) == (top + height, below[1])
    assert left < two_way[0][0][0] < left + width
    for word in (f">{where}<", "as before the step", "↓ prompt_ids, response_ids", "↑ values", "marker-start"):
        assert word in drawing
    assert "critic" not in " ".join(text(job, "eval")) + svg(job, "eval")


def test_a_job_without_critic_shows_none() -> None:
    job = planned(TASKS)
    assert "critic" not in " ".join(text(job, "train")) + svg(job, "train")


def test_the_tree_has_each_task_once() -> None:
    lines = text(planned(TASKS), "train")
    assert lines[:3] == [
        "train: prompt_ids, task",
        "└─ rollout [rollout x 1] ─> response_ids, logprobs, versions, reward",
        "   └─ a [task-a x 3] ─> x",
    ]
    assert [sum(f"─ {name} [" in line for line in lines) for name in ("a", "b", "c", "advantage", "train")] == [1] * 5
