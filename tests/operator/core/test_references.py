"""Which custom resources name others, as they come, change and go."""

from model_samples import job_of

from asyncflow.api.job import RLJob
from asyncflow.api.weights import JobWeightsSpec, WeightSync
from asyncflow_operator.references import Key, References

SHARED, FIRST, SECOND = (
    Key(kind, "team", name) for kind, name in (("WeightSync", "shared"), ("RLJob", "first"), ("RLJob", "second"))
)
FLEET = Key("WeightSync", "team", "fleet")


def naming(name: str | None) -> RLJob:
    job = job_of()
    return job.model_copy(update={"spec": job.spec.model_copy(update={"weight_sync": JobWeightsSpec(name=name)})})


def test_whoever_names_an_object_is_found_and_depends_on_the_others_who_do():
    known = References()
    known.note(FIRST, naming("shared"))
    known.note(SECOND, naming("shared"))
    assert known.by(SHARED) == {FIRST, SECOND}
    assert known.around(FIRST) == {SHARED, SECOND}
    known.note(SECOND, naming(None))
    assert known.by(SHARED) == {FIRST}
    known.note(FIRST, None)
    assert known.by(SHARED) == known.around(FIRST) == frozenset()


def test_a_weight_sync_for_followers_depends_on_its_job():
    known = References()
    known.note(FLEET, WeightSync.model_validate({"metadata": {"name": "fleet"}, "spec": {"source": {"job": "first"}}}))
    assert known.around(FIRST) == {FLEET}
    assert known.by(Key("RLJob", "other", "first")) == frozenset()
