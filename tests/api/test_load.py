"""From a file, a stream and overrides to a job; not yet; files that a job names."""

import io
import itertools
import re
from pathlib import Path

import pytest

from asyncflow.api import RLJob, check_files, load_job
from asyncflow.api.check import shown
from asyncflow.api.job import RLJobSpec
from asyncflow.api.schedule import ScheduleSpec
from asyncflow.commands.preflight import runnable_job
from asyncflow.errors import ManifestError

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
MINIMAL = """
apiVersion: asyncflow.dev/v1alpha1
kind: RLJob
metadata: {name: minimal}
spec:
  model: {source: "tiny://reverse-digits"}
  data: {train: {source: "tiny://reverse-digits"}}
  reward: {function: task}
  algorithm: {steps: 3}
  sampling: {maxTokens: 8}
"""


def minimal(*overrides: str) -> RLJob:
    return load_job(io.StringIO(MINIMAL), overrides)


def test_a_minimal_job_has_usual_defaults() -> None:
    spec = minimal().spec
    assert (spec.schedule.mode, spec.schedule.update, spec.schedule.swap_at) == ("async", "delayed", "quota")
    assert spec.schedule.max_staleness == 1
    assert (spec.rollout.min_replicas, spec.rollout.replicas, spec.rollout.max_replicas) == (1, 1, 1)
    assert spec.evaluation is None
    assert spec.transfer_queue.bytes_per_unit.bytes == 256 << 20
    assert spec.algorithm.betas == (0.9, 0.999)


@pytest.mark.parametrize("mode", ["sync", "periodic"])
def test_on_policy_modes_need_no_more_than_their_name(mode: str) -> None:
    schedule = minimal(f"schedule.mode={mode}").spec.schedule
    assert (schedule.update, schedule.max_staleness) == ("sync", 0)


def test_devices_are_those_of_all_processes_and_on_the_cpu_the_processes() -> None:
    assert minimal("trainer.replicas=3", "rollout.replicas=2").spec.devices == 5
    gpus = ["trainer={replicas: 3, accelerator: {profile: nvidia, count: 1}}", "rollout.replicas=2"]
    assert minimal(*gpus).spec.devices == 5
    eight = {"profile": "nvidia", "count": 8}
    spec = minimal().spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    spec |= {"trainer": {"replicas": 2, "accelerator": eight}}
    spec |= {"rollout": {"replicas": 3, "accelerator": eight, "engine": {"name": "vllm"}}}
    assert RLJobSpec.model_validate(spec).devices == 40


def test_bytes_and_texts_are_both_streams() -> None:
    assert load_job(io.BytesIO(MINIMAL.encode())) == minimal()


@pytest.mark.parametrize(
    "override",
    [
        "trainer.resources.memory=4m",
        "rollout.resources.sharedMemory=64",
        "reward.memory=4k",
        "storage.ledger.claim.size=1023Ki",
    ],
)
def test_bytes_with_a_mistaken_unit_are_refused(override: str) -> None:
    place = override.partition("=")[0]
    with pytest.raises(ManifestError, match="is less than 1Mi") as refused:
        minimal(override)
    assert f"spec.{place} = " in str(refused.value)
    assert "m is a thousandth of a byte" in str(refused.value)
    minimal(f"{place}=1Mi")


@pytest.mark.parametrize("amount", ["4Gi", "500Mi", "1k", "2G"])
def test_cores_in_a_unit_of_bytes_are_refused(amount: str) -> None:
    with pytest.raises(ManifestError, match=f'cpu = "{amount}".*: is not a number of cores. Write e.g. 2, or 500m'):
        minimal(f"trainer.resources.cpu={amount}")
    for cores in ("2", "500m"):
        minimal(f"trainer.resources.cpu={cores}")


@pytest.mark.parametrize("override", ["reward.function=mine.score", "environment={function: mine.score}"])
def test_a_function_with_a_dot_for_the_colon_is_told_its_form(override: str) -> None:
    with pytest.raises(ManifestError, match=r'function = "mine\.score".*Write module:function, e\.g\. mine:score'):
        minimal(override)


@pytest.mark.parametrize("path", ["algorithm.steps", "spec.algorithm.steps"])
def test_an_override_may_leave_spec_out(path: str) -> None:
    assert load_job(QUICKSTART, [f"{path}=5"]).spec.algorithm.steps == 5


def test_overrides_make_what_is_not_there_and_the_last_one_wins() -> None:
    job = minimal(
        "schedule.mode=sync",
        "rollout={replicas: 3}",
        "rollout.threads=2",
        "metadata.name=other",
        "algorithm.seed=1e2",
        "algorithm.seed=7",
    )
    assert job.name == "other"
    assert (job.spec.rollout.replicas, job.spec.rollout.threads, job.spec.algorithm.seed) == (3, 2, 7)


def test_null_removes_what_is_optional() -> None:
    assert load_job(QUICKSTART, ["evaluation=null"]).spec.evaluation is None


@pytest.mark.parametrize(
    "override",
    [
        "schedule.fill=null",
        "schedule=null",
        "trainer.backend={name: torch, packing: null}",
        "rollout.resources.cpu=null",
    ],
)
def test_null_stands_for_the_default(override: str) -> None:
    assert load_job(io.StringIO(MINIMAL), [override]) == load_job(io.StringIO(MINIMAL))


@pytest.mark.parametrize(
    "override", ["algorithm=null", "algorithm.steps=null", "metadata.labels={a: null}", "unknown=null"]
)
def test_null_is_refused_where_a_value_is_needed(override: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(override.partition("=")[0])):
        load_job(io.StringIO(MINIMAL), [override])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("algorithm.steps", "path=value"),
        ("=5", "path=value"),
        ("a..b=5", "path=value"),
        ("algorithm.steps.more=5", "not a mapping"),
        ("algorithm.steps=[", "not YAML"),
        ("algorithm.stesp=5", "Did you mean steps"),
        ("rollout.steps=5", r"unknown field\. It is a field of spec\.algorithm$"),
        ("maxTokens=5", r"unknown field\. It is a field of spec\.sampling$"),
        ("rollout.name=vllm", r"unknown field\. It is a field of spec\.rollout\.engine$"),
        ("algorithm.beta=5", r"settings of a plug-in go into options"),
        ("algorithm.steps=-5", "too small"),
        ("algorithm.steps=five", "not an integer"),
        ("algorithm.steps=5\nseed: 3", "path=value"),
        ("algorithm.stéps\udce9=5", "not UTF-8"),
        ("data.train.source=caf\udce9.jsonl", "not UTF-8"),
        ("tasks[0].replicas=2", r"Set the whole list: tasks=\[\.\.\.\]"),
        ("kind=TransferQueue", "unknown field"),
    ],
)
def test_a_bad_override_is_refused_like_a_bad_file(override: str, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        minimal(override)


def schedule(*fields: str) -> ScheduleSpec:
    return minimal(*(f"schedule.{field}" for field in fields)).spec.schedule


def test_what_a_field_of_the_schedule_does_in_each_mode_is_as_the_guide_says() -> None:
    """The table of docs/guide/jobs.md, column by column."""
    for mode in ("sync", "periodic"):
        at_once = [schedule(f"mode={mode}", f"maxStaleness={most}", "stalenessThreshold=3") for most in (0, 4)]
        assert {(each.lag, each.ahead) for each in at_once} == {(0, 1)}
        with pytest.raises(ManifestError, match="syncEvery"):
            schedule(f"mode={mode}", "syncEvery=2")
    assert {schedule("mode=sync", f"requireBatches={count}").whole_steps for count in (0, 1)} == {True}
    assert not schedule("mode=periodic").whole_steps
    with pytest.raises(ManifestError, match="requireBatches"):
        schedule("mode=periodic", "requireBatches=1")

    quota = [schedule("swapAt=quota", f"maxStaleness={most}", f"stalenessThreshold={most}") for most in (1, 5)]
    assert {(each.lag, each.ahead) for each in quota} == {(1, 2)}
    with pytest.raises(ManifestError, match="syncEvery"):
        schedule("swapAt=quota", "syncEvery=2", "maxStaleness=2")

    for swap_at in ("sequence", "token"):
        wide = schedule(f"swapAt={swap_at}", "syncEvery=4", "maxStaleness=9", "stalenessThreshold=0.5")
        assert (wide.lag, wide.ahead) == (9, 6)
        bounded = schedule(f"swapAt={swap_at}", "syncEvery=4", "maxStaleness=4", "stalenessThreshold=0.5")
        assert (bounded.lag, bounded.ahead) == (4, 5)
        with pytest.raises(ManifestError, match="maxStaleness"):
            schedule(f"swapAt={swap_at}", "syncEvery=4", "maxStaleness=3")
        assert [schedule(f"swapAt={swap_at}", f"requireBatches={count}").whole_steps for count in (0, 1, 2)] == [
            False,
            True,
            True,
        ]
        assert schedule(f"swapAt={swap_at}", "update=staggered", "syncEvery=2", "maxStaleness=3").ahead == 4
    with pytest.raises(ManifestError, match="all instances swap together"):
        schedule("update=staggered", "swapAt=quota")


def test_so_many_batches_are_required_as_can_be_complete() -> None:
    """Where a step k begins only when D_k to D_{k+n-1} are complete, all of these are out by then."""
    for swap_at, every, batches, most, threshold in itertools.product(
        ("quota", "token"), (1, 2, 3, 4), (2, 3, 4, 6), (1, 3, 4, 7), (0, 0.5, 1)
    ):
        fields = {"syncEvery": every, "maxStaleness": most, "stalenessThreshold": threshold, "swapAt": swap_at}
        words = [f"{name}={value}" for name, value in fields.items()]
        try:
            ahead = schedule(*words).ahead
        except ManifestError:
            continue
        starts = range(0, 60, batches)
        needed = max(step + batches - step // every * every for step in starts)
        try:
            schedule(*words, f"requireBatches={batches}")
        except ManifestError:
            assert ahead < batches + every - 1
        else:
            assert needed <= ahead


@pytest.mark.parametrize("mode", ["sync", "periodic"])
def test_recomputed_log_probs_are_taken_where_all_samples_are_of_the_newest_weights(mode: str) -> None:
    assert minimal("algorithm.old=recompute", f"schedule.mode={mode}").spec.algorithm.old == "recompute"


def test_of_stale_samples_they_are_taken_with_a_correction() -> None:
    stale = ["algorithm.old=recompute", "schedule.swapAt=token", "schedule.maxStaleness=2"]
    with pytest.raises(ManifestError, match="does not correct for them"):
        minimal(*stale)
    assert minimal(*stale, "algorithm.correction={}").spec.algorithm.correction is not None


@pytest.mark.parametrize(
    "overrides",
    [["rollout.maxReplicas=4", "elasticity.enabled=true"], ["elasticity.dryRun=true"], ["scheduling.gang=volcano"]],
    ids=lambda overrides: overrides[-1],
)
def test_what_only_a_cluster_does_is_accepted(overrides: list[str]) -> None:
    assert minimal(*overrides).kind == "RLJob"


def test_a_process_may_have_a_part_of_one_device() -> None:
    made = minimal("rollout.engine.name=vllm", "rollout.accelerator={profile: nvidia, count: 1, share: 0.5}")
    assert made.spec.rollout.accelerator.share == 0.5


def test_another_kind_is_no_job() -> None:
    queue = "apiVersion: asyncflow.dev/v1alpha1\nkind: TransferQueue\nmetadata: {name: q}\n"
    with pytest.raises(ManifestError, match="not a job"):
        load_job(io.StringIO(queue))


def test_a_long_value_is_shown_in_few_characters() -> None:
    assert shown("x" * 58) == f'"{"x" * 58}"'
    assert shown("x" * 500) == f'"{"x" * 56}...'


def test_not_a_mapping() -> None:
    with pytest.raises(ManifestError, match="not a mapping"):
        load_job(io.StringIO("- a\n- b\n"))


def test_a_wrong_kind_is_told_with_all_that_is_wrong_at_the_top() -> None:
    with pytest.raises(ManifestError) as refused:
        load_job(io.StringIO("apiVersion: v1\nkind: [Pod]\n"))
    assert "apiVersion" in str(refused.value)
    assert "kind" in str(refused.value)


def test_files_named_in_a_job_must_be_there(tmp_path: Path) -> None:
    job = minimal(
        "model.source=model", "data.train.source='jsonl://train #1.jsonl?prompt=q'", "data.eval={source: held.jsonl}"
    )
    with pytest.raises(ManifestError) as refused:
        check_files(job, tmp_path, name="job.yaml")
    for place in ("spec.model.source", "spec.data.train.source", "spec.data.eval.source"):
        assert place in str(refused.value)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train #1.jsonl").write_text("{}\n")
    (tmp_path / "held.jsonl").write_text("{}\n")
    check_files(job, tmp_path, name="job.yaml")


def test_a_folder_as_a_data_file_is_told_how_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    with pytest.raises(ManifestError, match=r"^job\.yaml: .*/gsm8k is a folder\. Write parquet://gsm8k or dataset://"):
        check_files(minimal("data.train.source=gsm8k"), tmp_path, name="job.yaml")


def test_what_is_not_a_file_is_not_looked_for(tmp_path: Path) -> None:
    check_files(minimal(), tmp_path, name="job.yaml")
    check_files(
        minimal("model.source=pvc://models/qwen", "data.train.source=gym://chain_sum"), tmp_path, name="job.yaml"
    )


def test_data_beside_the_model_on_its_claim_is_not_looked_for_here(tmp_path: Path) -> None:
    model = "model.source=pvc://models/qwen"
    check_files(minimal(model, "data.train.source=jsonl:///mnt/models/train.jsonl?prompt=q"), tmp_path, name="job.yaml")
    for data in ("/mnt/models-of-others/a.jsonl", "/mnt/models/../a.jsonl", "train.jsonl"):
        with pytest.raises(ManifestError, match=r"spec\.data\.train\.source"):
            check_files(minimal(model, f"data.train.source=jsonl://{data}"), tmp_path, name="job.yaml")
    with pytest.raises(ManifestError, match=r"spec\.data\.train\.source"):
        check_files(minimal("data.train.source=jsonl:///mnt/models/train.jsonl"), tmp_path, name="job.yaml")


def test_rules_hold_for_jobs_built_in_python_too() -> None:
    data = minimal().model_dump()
    data["spec"]["algorithm"]["groupSize"] = 1
    with pytest.raises(ValueError, match="group of 1"):
        RLJob.model_validate(data)


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        minimal().spec.algorithm.steps = 4  # type: ignore[misc]


SHARED = """
apiVersion: asyncflow.dev/v1alpha1
kind: WeightSync
metadata: {name: shared}
spec: {keep: 5, bandwidth: 100Mi}
"""
NAMES = f"{MINIMAL}  weightSync: {{name: shared}}\n"


@pytest.mark.parametrize("text", [f"{NAMES}---{SHARED}", f"{SHARED}---{NAMES}"], ids=["behind", "in front"])
def test_a_job_has_the_fields_of_the_weight_sync_in_its_file(text: str) -> None:
    section = load_job(io.StringIO(text), ["algorithm.steps=4"]).spec.weight_sync
    assert (section.name, section.keep, section.bandwidth) == (None, 5, "100Mi")
    staggered = ["schedule={mode: async, update: staggered, swapAt: sequence}"]
    few = load_job(io.StringIO(text.replace("keep: 5", "stagger: 2")), staggered)
    assert few.spec.weight_sync.stagger == 2
    as_bytes = f"{MINIMAL}  weightSync: {{name: shared, chunkBytes: 1048576}}\n"
    assert load_job(io.StringIO(as_bytes)).spec.weight_sync.name == "shared"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{MINIMAL}---{SHARED}", "line 12: this is a WeightSync that no job.*spec.weightSync.name: shared"),
        (f"{NAMES}---{SHARED.replace('shared', 'other')}", "no job in this file names"),
        (f"{NAMES}---{SHARED}---{SHARED}", "a second document"),
        (f"{MINIMAL}---{MINIMAL}", "a second document"),
        (f"{NAMES}---\n", "an empty document"),
        (f"{NAMES}---{SHARED.replace('keep: 5', 'keep: 0')}", r"spec.keep = 0 \(line 16\): is too small"),
        (
            f"{NAMES}---{SHARED.replace('keep: 5', 'stagger: 2')}",
            r"spec.stagger = 2 \(line 16\): stagger has an effect",
        ),
    ],
)
def test_other_documents_beside_a_job_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        load_job(io.StringIO(text))


def test_a_job_that_names_an_object_of_a_cluster_is_legal_and_does_not_run_here(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(NAMES)
    assert load_job(file).spec.weight_sync.name == "shared"
    with pytest.raises(ManifestError, match=r"names the WeightSync 'shared'.*same file"):
        runnable_job(file)
