import errno
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import asyncflow
from asyncflow import cli
from asyncflow.api.load import load_job, to_yaml
from asyncflow.commands.preflight import FOLDER, runnable_job
from asyncflow.queue.ledger import events as ev
from asyncflow.queue.ledger.log import pack
from asyncflow.queue.protocol.messages import AuditReport

ROOT = Path(__file__).parents[2]
BAD = sorted((ROOT / "tests" / "api" / "bad").glob("*"))


def refused(capsys, *arguments):
    """Run a command line that must be refused; give its one message."""
    assert cli.invoke([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    return err


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from asyncflow import cli; cli.invoke(['--help']);"
        "print([n for n in ('torch', 'transformers', 'pydantic', 'rich', 'aiohttp') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]"
    assert "validate" in run.stdout


def test_help_shows_what_people_call(capsys):
    cli.invoke(["--help"])
    listed = [
        line.split()[0] for line in capsys.readouterr().out.partition("Commands:")[2].splitlines() if line.strip()
    ]
    assert {"run", "validate", "queue"} <= set(listed)
    assert not {"role", "rewards", "crds"} & set(listed)
    assert cli.invoke(["crds", "--help"]) == 0


def test_a_run_of_the_command_line_leaves_torch_and_aiohttp_to_its_roles(manifest):
    code = (
        "import sys; from asyncflow import cli; import asyncflow.commands.run;"
        f"cli.invoke(['plan', {str(manifest)!r}]);"
        "print([n for n in ('torch', 'transformers', 'aiohttp') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_validate_says_what_is_valid(manifest, capsys):
    assert cli.invoke(["validate", str(manifest)]) == 0
    assert "RLJob little is valid" in capsys.readouterr().out


def test_plan_shows_roles_and_flow(manifest, capsys):
    assert cli.invoke(["plan", str(manifest), "--set", "rollout.replicas=3", "--set", "rollout.maxReplicas=3"]) == 0
    out = capsys.readouterr().out
    assert "rollout     3" in out
    assert "D_1, D_2 by θ_0, D_k by θ_{k-2}" in out


def test_plan_draws_the_flow(manifest, tmp_path, capsys):
    drawing = tmp_path / "flow.svg"
    assert cli.invoke(["plan", str(manifest), "--svg", str(drawing)]) == 0
    assert drawing.read_text().startswith("<svg ")
    assert "the flow of a training sample" in capsys.readouterr().out
    assert cli.invoke(["plan", str(manifest), "--svg", str(tmp_path / "nowhere" / "flow.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("algorithm.steps=-1", "spec.algorithm.steps"),
        ("algorithm.stepz=1", "stepz"),
        ("rollout.engine.name=warp", "spec.rollout.engine.name"),
        ("transferQueue.backend=tape", "Install its package, or use one of: memory, mooncake, redis"),
        ("reward.function=absent_module:f", "absent_module"),
        ("reward.extractor=nonsense", "nonsense"),
        ("data.train.source=absent.jsonl", "absent.jsonl"),
        ("model.source=absent-folder", "absent-folder"),
        ("suspend=true", "suspended"),
        ("reward.role={accelerator: {profile: nvidia, count: 1}}", "spec.reward.role.accelerator: this machine has 0"),
        ("nonsense", "path=value"),
    ],
)
def test_a_bad_value_starts_nothing_and_makes_no_folder(manifest, capsys, override, named):
    said = refused(capsys, "run", manifest, "--output", manifest.parent / "out", "--set", override)
    assert named in said
    assert not (manifest.parent / "out").exists()


def test_a_queue_names_a_backend_that_is_installed(tmp_path, capsys):
    file = tmp_path / "queue.yaml"
    file.write_text(
        "{apiVersion: asyncflow.dev/v1alpha1, kind: TransferQueue, metadata: {name: q}, spec: {backend: tape}}"
    )
    found = 'spec.backend = "tape": no installed package offers it in asyncflow.storage_backends'
    assert f"{found}. Install its package, or use one of: memory, mooncake, redis" in refused(capsys, "validate", file)
    assert cli.invoke(["validate", str(file), "--set", "backend=redis"]) == 0


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.name)
def test_every_bad_manifest_is_refused(path, tmp_path, capsys):
    refused(capsys, "run", path, "--output", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/nowhere", "/sys/nowhere", "job.yaml/below"])
def test_an_output_that_cannot_be_written_is_refused(manifest, capsys, place):
    assert "cannot write there" in refused(capsys, "run", manifest, "--output", manifest.parent / place)


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert "No such file" in refused(capsys, "run", tmp_path / "absent.yaml")


def test_a_job_that_comes_by_a_pipe_is_refused(manifest, tmp_path, capsys):
    read_end, write_end = os.pipe()
    os.write(write_end, manifest.read_bytes())
    os.close(write_end)
    said = refused(capsys, "run", f"/dev/fd/{read_end}", "--output", tmp_path / "out")
    os.close(read_end)
    assert "it is a pipe, which can be read only once. Write the manifest into a file" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["frobnicate"],
        ["run", "x.yaml", "--resume", "--fresh"],
        ["role", "rollout", "--job", "j", "--driver", "d", "--index", "-1", "--attempt", "0", "--workdir", "w"],
        ["role", "nobody", "--job", "j", "--driver", "d", "--index", "0", "--attempt", "0", "--workdir", "w"],
        ["role", "../x", "--job", "j", "--driver", "d", "--index", "0", "--attempt", "0", "--workdir", "w"],
        ["audit", "/nowhere"],
    ],
)
def test_a_wrong_command_line_is_refused(arguments, capsys):
    refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "FILE", "--sigma", "1"], "--sigma: it only has an effect with --devices"),
        (["plan", "FILE", "--prompt-tokens", "9"], "--prompt-tokens: it only has an effect with --devices"),
        (["plan", "FILE", "--simulations", "12"], "--simulations: it only has an effect with --devices"),
        (["plan", "FILE", "--devices", "2", "--svg", "flow.svg"], "--svg: a division of devices is not drawn"),
        (["run", "FILE", "--port", "5571"], "--port: a job chooses its ports itself"),
        (["sim", "FILE", "--json", "--output", "DIR"], "--output: it has no effect with --json"),
        (["timeline", "DIR", "--json", "--output", "DIR"], "--output: it has no effect with --json"),
        (["replay", "DIR", "--step", "1", "--list", "--output", "DIR"], "--output: --list makes no checkpoint"),
        (["ui", "DIR", "--without-texts"], "--without-texts: it only has an effect with --export"),
        (["ui", "DIR", "--export", "page.html", "--port", "0"], "--port: --export serves nothing"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(arguments, named, manifest, capsys):
    assert named in refused(capsys, *(str(manifest) if argument == "FILE" else argument for argument in arguments))


@pytest.mark.parametrize("kind", ["TransferQueue", "WeightSync"])
def test_what_stands_alone_is_not_to_be_resumed(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "alone.yaml"
    file.write_text(f"{{apiVersion: asyncflow.dev/v1alpha1, kind: {kind}, metadata: {{name: alone}}}}")
    assert "--resume: a standalone queue or publisher" in refused(capsys, "run", str(file), "--resume")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["crds", "--directory", "job.yaml"], "job.yaml: File exists"),
        (["crds", "--directory", "job.yaml/below"], "job.yaml/below: Not a directory"),
        (["reference", "--file", "nowhere/reference.md"], "nowhere/reference.md: No such file or directory"),
        (["audit", "n" * 300], "ledger: File name too long"),
        (["sim", "job.yaml", "--output", "job.yaml"], "job.yaml: File exists"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused(arguments, said, manifest, monkeypatch, capsys):
    monkeypatch.chdir(manifest.parent)
    assert cli.invoke(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert f"{said}. Use another path" in err


def test_a_working_directory_that_was_removed_is_refused(manifest, tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the working directory: No such file or directory. Use another" in refused(capsys, "validate", manifest)


def test_a_folder_without_rights_to_it_is_refused(monkeypatch, capsys):
    def denied(_path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/theirs/ledger")

    monkeypatch.setattr(Path, "is_dir", denied)
    assert "runs/theirs/ledger: Permission denied. Get access to it" in refused(capsys, "audit", "runs/theirs")


def test_a_resolved_manifest_means_the_same_everywhere(manifest, tmp_path):
    data = manifest.parent / "tasks.jsonl"
    data.write_text("{}\n")
    (manifest.parent / "judge.py").write_text("def score(**_): return 1.0\n")
    job = runnable_job(manifest, ["data.train.source=jsonl://tasks.jsonl?answer=a", "reward.function=judge:score"])
    assert job.spec.data.train.source == f"jsonl://{data}?answer=a"
    assert job.metadata.annotations[FOLDER] == str(manifest.parent)
    elsewhere = tmp_path / "else" / "where.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(to_yaml(job))
    assert runnable_job(elsewhere) == job
    assert load_job(elsewhere).folder(elsewhere.parent) == manifest.parent


def test_devices_that_this_machine_lacks_are_a_note_to_who_writes_and_an_error_to_who_runs(
    manifest, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    devices = ["--set", "trainer={replicas: 2, backend: {name: torch}, accelerator: {profile: nvidia, count: 1}}"]
    lacks = "this machine has 1 NVIDIA device, too few for trainer 2 x 1"
    assert cli.invoke(["validate", str(manifest), *devices]) == 0
    assert f"note: this machine could not run it: spec.trainer.accelerator: {lacks}" in capsys.readouterr().out
    assert lacks in refused(capsys, "run", manifest, *devices)
    assert not (tmp_path / "runs").exists()


def test_a_profile_that_is_to_be_found_out_is_told(manifest, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    auto = ["--set", "trainer={backend: {name: torch}, accelerator: {profile: auto}}"]
    told = "note: spec.trainer.accelerator: auto is {profile: nvidia, count: 1}: NVIDIA devices of this machine: 2"
    for command in ("validate", "plan"):
        assert cli.invoke([command, str(manifest), *auto]) == 0
        assert told in capsys.readouterr().out


@pytest.fixture
def audited(monkeypatch, tmp_path):
    """A run folder whose audit finds what it is told to find."""
    (tmp_path / "ledger").mkdir()

    def found(**counts):
        report = AuditReport(
            **{"dispatched": 8, "trained": 8, "filtered": 0, "dropped": 0, "unfinished": 0, "lost": 0, "duplicated": 0}
            | {"last_committed_step": 1, "attempts": 1, "redeliveries": 0, "closed": True, "problems": []}
            | counts
        )
        monkeypatch.setattr("asyncflow.queue.ledger.audit.audit_ledger", lambda _: report)
        return str(tmp_path)

    return found


def test_an_account_without_gaps(audited, capsys):
    assert cli.invoke(["audit", audited()]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][:2] == [
        ["dispatched", "8"],
        ["trained", "8"],
    ]


def test_the_account_of_a_queue_counts_its_open_rows_and_no_samples(tmp_path, capsys):
    (tmp_path / "ledger").mkdir()
    events = [
        ev.RowsPut("corpus", "open", list(range(5)), 1, list(range(100, 105))),
        ev.RowsCleared("corpus", [101, 102]),
        ev.RowsGone("corpus", [103]),
    ]
    (tmp_path / "ledger" / "000000000001.wal").write_bytes(b"".join(map(pack, events)))
    assert cli.invoke(["audit", str(tmp_path)]) == 0
    counted = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert counted == {
        "put": "5",
        "cleared": "2",
        "remaining": "3",
        "without bytes": "1",
        "redeliveries": "0",
        "resets": "0",
        "peeked": "0",
    }


@pytest.mark.parametrize(
    "counts", [{"lost": 1, "dispatched": 9}, {"duplicated": 1}, {"problems": ["serial 3 is gone"]}]
)
def test_an_account_with_a_gap_fails(audited, counts, capsys):
    assert cli.invoke(["audit", audited(**counts)]) == 1
    assert all(problem in capsys.readouterr().err for problem in counts.get("problems", []))


def test_an_account_without_samples_is_refused_if_the_run_has_checkpoints(tmp_path, capsys):
    (tmp_path / "ledger").mkdir()
    assert cli.invoke(["audit", str(tmp_path)]) == 0
    capsys.readouterr()
    (tmp_path / "checkpoints" / "step-000006").mkdir(parents=True)
    assert cli.invoke(["audit", str(tmp_path)]) == cli.USAGE
    out, err = capsys.readouterr()
    assert (out, "the ledger has no samples, but there are checkpoints" in err) == ("", True)


def test_crds_are_written_and_checked(tmp_path, capsys):
    assert cli.invoke(["crds", "--directory", str(tmp_path / "crds")]) == 0
    assert cli.invoke(["crds", "--check", "--directory", str(tmp_path / "crds")]) == 0
    next((tmp_path / "crds").iterdir()).write_text("old")
    assert cli.invoke(["crds", "--check", "--directory", str(tmp_path / "crds")]) == 1
    assert "out of date" in capsys.readouterr().err


def test_the_module_is_the_command_line():
    run = subprocess.run(
        [sys.executable, "-m", "asyncflow", "--version"], check=True, capture_output=True, text=True, env=os.environ
    )
    assert run.stdout.startswith("asyncflow ")


def test_ctrl_c_while_the_command_line_is_imported_ends_as_any_other(monkeypatch, capsys):
    class PressedThen:
        @staticmethod
        def find_spec(name, *_):
            if name == "asyncflow.cli":
                raise KeyboardInterrupt

    (script,) = re.findall(r'^asyncflow = "(\S+):main"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    monkeypatch.setattr(sys, "meta_path", [PressedThen, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "asyncflow.cli")
    monkeypatch.delattr(asyncflow, "cli")
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        import_module(script).main()
    assert ended.type is SystemExit
    assert (ended.value.code, capsys.readouterr().err) == (130, "\n")


def test_what_the_terminal_has_no_letter_for_is_written_out(manifest):
    command = [sys.executable, "-m", "asyncflow", "plan", str(manifest)]
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii"}
    told = subprocess.run(command, env=narrow, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert "by \\u03b8_0" in told.stdout


def test_what_cannot_be_exported_is_said(tmp_path, capsys):
    manifest = ROOT / "examples" / "counting.yaml"
    (tmp_path / "job.yaml").write_bytes(manifest.read_bytes())
    (tmp_path / "there").mkdir()
    export, target = ("model", "export", tmp_path), tmp_path / "exported"
    assert "exists already" in refused(capsys, *export, tmp_path / "there")
    assert "--step last is not a step. Pass newest, best" in refused(capsys, *export, target, "--step", "last")
    for words, said in (
        ((), "there is no checkpoint yet. Use another run, or step 0"),
        (("--step", "best"), "no checkpoint is known to be the best: only a run with"),
        (("--step", "0"), "the backend counting trains no model"),
    ):
        assert said in refused(capsys, *export, target, *words)
    assert not target.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("sim", "fit", "RUN"),
        ("model", "export", "RUN", "exported"),
        ("replay", "RUN", "--step", "1"),
        ("samples", "RUN"),
        ("sinks", "RUN"),
        ("doctor", "RUN"),
        ("top", "RUN"),
        ("ui", "RUN"),
    ],
    ids=lambda words: words[0],
)
def test_a_folder_without_a_run_is_refused(tmp_path, capsys, words):
    assert cli.invoke([str(tmp_path) if word == "RUN" else word for word in words]) == 2
    assert f"{tmp_path}: there is no run. Pass the folder of a run" in capsys.readouterr().err


def test_a_run_without_its_manifest_is_exported(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert cli.invoke(["ui", str(tmp_path), "--export", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
