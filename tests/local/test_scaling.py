"""What is wanted: of a person, of the policy, of the manifest, in this order, within the bounds."""

import pytest

from asyncflow.api.status import DriverStatus
from asyncflow.errors import ManifestError
from asyncflow.local.scaling import Scale, Scaling, read_requests, write_request
from asyncflow.plan.roles import Readiness, Resources, RestartPolicy, Role

ROLE = Role(
    name="rollout",
    replicas=2,
    core=1,
    most=6,
    restart=RestartPolicy(max_restarts=3, window_s=3600, backoff_s=1),
    resources=Resources(cpu=1),
    readiness=Readiness(path="/readyz", port="http", within_s=1),
)


def says(wanted: int | None) -> DriverStatus:
    return DriverStatus(desired_rollouts=wanted)


def seen(scale: Scale) -> tuple[int, str]:
    return scale.wanted, scale.by


def test_a_person_counts_before_the_policy_and_that_before_the_manifest(tmp_path):
    scaling = Scaling(role=ROLE, file=tmp_path / "scale.json", policy=True)
    assert seen(scaling.wanted()) == (2, "manifest")
    scaling.decide(says(4))
    assert seen(scaling.wanted()) == (4, "policy")
    scaling.decide(says(None))
    scaling.decide(None)
    assert seen(scaling.wanted()) == (4, "policy"), "a driver that says nothing changes nothing"
    write_request(tmp_path / "scale.json", "rollout", 3)
    assert seen(scaling.wanted()) == (3, "person")
    assert scaling.wanted().why == "asked for by asyncflow scale, which switches the built-in policy off"
    write_request(tmp_path / "scale.json", "rollout", None)
    assert seen(scaling.wanted()) == (4, "policy")


def test_a_policy_that_the_manifest_has_not_switched_on_changes_nothing(tmp_path):
    scaling = Scaling(role=ROLE, file=tmp_path / "scale.json")
    scaling.decide(says(4))
    assert seen(scaling.wanted()) == (2, "manifest")


@pytest.mark.parametrize(("asked", "wanted"), [(0, 1), (9, 6)])
def test_bounds_that_have_changed_since_it_was_asked_for_are_kept(tmp_path, asked, wanted):
    write_request(tmp_path / "scale.json", "rollout", asked)
    assert seen(Scaling(role=ROLE, file=tmp_path / "scale.json").wanted()) == (wanted, "person")


def test_the_next_supervisor_begins_with_what_the_policy_wanted_last(tmp_path):
    before = Scale(role="rollout", wanted=5, least=1, most=6, by="policy", policy=True)
    again = Scaling(role=ROLE, file=tmp_path / "scale.json", policy=True, before=before)
    assert seen(again.wanted()) == (5, "policy")
    switched_off = Scaling(role=ROLE, file=tmp_path / "scale.json", before=before)
    assert seen(switched_off.wanted()) == (2, "manifest")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rollout": -1}', b'{"rollout": "4"}', b"\xff"])
def test_a_request_that_cannot_be_read_leaves_what_was_asked_for_and_is_written_anew(tmp_path, content):
    file = tmp_path / "scale.json"
    write_request(file, "rollout", 3)
    scaling = Scaling(role=ROLE, file=file)
    assert seen(scaling.wanted()) == (3, "person")
    file.write_bytes(content)
    with pytest.raises(ManifestError, match="Write it anew with asyncflow scale"):
        read_requests(file)
    assert seen(scaling.wanted()) == (3, "person")
    write_request(file, "rollout", 4)
    assert seen(scaling.wanted()) == (4, "person")
