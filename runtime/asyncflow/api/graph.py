"""The graph of a job's tasks: the columns that each reads and writes, its order of rows, and the role that runs it.

    train:  prompt_ids, task ─> rollout ─> response, reward ─> [users' tasks] ─> advantage ─> train
                                                    └────────> [reference] ────────────────> train
    eval:   prompt_ids, task ─> rollout ─> response, reward ─> score

If the reward is a role of its own, it follows rollout in both partitions and writes ``reward``.

A critic, inside the trainer or as a role of its own, works next to ``train`` and is not a task: the values of a sample
must come from the critic as it is immediately before the step that trains the sample, and that step is known only when
its rows are claimed. Values computed when the response arrives would be stale by then.

Other modules derive from this graph the tasks that the queue's controller declares (``asyncflow.driver.tasks``), the
edges and the drawing of ``asyncflow plan``, and the errors that ``validate`` reports. Users' tasks run between rollout
and advantage, so that the driver handles their failures together with failures of rewards; the reference runs in
parallel to them. A task without a function is run by the user's own process, a client. With an environment a response
also has a loss mask.

Invariants: the graph is a pure function of the manifest. In a graph without ``flaws`` each column has one writer, every
column that is read is written, the tasks have an order in which each reads only columns of earlier tasks, and each has
a process to run it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from asyncflow.api.base import Flaw
from asyncflow.api.names import CLIENT, EVAL, LOSS_MASK, TRAIN, RoleName, task_role

if TYPE_CHECKING:
    from asyncflow.api.job import RLJobSpec

CRITIC: Final = "critic"
"""Name of the critic, and of its role."""
REFERENCE: Final = "reference"
"""Name of the task of the reference model, and of its role."""
REWARD: Final = "reward"
"""Name of the column of rewards; also of the task and the role, if the reward is a role of its own."""
ADVANTAGE: Final = "advantage"
"""Name of the driver's task, and of the column that it writes; some algorithms give the column another name."""
REF_LOGPROBS: Final = "ref_logprobs"
"""Column of the reference model's log-probs, one for each response token."""
PROMPT: Final = ("prompt_ids", "task")
RESPONSE: Final = ("response_ids", "logprobs", "versions", REWARD)
DRIVER_LEASE_S: Final = 10.0
"""Lease of the driver's tasks. It is short because a restarted driver has to wait until it ends."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of one partition.

    reads: columns that make a row ready for the task; writes: columns that it adds; role, replicas: the role that runs
    it, and the number of its processes; gang: whether all ranks of the trainer claim the rows together; groups: whether
    it claims whole groups only; order: the order in which it claims rows (``asyncflow.flow.selection``); shared_tokens:
    see ``TaskSpec`` of the queue; lease_s: seconds until a lease ends; place: the field of the job's spec that
    describes the task, () for a task that every job has.
    """

    partition: str
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    role: RoleName
    replicas: int
    gang: bool = False
    groups: bool = False
    order: str = "fifo"
    shared_tokens: bool = False
    lease_s: float = DRIVER_LEASE_S
    place: tuple[str | int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Companion:
    """A model that a task queries for each micro-batch and that is trained with it; it claims no rows of the queue.

    task: the task that queries it; reads: columns of a query; writes: columns of the reply; role: the role in whose
    process it is; when: the state of the model in which it replies, as a phrase.
    """

    name: str
    task: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    role: RoleName
    when: str

    @property
    def inside(self) -> bool:
        """Return whether the model is in the process of the task that queries it."""
        return self.role != self.name


@dataclass(frozen=True, kw_only=True)
class JobGraph:
    """The tasks of a job.

    sources: the columns with which the driver creates rows, by partition; companions: the companions of training tasks.
    """

    sources: Mapping[str, tuple[str, ...]]
    tasks: tuple[Task, ...]
    companions: tuple[Companion, ...] = ()

    def of(self, partition: str) -> tuple[Task, ...]:
        """Return the tasks of a partition."""
        return tuple(task for task in self.tasks if task.partition == partition)

    def writer(self, partition: str, column: str) -> Task | None:
        """Return the task that writes a column; None if the driver creates it, or if it has no writer."""
        return next((task for task in self.of(partition) if column in task.writes), None)

    def before(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks that write the columns that ``task`` reads, each once."""
        found = (self.writer(task.partition, column) for column in task.reads)
        return tuple(dict.fromkeys(one for one in found if one is not None))

    def companions_of(self, task: Task) -> tuple[Companion, ...]:
        """Return the companions of a task."""
        return tuple(one for one in self.companions if (TRAIN, one.task) == (task.partition, task.name))

    def layers(self, partition: str) -> list[list[Task]]:
        """Return the tasks in layers: a task reads only columns of earlier layers. Tasks in a cycle are left out."""
        left, layers, done = list(self.of(partition)), [], set[str]()
        while layer := [task for task in left if all(one.name in done for one in self.before(task))]:
            layers.append(layer)
            done |= {task.name for task in layer}
            left = [task for task in left if task not in layer]
        return layers


def graph_of(spec: RLJobSpec, *, decided: str = ADVANTAGE, critic: bool = False) -> JobGraph:
    """Return the graph that a manifest describes, even if it has flaws.

    decided: the column that the driver writes for a sample that is to be trained (``Algorithm.writes``); critic:
    whether the algorithm has a critic.
    """
    own = [_users(spec, index) for index in range(len(spec.tasks))]
    written = tuple(column for task in own for column in task.writes)
    mask = (LOSS_MASK,) if spec.environment is not None else ()
    rollout, judged, reference = _rollout(spec, mask), _judged(spec, mask), _reference(spec)
    extra = tuple(column for task in reference for column in task.writes)
    tasks = (
        *(rollout, *judged, *own, *reference),
        Task(
            partition=TRAIN,
            name=ADVANTAGE,
            reads=(REWARD, *written),
            writes=(decided,),
            role="driver",
            replicas=1,
            groups=True,
        ),
        Task(
            partition=TRAIN,
            name="train",
            reads=("prompt_ids", *RESPONSE, *mask, *extra, *written, decided),
            role="trainer",
            replicas=spec.trainer.replicas,
            gang=True,
            order="key" if spec.schedule.whole_steps else "fifo",
            shared_tokens=spec.trainer.backend.packing == "shared-prompt",
        ),
        *(replace(task, partition=EVAL) for task in (rollout, *judged)),
        Task(partition=EVAL, name="score", reads=(REWARD,), role="driver", replicas=1),
    )
    companions = (_critic(spec, mask),) if critic else ()
    return JobGraph(sources={TRAIN: PROMPT, EVAL: PROMPT}, tasks=tasks, companions=companions)


def trained_columns(spec: RLJobSpec) -> tuple[str, ...]:
    """Return the columns that the trainer reads in addition to the columns that it reads in every job."""
    mask = (LOSS_MASK,) if spec.environment is not None else ()
    written = (column for task in graph_of(spec).of(TRAIN) if task.place for column in task.writes)
    return (*mask, *(column for column in written if column not in RESPONSE))


def flaws(graph: JobGraph) -> Iterator[Flaw]:
    """Yield the errors of a graph; none if it can run."""
    for partition, sources in graph.sources.items():
        tasks = graph.of(partition)
        yield from _duplicate_names(tasks)
        yield from _writers(tasks, sources)
        known = {*sources, *(column for task in tasks for column in task.writes)}
        for task in tasks:
            for column in task.reads:
                if column not in known:
                    yield _flaw(
                        task,
                        "reads",
                        f"the task {task.name} reads the column {column!r}, which no task writes",
                        f"Read some of the columns {', '.join(sorted(known))}",
                    )
        in_order = {task.name for layer in graph.layers(partition) for task in layer}
        cycle = [task for task in tasks if task.name not in in_order]
        own = [task for task in cycle if task.place]
        if cycle:
            names = ", ".join(task.name for task in cycle)
            blamed = own[0] if own else cycle[0]
            fix = "Read only columns that earlier tasks write; users' tasks come before advantage"
            yield _flaw(blamed, "reads", f"the tasks {names} wait for each other", fix)


def _duplicate_names(tasks: Sequence[Task]) -> Iterator[Flaw]:
    counts = Counter(task.name for task in tasks)
    seen: set[str] = set()
    for task in tasks:
        if task.name in seen:
            yield _flaw(task, "name", f"two tasks are called {task.name!r}", "Choose another name")
        seen.add(task.name)
    for task in tasks:
        if _is_users(task) and task.name in RESERVED and counts[task.name] == 1:
            yield _flaw(task, "name", f"{task.name!r} is the name of a task of every job", "Choose another name")


def _writers(tasks: Sequence[Task], sources: Sequence[str]) -> Iterator[Flaw]:
    writer = dict.fromkeys(sources, "the driver")
    for task in sorted(tasks, key=_is_users):
        for column in task.writes:
            if column in writer:
                why = f"the column {column!r} has two writers: {writer[column]} and the task {task.name}"
                yield _flaw(task, "writes", why, "Rename the column, so that one task writes it")
            writer.setdefault(column, f"the task {task.name}")


def _is_users(task: Task) -> bool:
    return task.place[:1] == ("tasks",)


RESERVED: Final = ("rollout", REFERENCE, REWARD, ADVANTAGE, "train", "score")
"""Names of built-in tasks."""


def _flaw(task: Task, field: str, why: str, fix: str) -> Flaw:
    place = (*task.place, field) if task.place else ("tasks",)
    return Flaw(place=place, why=why, fix=fix)


def _rollout(spec: RLJobSpec, mask: tuple[str, ...]) -> Task:
    return Task(
        partition=TRAIN,
        name="rollout",
        reads=PROMPT,
        writes=tuple(column for column in (*RESPONSE, *mask) if column != REWARD or spec.reward.role is None),
        role="rollout",
        replicas=max(1, spec.rollout.max_replicas),
        groups=True,
        lease_s=spec.rollout.lease_seconds,
    )


def _judged(spec: RLJobSpec, mask: tuple[str, ...]) -> list[Task]:
    if (judge := spec.reward.role) is None:
        return []
    judged = Task(
        partition=TRAIN,
        name=REWARD,
        reads=("task", "response_ids", *mask),
        writes=(REWARD,),
        role=REWARD,
        replicas=judge.replicas,
        groups=judge.groups,
        order=judge.order,
        lease_s=judge.lease_seconds,
        place=("reward", "role"),
    )
    return [judged]


def _reference(spec: RLJobSpec) -> list[Task]:
    if (reference := spec.reference) is None:
        return []
    computed = Task(
        partition=TRAIN,
        name=REFERENCE,
        reads=("prompt_ids", "response_ids"),
        writes=(REF_LOGPROBS,),
        role=REFERENCE,
        replicas=reference.replicas,
        order=reference.order,
        lease_s=reference.lease_seconds,
        place=("reference",),
    )
    return [computed]


def _critic(spec: RLJobSpec, mask: tuple[str, ...]) -> Companion:
    apart = spec.critic is not None and spec.critic.role is not None
    return Companion(
        name=CRITIC,
        task="train",
        reads=("prompt_ids", "response_ids", *mask, "returns"),
        writes=("values",),
        role=CRITIC if apart else "trainer",
        when="as before the step",
    )


def _users(spec: RLJobSpec, index: int) -> Task:
    task = spec.tasks[index]
    return Task(
        partition=TRAIN,
        name=task.name,
        reads=task.reads,
        writes=tuple(column.name for column in task.writes),
        role=CLIENT if task.function is None else task_role(task.name),
        replicas=task.replicas,
        groups=task.groups,
        order=task.order,
        lease_s=task.lease_seconds,
        place=("tasks", index),
    )
