import pytest

from asyncflow.api.job import RLJob
from asyncflow.errors import ManifestError
from asyncflow.local.changes import differences

SPEC = {
    "model": {"source": "tiny://reverse-digits"},
    "data": {"train": {"source": "tiny://reverse-digits", "config": {"digits": 4}}},
    "reward": {"function": "task"},
    "algorithm": {"steps": 10},
    "sampling": {"maxTokens": 16},
}


def job(**changes):
    data = {"metadata": {"name": "quickstart"}, "spec": {key: dict(value) for key, value in SPEC.items()}}
    for path, value in changes.items():
        here = data
        *keys, last = path.split("__")
        for key in keys:
            here = here.setdefault(key, {})
        here[last] = value
    return RLJob.model_validate(data)


def test_equal_jobs_differ_in_nothing():
    assert differences(job(), job()) == []


def test_what_may_change_is_told():
    new = job(spec__algorithm__steps=20, spec__rollout={"replicas": 3, "maxReplicas": 3})
    assert {str(each) for each in differences(job(), new)} == {
        "spec.algorithm.steps: 10 -> 20",
        "spec.rollout.replicas: 1 -> 3",
        "spec.rollout.maxReplicas: 1 -> 3",
    }


def test_a_reward_of_its_own_neither_comes_nor_goes_but_may_change():
    with_role = {"spec__reward": {"function": "task", "role": {}}}
    for old, new in ((job(), job(**with_role)), (job(**with_role), job())):
        with pytest.raises(ManifestError, match=r"spec\.reward\.role.*scored in the old place"):
            differences(old, new)
    more = job(spec__reward={"function": "task", "role": {"replicas": 3}})
    assert [str(each) for each in differences(job(**with_role), more)] == ["spec.reward.role.replicas: 1 -> 3"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"metadata__name": "other"}, "metadata.name"),
        ({"spec__model__source": "tiny://other"}, "spec.model.source"),
        ({"spec__data": {"train": {"source": "gym://chain_sum", "config": {"digits": 4}}}}, "spec.data.train.source"),
        ({"spec__data": {"train": {"source": "tiny://reverse-digits", "config": {"digits": 5}}}}, "config.digits"),
        ({"spec__algorithm__groupSize": 4}, "spec.algorithm.groupSize"),
        ({"spec__algorithm__seed": 4}, "spec.algorithm.seed"),
        ({"spec__transferQueue__controllers": 2}, "spec.transferQueue.controllers"),
        ({"spec__algorithm__steps": 9}, "spec.algorithm.steps"),
    ],
)
def test_what_must_not_change_is_refused_by_name(change, named):
    with pytest.raises(ManifestError) as refused:
        differences(job(), job(**change))
    assert named in str(refused.value)
    assert refused.value.where == "--resume"
