"""The wanted number of rollouts: that of a person, of the policy, of the manifest, in this order, within the bounds."""

import contextlib
import time
from dataclasses import replace

import msgspec
import pytest

from asyncflow.api.status import DriverStatus
from asyncflow.errors import ManifestError
from asyncflow.local.folder import RunFolder
from asyncflow.local.record import load_record
from asyncflow.local.scaling import Scale, Scaling, read_requests, write_request
from asyncflow.local.site import Elastic, local_site
from asyncflow.local.supervisor import Limits
from asyncflow.plan.roles import Readiness, Resources, RestartPolicy, Role

ROLE = Role(
    name="rollout",
    replicas=2,
    core=1,
    most=6,
    restart=RestartPolicy(max_restarts=3, window_s=3600, backoff_s=1, dismissed_s=15.0),
    resources=Resources(cpu=1),
    readiness=Readiness(path="/readyz", port="http", within_s=1),
)


def says(wanted: int | None) -> DriverStatus:
    return DriverStatus(desired_rollouts=wanted)


def seen(scale: Scale) -> tuple[int, str]:
    return scale.wanted, scale.by


def test_a_person_counts_before_the_policy_and_that_before_the_manifest(tmp_path):
    scaling = Scaling(role=ROLE, file=tmp_path / "scale.json", policy=True)
    assert (seen(scaling.wanted()), scaling.wanted().why) == ((2, "manifest"), "set by the manifest")
    scaling.decide(says(4))
    assert (seen(scaling.wanted()), scaling.wanted().why) == ((4, "policy"), "set by the built-in policy")
    scaling.decide(says(None))
    scaling.decide(None)
    assert seen(scaling.wanted()) == (4, "policy"), "a driver that says nothing changes nothing"
    write_request(tmp_path / "scale.json", "rollout", 3)
    assert seen(scaling.wanted()) == (3, "person")
    assert scaling.wanted().why == "requested by asyncflow scale, which switches the built-in policy off"
    write_request(tmp_path / "scale.json", "rollout", None)
    assert seen(scaling.wanted()) == (4, "policy")


def test_a_policy_that_the_manifest_has_not_switched_on_changes_nothing(tmp_path):
    scaling = Scaling(role=ROLE, file=tmp_path / "scale.json")
    scaling.decide(says(4))
    assert seen(scaling.wanted()) == (2, "manifest")
    write_request(tmp_path / "scale.json", "rollout", 3)
    assert scaling.wanted().why == "requested by asyncflow scale"


@pytest.mark.parametrize("policy", [True, False])
async def test_a_change_of_what_the_driver_wants_is_told_and_nothing_else(tmp_path, monkeypatch, policy):
    scaling = Scaling(role=ROLE, file=tmp_path / "scale.json", policy=policy)
    answers, told = [says(3), None, says(None), says(3), says(5)], []

    def answer(port, shape):
        assert (port, shape) == (16000, DriverStatus)
        if not answers:
            raise EOFError
        return answers.pop(0)

    monkeypatch.setattr("asyncflow.local.scaling.ask", answer)
    monkeypatch.setattr("asyncflow.local.scaling._POLL_S", 0.0)
    with pytest.raises(EOFError) if policy else contextlib.nullcontext():
        await scaling.follow(16000, lambda: told.append(seen(scaling.wanted())))
    assert told == ([(3, "policy"), (5, "policy")] if policy else [])


@pytest.mark.parametrize(("asked", "wanted"), [(0, 1), (9, 6)])
def test_bounds_that_have_changed_since_it_was_asked_for_are_kept(tmp_path, asked, wanted):
    write_request(tmp_path / "scale.json", "rollout", asked)
    assert seen(Scaling(role=ROLE, file=tmp_path / "scale.json").wanted()) == (wanted, "person")


def test_the_next_supervisor_begins_with_what_the_policy_wanted_last(tmp_path):
    before = Scale(role="rollout", wanted=5, by="policy", policy=True)
    again = Scaling(role=ROLE, file=tmp_path / "scale.json", policy=True, before=before)
    assert seen(again.wanted()) == (5, "policy")
    older = msgspec.json.decode(b'{"role": "rollout", "wanted": 5, "least": 1, "most": 6, "by": "policy"}', type=Scale)
    assert seen(Scaling(role=ROLE, file=tmp_path / "scale.json", policy=True, before=older).wanted()) == (5, "policy")
    asked = Scale(role="rollout", wanted=5, by="person", policy=True)
    withdrawn = Scaling(role=ROLE, file=tmp_path / "scale.json", policy=True, before=asked)
    assert seen(withdrawn.wanted()) == (2, "manifest")
    switched_off = Scaling(role=ROLE, file=tmp_path / "scale.json", before=before)
    assert seen(switched_off.wanted()) == (2, "manifest")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rollout": -1}', b'{"rollout": "4"}', b"\xff"])
def test_a_request_that_cannot_be_read_leaves_what_was_asked_for_and_is_written_again(tmp_path, caplog, content):
    file = tmp_path / "scale.json"
    write_request(file, "rollout", 3)
    scaling = Scaling(role=ROLE, file=file)
    assert seen(scaling.wanted()) == (3, "person")
    file.write_bytes(content)
    with pytest.raises(ManifestError, match="Write it again with asyncflow scale"):
        read_requests(file)
    assert [seen(scaling.wanted()) for _ in range(3)] == [(3, "person")] * 3
    write_request(file, "rollout", 4)
    assert seen(scaling.wanted()) == (4, "person")
    file.write_bytes(content)
    assert seen(scaling.wanted()) == (4, "person")
    assert ["cannot be read" in record.message for record in caplog.records] == [True, True], "once for each time"


def test_a_run_for_which_more_was_asked_than_there_are_devices_starts_again(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    folder = RunFolder.claim(tmp_path / "run")
    driver = replace(ROLE, name="driver", replicas=1, core=1, most=1, leader=True)
    rollout = replace(ROLE, replicas=1, resources=Resources(cpu=1, profile="nvidia", accelerators=1))
    write_request(folder.requests, "rollout", 3)
    elastic = Elastic(policy=False, drain_s=1)
    with local_site([driver, rollout], folder=folder, limits=Limits(), elastic=elastic) as here:
        elastic = here.supervisor._elastic
        assert elastic is not None
        here.supervisor._rescale(elastic)
        rollouts = [placed.index for placed in here.supervisor.placed if placed.role == "rollout"]
    folder.release()
    record = load_record(folder.path)
    assert record is not None
    assert rollouts == [0, 1]
    assert [(scale.wanted, scale.by) for scale in record.scales] == [(2, "person")]
    assert "too few for rollout 3 x 1" in record.scales[0].problem


def test_one_that_waits_for_its_imports_leaves_at_once_and_may_come_again(tmp_path):
    folder = RunFolder.claim(tmp_path / "run")
    driver = replace(ROLE, name="driver", replicas=1, core=1, most=1, leader=True)
    with local_site([driver, ROLE], folder=folder, limits=Limits(), elastic=Elastic(policy=False, drain_s=1)) as here:
        supervisor, elastic = here.supervisor, here.supervisor._elastic
        assert elastic is not None
        supervisor._rescale(elastic)
        assert len(supervisor._table.due(time.monotonic())) == 3, "from here on they count as running"
        seen = []
        for asked in (1, 2):
            write_request(folder.requests, "rollout", asked)
            supervisor._rescale(elastic)
            seen.append([(each.state, each.attempt) for each in supervisor.placed if each.role == "rollout"])
    folder.release()
    assert seen == [[("running", 0), ("left", 0)], [("running", 0), ("waiting", 1)]]
