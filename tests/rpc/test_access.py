"""The access table: each method is in it, and each role may call what it needs, for itself."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace as Request

import pytest

import asyncflow
from asyncflow.errors import Refused
from asyncflow.identity import ProcessIdentity
from asyncflow.rpc.access import ACCESS, Access, holder_of, job_table, place_of, worker_name

SOURCES = Path(asyncflow.__file__).parent
ROUTED = re.compile(r"\broute\(\s*\"([a-z_]+\.[a-z_]+)\"|\"([a-z_]+\.[a-z_]+)\": \(\s*(?:unit_)?calls\.")
DIRECTORY = {"directory.register", "directory.heartbeat", "directory.leave"}
WHOLE = Request(
    role="rollout",
    index=1,
    incarnation="rollout-1-ab",
    worker="rollout-1-ab",
    rank=1,
    part=1,
    unit=1,
    replica=1,
    session=Request(unit=1),
    lease="1f@rollout-1",
    leases=["1f@rollout-1"],
)


def _caller(role: str, index: int = 1) -> ProcessIdentity:
    return ProcessIdentity("job-7", role, index)


def _own(role: str) -> Request:
    """Return ``WHOLE`` as the first process of a role asks it for itself."""
    lease, worker = f"1f@{role}-1", f"{role}-1-ab"
    named = {"role": role, "incarnation": worker, "worker": worker, "lease": lease, "leases": [lease]}
    return Request(**{**vars(WHOLE), **named})


def _allowed(role: str) -> set[str]:
    """Return the methods that a role may call for whom ``WHOLE`` names, or for nobody."""
    may = set()
    own = _own(role)
    for method in ACCESS:
        try:
            Access().check(_caller(role), method, own)
        except Refused:
            continue
        may.add(method)
    return may


def test_the_table_has_each_method_that_is_served_and_no_other():
    served = set(DIRECTORY)
    for path in SOURCES.rglob("*.py"):
        served |= {one or other for one, other in ROUTED.findall(path.read_text())}
    assert served == set(ACCESS)


def test_a_rollout_claims_writes_and_pulls_and_no_more():
    changes = {method for method in _allowed("rollout") if method not in _allowed("viewer")}
    assert changes == {
        "queue.claim",
        "queue.withdraw",
        "queue.abandon",
        "queue.renew",
        "queue.end",
        "unit.write",
        "weights.locate",
        "weights.held",
        "weights.permit",
        "weights.changed",
        "weights.fetch",
        "weights.place",
        "weights.pair",
        "weights.send",
    }


@pytest.mark.parametrize(
    ("method", "roles"),
    [
        ("weights.publish", {"trainer", "publisher"}),
        ("queue.commit", {"trainer", "client"}),
        ("queue.open_step", {"driver", "client"}),
        ("queue.close", {"driver", "client"}),
        ("units.hello", {"storage"}),
        ("unit.take", {"storage"}),
        ("replicas.follow", {"controller"}),
        ("driver.report", {"trainer"}),
        ("queue.drain", {"storage", "client", "operator"}),
    ],
)
def test_a_method_is_for_these_roles(method, roles):
    assert set(ACCESS[method]) == roles


@pytest.mark.parametrize("method", sorted(ACCESS))
@pytest.mark.parametrize("role", ["judge", "stranger", ""])
def test_a_role_that_is_not_in_the_table_may_nothing(method, role):
    with pytest.raises(Refused, match=f"may not call {method}"):
        Access().check(_caller(role), method, WHOLE)


FOR_ITSELF = sorted(
    (method, role)
    for method, roles in ACCESS.items()
    for role, named in roles.items()
    if list(named(WHOLE)) and method != "replicas.reach" and role not in ("client", "operator", "viewer", "follower")
)


@pytest.mark.parametrize(("method", "role"), FOR_ITSELF)
def test_a_call_on_behalf_of_another_process_is_refused(method, role):
    own = _own(role)
    Access().check(_caller(role), method, own)
    with pytest.raises(Refused, match=f"{role}-2 may not call {method} on behalf of {role}-1"):
        Access().check(_caller(role, 2), method, own)


def test_only_the_primary_asks_the_others_how_far_they_are():
    Access().check(_caller("controller", 0), "replicas.reach", WHOLE)
    with pytest.raises(Refused, match=r"controller-1 may not call replicas.reach on behalf of controller-0"):
        Access().check(_caller("controller", 1), "replicas.reach", WHOLE)


@pytest.mark.parametrize(
    "worker", ["driver", "rollout-1", "rollout-01-a", "", "rollout-1 -a", "rollout-" + "9" * 30 + "-a"]
)
def test_a_worker_that_is_named_after_no_process_claims_nothing(worker):
    with pytest.raises(Refused, match="on behalf of an unknown process"):
        Access().check(_caller("rollout"), "queue.claim", Request(worker=worker))


@pytest.mark.parametrize("lease", ["1f@rollout-2", "1f@driver-0", "1f", "write:1", "1f@rollout-1@rollout-2", "1f@", ""])
def test_a_rollout_uses_no_lease_of_another(lease):
    calls = {
        "queue.renew": Request(leases=[lease]),
        "queue.end": Request(lease=lease),
        "unit.write": Request(lease=lease),
    }
    for method, request in calls.items():
        with pytest.raises(Refused, match=f"rollout-1 may not call {method} on behalf of"):
            Access().check(_caller("rollout"), method, request)


def test_a_lease_names_its_holder():
    assert holder_of("1f@rollout-3") == ("rollout", 3)
    assert holder_of("write:1f@rollout-3") is None


def test_a_rollout_does_not_register_as_a_trainer():
    with pytest.raises(Refused, match=r"rollout-1 may not call directory\.register on behalf of trainer-1"):
        Access().check(_caller("rollout"), "directory.register", Request(role="trainer", index=1, incarnation="x"))


def test_the_ranks_of_a_replica_share_its_certificate():
    access = Access(ranks=4)
    for rank in (4, 5, 6, 7):
        access.check(_caller("trainer", 1), "queue.slot", Request(rank=rank))
    for rank in (3, 8):
        with pytest.raises(Refused):
            access.check(_caller("trainer", 1), "queue.slot", Request(rank=rank))


def test_clients_share_one_certificate_under_any_index():
    Access().check(
        _caller("client", 0), "directory.register", Request(role="client", index=77, incarnation="client-77-ab")
    )


def test_followers_share_one_certificate_and_receive_weights_and_no_more():
    Access().check(_caller("follower", 0), "weights.held", Request(worker="follower-77-ab"))
    with pytest.raises(Refused, match=r"follower-0 may not call weights\.held on behalf of rollout-1"):
        Access().check(_caller("follower", 0), "weights.held", Request(worker="rollout-1-ab"))
    with pytest.raises(Refused, match=r"follower-0 may not call weights\.permit on behalf of rollout-1"):
        Access().check(_caller("follower", 0), "weights.permit", Request(worker="rollout-1-ab"))
    weights = {"locate", "held", "fetch", "place", "pair", "send", "permit", "changed"}
    assert _allowed("follower") == DIRECTORY | {f"weights.{what}" for what in weights}


def test_a_worker_is_named_after_its_process():
    assert worker_name("rollout", 3, "ab") == "rollout-3-ab"
    assert place_of(worker_name("rollout", 3, "ab")) == ("rollout", 3)


def test_a_viewer_changes_nothing():
    looks = {method for method, roles in ACCESS.items() if {"viewer", "rollout", "trainer"} <= roles.keys()}
    assert _allowed("viewer") == looks


def test_a_process_of_a_task_works_on_its_own_rows_and_no_more():
    access, caller = Access(), _caller("task-mark", 1)
    access.check(caller, "queue.claim", Request(worker="task-mark-1-ab"))
    access.check(caller, "unit.write", Request(lease="1f@task-mark-1"))
    access.check(caller, "directory.register", Request(role="task-mark", index=1, incarnation="task-mark-1-ab"))
    for other in ("task-other-1", "task-mark-0", "rollout-1", "task-1"):
        with pytest.raises(Refused, match=rf"task-mark-1 may not call queue\.claim on behalf of {other}"):
            access.check(caller, "queue.claim", Request(worker=f"{other}-ab"))
    for method in ("weights.held", "queue.slot", "queue.clear", "unit.put"):
        with pytest.raises(Refused):
            access.check(caller, method, Request())
    assert ProcessIdentity.of(caller.uri) == caller


def test_a_client_of_a_job_puts_prompts_works_on_what_is_left_to_it_and_else_does_as_an_operator():
    job, own = Access(table=job_table(["mark"])), _own("client")
    own.task, own.partition = "mark", "train"
    may = set()
    for method in ACCESS:
        with contextlib.suppress(Refused):
            job.check(_caller("client"), method, own)
            may.add(method)
    work = {f"queue.{what}" for what in ("claim", "withdraw", "abandon", "renew", "end")}
    assert may == _allowed("operator") | work | {"unit.write", "driver.put_prompts"}
    assert _allowed("operator") == _allowed("viewer") | {"queue.drain"}
    with pytest.raises(Refused, match=r"the task advantage is done by the job's own.*that clients may do: mark"):
        job.check(_caller("client"), "queue.claim", Request(task="advantage", worker="client-1-ab"))
    with pytest.raises(Refused, match="the task mark is done by the job's own"):
        job.check(_caller("client"), "queue.claim", Request(task="mark", partition="eval", worker="client-1-ab"))
    for method, request in (
        ("queue.claim", Request(task="mark", partition="train", worker="rollout-1-ab")),
        ("queue.abandon", Request(worker="rollout-1-ab")),
        ("queue.end", Request(lease="1f@rollout-1")),
        ("queue.renew", Request(leases=["1f@driver-0"])),
        ("unit.write", Request(lease="1f@task-other-0")),
    ):
        with pytest.raises(Refused, match="on behalf of"):
            job.check(_caller("client"), method, request)


def test_the_table_of_a_job_changes_nothing_for_others():
    for method, roles in job_table([]).items():
        others = {role: named for role, named in ACCESS[method].items() if role != "client"}
        assert {role: named for role, named in roles.items() if role != "client"} == others


def test_processes_of_a_store_are_members_and_no_more():
    assert _allowed("master") == _allowed("holder") == DIRECTORY


_ROLES = set().union(*ACCESS.values())


def _row(method):
    roles, own = ACCESS[method], {role for role, named in ACCESS[method].items() if list(named(WHOLE))}
    everybody = {len(_ROLES): "all", len(_ROLES) - 5: "all of the queue"}.get(len(roles), "")
    names = everybody or ", ".join(role + " (own)" * (role in own) for role in sorted(roles))
    return f"| `{method}` | {names}{' (own)' * bool(everybody and own)} |\n"


def test_the_page_on_security_has_the_table():
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    assert "| method | roles |\n|---|---|\n" + "".join(map(_row, sorted(ACCESS))) in page
