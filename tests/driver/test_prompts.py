"""No row holds more than the manifest's bound counts for it: inputs are refused, outputs are what the tasks write."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.job import RLJobSpec
from asyncflow.api.load import load_job
from asyncflow.data.base import Prompt
from asyncflow.data.prompter import Prompter, PromptFormat
from asyncflow.driver.dispatch import PromptColumns
from asyncflow.driver.tasks import outputs_of, tasks_of
from asyncflow.errors import ManifestError
from asyncflow.flow.admission import InFlight, admission_of, admit
from asyncflow.rewards import wire
from asyncflow.rewards.wire import RewardResult
from asyncflow.rollout.engines.base import Completion
from asyncflow.rollout.job import RolloutSettings, SampleOutcome, columns

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"


def spec(*overrides: str) -> RLJobSpec:
    return load_job(EXAMPLE, list(overrides)).spec


def columns_of(wanted: RLJobSpec, prompt: Prompt) -> PromptColumns:
    letters = SimpleNamespace(encode=lambda text, **_: list(range(len(text))))
    source = SimpleNamespace(prompt=lambda serial: prompt)
    prompter = Prompter(source, letters, PromptFormat())  # type: ignore[arg-type]
    return PromptColumns.of(wanted, prompter=prompter, what="prompt")


@pytest.mark.parametrize(
    ("prompt", "where", "words"),
    [
        (Prompt(question="q" * 17), "spec.sampling.maxPromptTokens", "prompt 3 has 17 tokens, more than 16"),
        (Prompt(question="q", answer="a" * 300), "spec.data.maxTaskBytes", r"prompt 3 has 3\d\d bytes of task"),
    ],
)
def test_a_prompt_larger_than_the_manifest_says_is_refused(prompt: Prompt, where: str, words: str) -> None:
    with pytest.raises(ManifestError, match=words) as refused:
        columns_of(spec("data.maxTaskBytes=256"), prompt).encode(3)
    assert refused.value.where == where


def test_what_tasks_write_is_what_the_bound_counts() -> None:
    wanted = spec()
    written = {column for task in tasks_of(wanted) for column in task.writes}
    assert written | {"details"} == wanted.output_bytes.keys()


def test_where_the_trainer_makes_advantages_the_driver_writes_outcomes() -> None:
    wanted = spec("algorithm.name=ppo")
    tasks = {task.name: task for task in tasks_of(wanted)}
    assert tasks["advantage"].writes == ["outcome"]
    assert tasks["train"].needs[-1] == "outcome"
    assert outputs_of(wanted).keys() ^ wanted.output_bytes.keys() == {"outcome", "advantage"}
    assert sum(outputs_of(wanted).values()) == sum(wanted.output_bytes.values())


def test_advantages_of_turns_have_the_room_of_as_many_turns_as_there_may_be() -> None:
    settings = ["environment={function: calculator, maxTurns: 5}", "reward.function=task"]
    assert outputs_of(spec(*settings))["advantage"] == 4
    assert outputs_of(spec(*settings, "algorithm.credit=turn"))["advantage"] == 4 * 5


def test_the_longest_response_is_within_what_was_reserved() -> None:
    wanted = spec()
    length = wanted.sampling.max_tokens
    completion = Completion(
        ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int64),
        finish="length",
    )
    outcome = SampleOutcome(
        job=SimpleNamespace(), completion=completion, reward=RewardResult(value=1.0, details=bytes(wire.MOST_DETAILS))
    )  # type: ignore[arg-type]
    settings = RolloutSettings(temperature=1.0, max_tokens=length, stop_ids=(), seed=0)
    written = {name: column.values.nbytes for name, column in columns([outcome], settings=settings).items()}
    assert written | {"advantage": 4} == wanted.output_bytes


@given(
    every=st.integers(1, 5),
    batch=st.integers(1, 8),
    staleness=st.integers(2, 6),
    sync_every=st.integers(1, 2),
    threshold=st.floats(0, 3),
    schedule=st.sampled_from(["mode=sync", "mode=periodic", "swapAt=quota", "swapAt=sequence", "swapAt=token"]),
    units=st.integers(1, 4),
    evaluated=st.booleans(),
)
def test_what_admission_lets_out_between_two_checkpoints_fits(
    every: int,
    batch: int,
    staleness: int,
    sync_every: int,
    threshold: float,
    schedule: str,
    units: int,
    evaluated: bool,
) -> None:
    """The last commit was at step 0; all up to the next checkpoint are published, and all that may go out is out."""
    many = [f"schedule.maxStaleness={staleness}", f"schedule.stalenessThreshold={threshold}"]
    wanted = spec(
        f"schedule={{{schedule.replace('=', ': ')}}}",
        f"storage.checkpoints.every={every}",
        f"algorithm.promptsPerStep={batch}",
        f"transferQueue.storageUnits={units}",
        *([*many, f"schedule.syncEvery={sync_every}"] if schedule == "swapAt=sequence" else []),
        *([] if evaluated else ["evaluation=null"]),
    )
    published, dispatched = every, 0
    while room := admit(admission_of(wanted), InFlight(published=published, dispatched=dispatched, running=0)):
        dispatched += room
    row = 4 * wanted.sampling.max_prompt_tokens + wanted.data.max_task_bytes + sum(wanted.output_bytes.values())
    group = row * max(wanted.algorithm.group_size, wanted.evaluation.group_size if wanted.evaluation else 0)
    training = dispatched * wanted.algorithm.group_size * row
    assert training + units * max(group, 1 << 20) <= wanted.bytes_of_interval
