"""Any valid job survives being written and read; every field is described; every rule has a manifest that breaks it."""

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from asyncflow.api.base import Quantity, Spec
from asyncflow.api.check import fields, inspect, model_of, place_of
from asyncflow.api.document import parse
from asyncflow.api.job import RLJob
from asyncflow.api.load import KINDS, to_yaml
from asyncflow.api.placement import PROFILES, counted
from asyncflow.api.status import DriverStatus

texts = st.text(max_size=40)
options = st.dictionaries(texts, st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts, max_size=4)
seeds = st.integers(0, 2**31 - 1)
fractions = st.floats(0, 1)
quantities = st.builds("{}{}".format, st.integers(1, 4096), st.sampled_from(["Mi", "Gi", "G", "Ti"]))


def mapping(**parts: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    """Each key may be there or not."""
    return st.fixed_dictionaries({}, optional=parts)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, object]:
    replicas = draw(st.integers(1, 50))
    steps = draw(st.integers(1, 10_000))
    schedule = draw(
        st.sampled_from(
            [
                {},
                {"mode": "sync"},
                {"mode": "sync", "requireBatches": 1, "deterministic": True},
                {"mode": "periodic", "update": "sync"},
                {"mode": "async", "update": "delayed", "swapAt": "quota", "maxStaleness": 1},
                {"swapAt": "sequence", "maxStaleness": 3, "stalenessThreshold": 0.5, "maxInflight": 100},
                {"swapAt": "token", "fill": "completion"},
                {"mode": "async", "swapAt": "sequence", "syncEvery": 4, "maxStaleness": 4},
            ]
        )
    )
    profile = draw(st.sampled_from(list(PROFILES)))
    accelerator = {"profile": profile, "count": draw(st.sampled_from(PROFILES[profile].gang_counts))}
    name = "transformers" if profile == "cpu" else "a-third-partys"
    return {
        "model": {"source": draw(st.text(min_size=1, max_size=60))},
        "data": {
            "train": {
                "source": "gym://chain_sum",
                "config": draw(options),
                "seed": draw(seeds),
                "template": draw(texts) + "{question}",
                "chat": True,
                "system": draw(texts),
            },
            "eval": {"source": "gym://chain_sum", "size": draw(st.integers(1, 1000))},
        },
        "reward": {"function": draw(st.sampled_from(["task", "gym", "my.module:judge"]))},
        "algorithm": draw(
            st.fixed_dictionaries(
                {"steps": st.just(steps)},
                optional={
                    "groupSize": st.integers(2, 64),
                    "learningRate": st.floats(1e-9, 1),
                    "warmupSteps": st.integers(0, steps),
                    "betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(list),
                    "clip": mapping(low=st.floats(0, 0.9), high=fractions, dual=st.floats(1.5, 9)),
                    "kl": mapping(coefficient=fractions, estimator=st.sampled_from(["k2", "k3", "k3+"])),
                    "seed": seeds,
                },
            )
        ),
        "sampling": {"maxTokens": draw(st.integers(1, 512)), "temperature": draw(st.floats(0.1, 2))},
        "schedule": schedule,
        "rollout": {
            "replicas": replicas,
            "minReplicas": draw(st.integers(0, replicas)),
            "maxReplicas": draw(st.integers(replicas, 100)),
            "accelerator": accelerator,
            "engine": {"name": name} | draw(mapping(slots=st.integers(1, 256), options=options)),
        },
        "trainer": {"replicas": draw(st.integers(1, 8)), "accelerator": accelerator},
        "transferQueue": {"bytesPerUnit": "64Gi", "storageUnits": draw(st.integers(1, 8))},
        "template": draw(mapping(env=st.just([{"name": "A", "value": draw(texts)}]), podSpec=options)),
        "storage": {"ledger": draw(mapping(claim=quantities.map(lambda size: {"size": size})))},
        "suspend": draw(st.booleans()),
    }


@given(spec=specs())
@settings(max_examples=60, deadline=None)
def test_model_to_yaml_to_model(spec: dict[str, object]) -> None:
    manifest = {"apiVersion": "asyncflow.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "any"}, "spec": spec}
    job, problems = inspect(RLJob, manifest)
    assert not problems
    assert job is not None
    again, problems = inspect(RLJob, parse(to_yaml(job), source="again").data)
    assert not problems
    assert again == job


def models(root: type[Spec]) -> Iterator[type[Spec]]:
    yield root
    for annotation in fields(root).values():
        if (part := model_of(annotation)) is not None:
            yield from models(part)


ALL = {model.__name__: model for kind in (*KINDS.values(), DriverStatus) for model in models(kind)}


@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_every_model_and_field_is_described(model: type[Spec]) -> None:
    assert model.__doc__
    for name, field in model.model_json_schema()["properties"].items():
        assert field.get("description", "").endswith("."), f"{model.__name__}.{name}"


@pytest.mark.parametrize("model", ALL.values(), ids=ALL)
def test_rules_and_frozen_fields_name_attributes_that_exist(model: type[Spec]) -> None:
    for reads in [read for rule in model.rules for read in rule.reads] + [each.reads for each in model.frozen_fields]:
        here = model
        for attribute in reads.split("."):
            assert attribute in here.model_fields, f"{model.__name__}.{reads}"
            here = model_of(here.model_fields[attribute].annotation) or here


def test_every_rule_is_broken_by_a_manifest_of_the_corpus() -> None:
    corpus = [file.read_text() for file in (Path(__file__).parent / "bad").glob("*.yaml")]
    blamed = {re.sub(r"\[\d+\]", "", place) for text in corpus for place in re.findall(r"# refused: (\S+)", text)}
    for model in ALL.values():
        for rule in model.rules:
            tail = ".".join(place_of(rule.reads[0]))
            assert any(place == tail or place.endswith(f".{tail}") for place in blamed), f"{model.__name__}: {tail}"


@pytest.mark.parametrize(
    ("written", "amount"),
    [("256Mi", 256 << 20), ("1Gi", 1 << 30), ("2G", 2 * 10**9), ("1.5Ki", 1536), ("500m", Decimal("0.5")), (7, 7)],
)
def test_quantities_are_exact(written: str | int, amount: int | Decimal) -> None:
    quantity = TypeAdapter(Quantity).validate_python(written)
    assert quantity.amount == amount
    assert quantity == str(written)


@pytest.mark.parametrize(
    "written", ["", "Mi", "-1", "1e3", "256 Mi", "256MB", "1,5Gi", "٣Mi", "1Mi\n", True, 1.5, None]
)
def test_what_is_no_quantity(written: object) -> None:
    with pytest.raises(ValidationError, match="quantity"):
        TypeAdapter(Quantity).validate_python(written)


def test_the_driver_answers_what_the_design_lists() -> None:
    listed = (
        "attempt phase step steps reward eval tokensPerSecond etaSeconds lastStepAt stepP95 staleness version queue "
        "trainerWaitShare rollouts checkpoint waitingFor desiredRollouts"
    )
    answered = DriverStatus().model_dump(mode="json")
    assert set(listed.split()) <= set(answered)
    assert set(answered["staleness"]) == {"start", "end", "mean"}
    assert set(answered["queue"]) == {"ready", "leased", "staged", "bytes", "limit"}


def test_a_reader_passes_over_what_a_newer_driver_added() -> None:
    assert DriverStatus.model_validate({"step": 3, "novelty": 1}).step == 3


def test_a_gang_count_is_a_legal_count() -> None:
    for name, facts in PROFILES.items():
        assert set(facts.gang_counts) <= set(facts.legal_counts), name
        assert bool(facts.resource) == (0 not in facts.legal_counts), name
    assert PROFILES["ascend-a3"].legal_counts == (1, 2, 4, 6, 8, 10, 12, 14, 16)
    assert counted(PROFILES["ascend-a2"].legal_counts) == "1 to 8"
