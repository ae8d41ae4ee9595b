"""A status is written when something changed: transitions at once, figures every 15 seconds, the same never."""

from model_samples import START

from asyncflow.api.status import JobStatus
from asyncflow_operator.actions import Delete
from asyncflow_operator.decide.draft import ConditionSet, Draft, accept, to_write
from asyncflow_operator.decide.naming import NO_SYNC
from asyncflow_operator.decide.progress import FIGURES
from asyncflow_operator.decide.times import Alarm, to_rfc3339
from asyncflow_operator.observed import Owner, Ref


def status(*, at: float = START, said: tuple[str, bool | None, str, str] | None = None, **fields) -> JobStatus:
    conditions = ConditionSet((), 1, at)
    if said is not None:
        conditions.set(*said)
    return JobStatus(progress_time=to_rfc3339(at), conditions=conditions.current, **fields)


def write(before: JobStatus, after: JobStatus, *, now: float):
    alarm = Alarm(now)
    return to_write(before, after, figures=FIGURES, alarm=alarm), alarm.again_in_s


def test_the_same_is_never_written():
    for later in (0, 1, 100, 3600):
        assert write(status(step=3), status(step=3), now=START + later) == (None, None)


def test_figures_wait_for_the_rest_of_fifteen_seconds():
    found, again = write(status(step=3), status(step=4), now=START + 5)
    assert (found, again) == (None, 11.0)
    found, _ = write(status(step=3), status(step=4), now=START + 16)
    assert found["step"] == 4
    assert found["progressTime"] == to_rfc3339(START + 16)


def test_first_figures_and_those_after_a_clock_went_back_are_written():
    assert write(JobStatus(), JobStatus(step=1), now=START)[0] is not None
    assert write(status(step=3), status(step=4), now=START - 100)[0] is not None


def test_transitions_are_written_at_once_and_bring_figures_along():
    found, _ = write(status(step=3), status(step=4, phase="Running"), now=START + 1)
    assert (found["phase"], found["step"]) == ("Running", 4)
    before, after = status(said=("Ready", False, "Waiting", "a")), status(said=("Ready", True, "Ready", ""))
    assert write(before, after, now=START + 1)[0] is not None


def test_a_new_message_alone_can_wait():
    before, after = status(said=("Ready", False, "Waiting", "a")), status(said=("Ready", False, "Waiting", "b"))
    assert write(before, after, now=START + 1)[0] is None
    assert write(before, after, now=START + 20)[0] is not None


def test_an_absent_value_is_removed_from_the_status():
    assert "reward" not in write(status(reward=1.0), status(), now=START + 20)[0]


def test_the_time_of_a_condition_moves_with_its_status_only():
    conditions = ConditionSet((), 1, START)
    conditions.set("Ready", False, "Waiting", "one")
    first = conditions.current
    later = ConditionSet(first, 2, START + 100)
    later.set("Ready", False, "Other", "two")
    assert later.current[0].last_transition_time == first[0].last_transition_time
    assert later.current[0].observed_generation == 2
    turned = ConditionSet(later.current, 2, START + 200)
    turned.set("Ready", None, "Other", "two")
    assert (turned.current[0].status, turned.current[0].last_transition_time) == ("Unknown", to_rfc3339(START + 200))


def test_saying_the_same_again_keeps_the_condition():
    conditions = ConditionSet((), 1, START)
    conditions.set("Ready", True, "Ready", "")
    again = ConditionSet(conditions.current, 1, START + 9)
    again.set("Ready", True, "Ready", "")
    assert again.current[0] is conditions.current[0]
    again.drop("Ready")
    assert again.current == ()
    assert not again.has("Ready")


def test_a_message_is_bounded():
    conditions = ConditionSet((), 1, START)
    conditions.set("Ready", True, "Ready", "x" * 10_000)
    assert len(conditions.current[0].message) == 1024


def test_a_map_that_has_become_empty_is_left_out_of_what_is_written():
    found, _ = write(status(restarts={"driver": 1}), status(restarts={}), now=START + 1)
    assert "restarts" not in found


def draft(before: JobStatus) -> Draft[JobStatus]:
    owner = Owner(kind="RLJob", namespace="team", name="demo", uid="uid-job", generation=5)
    return Draft(owner=owner, before=before, now=START)


def test_pods_that_are_deleted_for_one_reason_are_one_event():
    drafted = draft(JobStatus())
    reasons = ["it is over"] * 10 + ["it is new"]
    drafted.delete_pods(Delete(ref=Ref("Pod", f"p{number}"), uid="u", why=why) for number, why in enumerate(reasons))
    assert [(note.type, note.message) for note in drafted.notes] == [
        ("Normal", "p0, p1, p2, p3, p4, p5, p6, p7 and 2 more: it is over"),
        ("Normal", "p10: it is new"),
    ]
    drafted.delete_pods([Delete(ref=Ref("Pod", "lost"), uid="u", why="", grace_s=0)])
    assert (drafted.notes[-1].type, drafted.notes[-1].reason) == ("Warning", "NodeLost")
    assert len(drafted.first) == 12


def test_a_spec_that_is_refused_says_which_one_counts():
    for accepted, counts in ((3, "Generation 3 stays in force"), (None, "The last accepted spec stays in force")):
        drafted = draft(JobStatus(accepted_generation=accepted))
        accept(drafted, problem="spec.x: wrong", reason="Invalid")
        (said,) = drafted.conditions.current
        assert [(note.type, note.reason) for note in drafted.notes] == [("Warning", "Invalid")]
        assert (said.status, said.reason, said.observed_generation) == ("False", "Invalid", 5)
        assert said.message.startswith(f"{counts}; ")
        assert said.message.endswith(" spec.x: wrong")
        assert drafted.after().accepted_generation == accepted


def test_without_its_weight_sync_a_job_follows_the_rest_of_its_newest_spec_and_says_so():
    drafted = draft(JobStatus(accepted_generation=3))
    accept(drafted, problem="spec.weightSync.name = 'shared': gone", reason=NO_SYNC)
    (said,) = drafted.conditions.current
    assert (said.status, said.reason) == ("False", NO_SYNC)
    assert said.message == (
        "The newest spec is in force with the last known fields of its WeightSync. "
        "spec.weightSync.name = 'shared': gone"
    )
    assert drafted.after().accepted_generation == 5
