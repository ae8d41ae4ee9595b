"""Settings of the reward and of the environment: functions, weights of components, and the processes that run them.

Invariant: a response gets the same reward in a rollout and in a role of its own (``RewardSpec.role``); it depends only
on the other fields.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue

from asyncflow.api.base import (
    Bytes,
    Frozen,
    KnownFunctionName,
    Name,
    Options,
    PluginName,
    Quantity,
    Rule,
    Source,
    Spec,
    keyed_by,
)
from asyncflow.api.placement import ResourcesSpec
from asyncflow.api.tasks import RewardRoleSpec

MOST_DETAILS = 2048
"""Most bytes of the details that reward functions return for a sample in addition to their rewards."""


class WorkersSpec(Spec):
    """Size of a process pool, which grows while a process hangs."""

    min: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that always exist, for each rollout, or for each process of the role."""
    max: Annotated[int, Field(ge=1, le=1024)] = 8
    """Most processes."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            reads=("min", "max"),
            ok=lambda pool: pool.min <= pool.max,
            cel="self.min <= self.max",
            why="min is above max",
            fix="Set 1 <= min <= max",
        ),
    )


Weight = Annotated[float, Field(ge=-1e6, le=1e6)]


class RewardComponentSpec(Spec):
    """One addend of a reward that is a weighted sum."""

    name: Name
    """Name in figures and in stored samples."""
    function: KnownFunctionName
    """Function, as in ``reward.function``."""
    weight: Weight = 1.0
    """Factor of its value in the sum."""
    extractor: PluginName | None = None
    """Extraction of the answer from a response. Absent: ``reward.extractor``."""
    config: Options | None = None
    """Settings that its function receives."""


class RewardPart(NamedTuple):
    """A reward function with its settings, from ``function`` or ``components``. name: "" if it is the only one."""

    name: str
    function: str
    weight: float
    extractor: str
    config: dict[str, JsonValue] | None


class RewardSpec(Spec):
    """Scoring of responses. The function may be untrusted code: it runs in sandboxed processes that can be killed."""

    function: KnownFunctionName | None = None
    """``task`` (compares with the source's answer), ``gym`` (reasoning-gym's checker, for its prompts only),
    ``math_verify``, ``length`` (a penalty), ``http`` (a reward server), ``reward_model`` (sequence classification), or
    your own ``module:function``, ``def function(*, response, prompt, answer, meta) -> float``, of an installed module
    or one in the manifest's folder. Absent: ``components``."""
    config: Options | None = None
    """Settings that the function receives as its argument ``config``."""
    components: Annotated[
        tuple[RewardComponentSpec, ...], Field(max_length=16, json_schema_extra=keyed_by("name"))
    ] = ()
    """Functions whose weighted sum is the reward, in place of ``function``."""
    extractor: PluginName = "text"
    """Extraction of the answer from a response: ``text`` (all of it), ``last_number``, ``boxed``."""
    min: Annotated[float, Field(ge=-1e15, le=1e15)] = -1e6
    """Least valid reward; a lower one counts as no reward."""
    max: Annotated[float, Field(ge=-1e15, le=1e15)] = 1e6
    """Greatest valid reward; a higher one counts as no reward."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds that one call of a function may take."""
    start_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Seconds that a process may take to load its function, including a model."""
    on_timeout: Literal["zero", "drop"] = "drop"
    """Treatment of a response that was not scored in time: it is dropped, or gets reward 0. Both are counted."""
    max_failed: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a step's samples that may have no reward; above it the job pauses. 1: it never does."""
    workers: WorkersSpec = Field(default_factory=WorkersSpec)
    """Size of the process pool of each function."""
    batch: Annotated[int, Field(ge=1, le=4096)] = 16
    """Most samples of one call, for a function that takes several."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most concurrent calls in one process, for an ``async`` function."""
    memory: Bytes = Quantity("4Gi")
    """Bytes of address space of one process, and of each that it starts; importing torch takes 3.2 GB. If the role has
    devices: bytes of private memory."""
    processes: Annotated[int, Field(ge=0, le=4096)] = 0
    """Processes that the function may start, per process of the pool, e.g. to run tests."""
    network: bool = False
    """Allow the function to open network connections, e.g. to a reward server. On Kubernetes it also opens the egress
    of the pods of rollouts and of the role."""
    files: Annotated[tuple[Source, ...], Field(max_length=64)] = ()
    """Files and folders that the function may read in addition to the job's folder and installed packages."""
    resources: ResourcesSpec = Field(default_factory=ResourcesSpec)
    """CPU and memory of the container that scores, one in each pod of a rollout, or of the role."""
    role: RewardRoleSpec | None = None
    """Scoring as a role of its own. Absent: each rollout scores its own responses."""
    shuffle: bool = False
    """Permute rewards, and the lengths that shape them, within each group, keyed by the seed: a control experiment, in
    which the model must not improve."""

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """The reward functions: the components, or the only function."""
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
            why="a reward has either one function or components",
            fix="Set exactly one of function and components",
        ),
        Rule(
            reads=("components", "config"),
            ok=lambda reward: reward.config is None or not reward.components,
            cel="",  # CEL cannot read fields of a preserved unknown object
            why="with components, each component has its own config",
            fix="Move config into the component that reads it",
        ),
        Rule(
            reads=("components",),
            ok=lambda reward: len({each.name for each in reward.components}) == len(reward.components),
            cel="!has(self.components) || self.components.all(a, self.components.exists_one(b, b.name == a.name))",
            why="two components have the same name",
            fix="Choose different names",
        ),
        Rule(
            reads=("network", "function", "components"),
            ok=lambda reward: reward.network or all(part.function != "http" for part in reward.parts),
            cel="self.network || ((!has(self.function) || self.function != 'http')"
            " && (!has(self.components) || self.components.all(c, c.function != 'http')))",
            why="the function http opens network connections",
            fix="Set network: true",
        ),
        Rule(
            reads=("min", "max"),
            ok=lambda reward: reward.min < reward.max,
            cel="self.min < self.max",
            why="no reward can be between min and max",
            fix="Set min < max",
        ),
    )
    frozen_fields: ClassVar[tuple[Frozen, ...]] = (
        Frozen(reads="role", why="unfinished samples were scored in the old place", existence=True),
    )


class EnvironmentSpec(Spec):
    """Environment of episodes, which answers each turn of the model, so that a sample has several turns.

    It may be untrusted code: like the reward function it runs in a sandbox, with the limits of ``spec.reward``.
    """

    function: KnownFunctionName
    """``calculator`` (the value of the last ``calc(EXPRESSION)`` of a turn), or your own ``module:name``: ``def
    name(*, transcript, prompt, answer, meta, config) -> str | None``, or a class whose ``step(text)`` returns that."""
    max_turns: Annotated[int, Field(ge=2, le=1024)] = 8
    """Most turns of the model in one sample."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds that one answer may take; after that the sample is treated as one that was not scored in time."""
    config: Options = Field(default_factory=dict)
    """Settings that the environment receives."""
