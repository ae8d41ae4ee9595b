from hypothesis import given
from hypothesis import strategies as st

from asyncflow.local.lifecycle import LocalReplica, end_stages

ROLES = ["driver", "controller", "storage", "trainer", "rollout", "reference", "reward", "critic"]

REPLICAS = st.sets(st.builds(LocalReplica, st.sampled_from(ROLES), st.integers(0, 3)))


@given(replicas=REPLICAS, within_s=st.floats(0.1, 100))
def test_every_replica_is_in_one_stage_and_all_end_in_time(replicas, within_s):
    found = end_stages(replicas, within_s=within_s)
    assert sorted(replica for stage in found for replica in stage.replicas) == sorted(replicas)
    times = [stage.by_s for stage in found]
    assert times == sorted(set(times))
    assert all(0 < by_s <= within_s for by_s in times)


def test_those_on_whom_others_rely_end_last():
    order = [
        stage.replicas[0].role
        for stage in end_stages(LocalReplica(role, 0) for role in ["storage", "driver", "trainer", "rollout"])
    ]
    assert order == ["rollout", "trainer", "driver", "storage"]
