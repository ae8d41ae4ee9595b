"""Settings of judging: the reward, the functions that it is the sum of, their processes, and the environment.

Invariant: whoever judges, a rollout or a role of its own (``RewardSpec.role``), a response gets its reward from the
other fields alone.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue, StringConstraints

from asyncflow.api.base import Bytes, Frozen, Name, Options, PluginName, Quantity, Rule, Source, Spec, keyed_by
from asyncflow.api.placement import ResourcesSpec
from asyncflow.api.tasks import RewardRoleSpec

MOST_DETAILS = 2048
"""Most bytes of what reward functions say of a sample beside their rewards."""
MODULE_FUNCTION = r"^([a-z][a-z0-9_]*|[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*)$"


class WorkersSpec(Spec):
    """Size of a process pool that grows while a member is stuck."""

    min: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that are always there, for each process that has responses scored: a rollout, or one of the role."""
    max: Annotated[int, Field(ge=1, le=1024)] = 8
    """Most processes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("min", "max"),
            ok=lambda pool: pool.min <= pool.max,
            cel="self.min <= self.max",
            why="min is above max",
            fix="Give 1 <= min <= max",
        ),
    )


RewardFunctionName = Annotated[str, StringConstraints(pattern=MODULE_FUNCTION, max_length=256)]
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class RewardComponentSpec(Spec):
    """One addend of a reward that is a weighted sum."""

    name: Name
    """Its name in figures and in what is kept of a sample."""
    function: RewardFunctionName
    """Its function, as ``reward.function``."""
    weight: Weight = 1.0
    """Factor of its value in the sum."""
    extractor: PluginName | None = None
    """Extraction of the answer from a response, as ``reward.extractor``, which is meant where this is absent."""
    config: Options | None = None
    """Settings that its function is given."""


class RewardPart(NamedTuple):
    """A function that judges, whichever way the manifest names it. name: "" where it is the only one."""

    name: str
    function: str
    weight: float
    extractor: str
    config: dict[str, JsonValue] | None


class RewardSpec(Spec):
    """Scoring of responses. The function may be foreign code: it runs in a sandbox, in processes that can be killed."""

    function: RewardFunctionName | None = None
    """``task`` (exactly the source's answer), ``gym`` (reasoning-gym's checker, for its prompts only), ``math_verify``,
    ``length`` (a penalty), ``http`` (a server of rewards), ``reward_model`` (sequence classification), or
    ``module:function`` of your own, ``def function(*, response, prompt, answer, meta) -> float``, of a module beside
    the manifest or installed. Absent: ``components``."""
    config: Options | None = None
    """Settings that the function is given, as its argument ``config``."""
    components: Annotated[
        tuple[RewardComponentSpec, ...], Field(max_length=16, json_schema_extra=keyed_by("name"))
    ] = ()
    """Functions whose values are summed up, by their weights, in place of ``function``."""
    extractor: PluginName = "text"
    """Extraction of the answer from a response: ``text`` (all of it), ``last_number``, ``boxed``."""
    min: Annotated[float, Field(ge=-1e15, le=1e15)] = -1e6
    """Least reward; a sample that gets less has none."""
    max: Annotated[float, Field(ge=-1e15, le=1e15)] = 1e6
    """Greatest reward; a sample that gets more has none."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds that one call of a function may take."""
    start_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Seconds that a process may take to load its function, a model included."""
    on_timeout: Literal["zero", "drop"] = "drop"
    """Treatment of a response that was not scored in time: dropped and counted, or reward 0 and counted."""
    max_failed: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a step's samples that may have no reward; beyond it the job pauses. 1: it never does."""
    workers: WorkersSpec = Field(default_factory=WorkersSpec)
    """Size of the pool of processes of each function."""
    batch: Annotated[int, Field(ge=1, le=4096)] = 16
    """Most samples of one call, of a function that takes many of them."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most calls under way at once in one process, of an ``async`` function."""
    memory: Bytes = Quantity("4Gi")
    """Bytes of address space that one process may have, and each that it starts; importing torch takes 3.2 GB. Of
    private memory where the role has devices."""
    processes: Annotated[int, Field(ge=0, le=4096)] = 0
    """Processes that the function may start, per process of the pool: for a reward that runs tests, say."""
    network: bool = False
    """True where the function may open network connections, to a reward server, say. On Kubernetes it also opens the
    egress of the pods of rollouts and of the role."""
    files: Annotated[tuple[Source, ...], Field(max_length=64)] = ()
    """Files and folders that the function may read beside the job's folder and what is installed."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of the container that judges, one in each pod of a rollout, or of the role."""
    role: RewardRoleSpec | None = None
    """Scoring as a role of its own. Absent: each rollout has its own responses scored."""
    shuffle: bool = False
    """Permute rewards within each group, and the lengths that shape them, keyed by the seed: a control, in which
    nothing may be learned."""

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """The functions that judge: the components, or the only function."""
        if self.function is not None:
            return (RewardPart("", self.function, 1.0, self.extractor, self.config),)
        return tuple(
            RewardPart(each.name, each.function, each.weight, each.extractor or self.extractor, each.config)
            for each in self.components
        )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("function", "components"),
            ok=lambda reward: (reward.function is None) == bool(reward.components),
            cel="has(self.function) != (has(self.components) && size(self.components) > 0)",
            why="a response is judged by one function or by components",
            fix="Give one of the two",
        ),
        Rule(
            reads=("components", "config"),
            ok=lambda reward: reward.config is None or not reward.components,
            cel="",  # free settings cannot be seen there
            why="each component has settings of its own",
            fix="Move them into the component that they are for",
        ),
        Rule(
            reads=("components",),
            ok=lambda reward: len({each.name for each in reward.components}) == len(reward.components),
            cel="!has(self.components) || self.components.all(a, self.components.exists_one(b, b.name == a.name))",
            why="two components have the same name",
            fix="Give each its own",
        ),
        Rule(
            reads=("network", "function", "components"),
            ok=lambda reward: reward.network or all(part.function != "http" for part in reward.parts),
            cel="self.network || ((!has(self.function) || self.function != 'http')"
            " && (!has(self.components) || self.components.all(c, c.function != 'http')))",
            why="the function http opens network connections",
            fix="Give network: true",
        ),
        Rule(
            reads=("min", "max"),
            ok=lambda reward: reward.min < reward.max,
            cel="self.min < self.max",
            why="no reward is between min and max",
            fix="Give min < max",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="role", why="samples on their way were scored by who did it before", existence=True),
    )


class EnvironmentSpec(Spec):
    """Environment of episodes: what answers a turn of the model, so that a sample has several turns.

    It may be foreign code: it runs in a sandbox as the reward function does, with the settings of ``spec.reward``.
    """

    function: Annotated[str, StringConstraints(pattern=MODULE_FUNCTION, max_length=256)]
    """``calculator`` (the value of the last ``calc(EXPRESSION)`` of a turn), or ``module:name`` of your own: ``def
    name(*, transcript, prompt, answer, meta, config) -> str | None``, or a class whose ``step(text)`` returns that."""
    max_turns: Annotated[int, Field(ge=2, le=1024)] = 8
    """Most turns of the model in one sample."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds that one answer may take; a sample whose environment takes longer has no reward, as one that is not
    scored in time."""
    config: Options = Field(default_factory=dict)
    """Settings that it is given."""
