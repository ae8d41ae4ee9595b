"""``asyncflow publish``, and ``asyncflow run`` of a WeightSync: refused in words, with nothing left behind."""

import sys
from pathlib import Path

import pytest

from asyncflow.cli import invoke
from asyncflow.commands import publish
from asyncflow.local.folder import SYNC
from asyncflow.local.supervisor import RunOutcome

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"


def test_a_weight_sync_that_follows_a_job_is_nothing_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fleet.yaml", "weight-sync.yaml"):
        assert invoke(["run", str(EXAMPLES / name), "--output", str(tmp_path / "run")]) == 2
        assert "it has no model of its own to publish. Set spec.source.model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hf://org/name", "--watch"], "only a folder can be watched for newer models"),
        (["model", "--set", "kepp=3"], "Did you mean keep?"),
        (["model", "--set", "follower.engine.name=counting"], "no installed package offers it"),
        (["model", "--set", "transport=mooncake"], "spec.transport: Mooncake cannot be loaded"),
        (["no-such-folder"], "no-such-folder has no config.json"),
    ],
)
def test_what_is_wrong_with_it_is_told(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    assert invoke(["publish", *words, "--output", str(tmp_path / "run")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_relative_folder_is_where_the_command_is_given_or_beside_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []

    def serve(sync, roles, *, path, name, **_):
        served.append((sync.spec.source.model, [role.name for role in roles], path.name, name))
        return RunOutcome(exit_code=0), path

    monkeypatch.setattr(publish, "serve_alone", serve)
    monkeypatch.chdir(tmp_path)
    manifest = tmp_path / "beside" / "sync.yaml"
    manifest.parent.mkdir()
    manifest.write_text(
        "{apiVersion: asyncflow.dev/v1alpha1, kind: WeightSync, metadata: {name: mine}, spec: {source: {model: a/b}}}"
    )
    for folder in (tmp_path / "a" / "b", manifest.parent / "a" / "b"):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    for words in (["publish", "a/b", "--name", "own"], ["publish", "pvc://a/b"], ["run", str(manifest)]):
        assert invoke(words) == 0
    assert served == [
        (str(tmp_path / "a" / "b"), ["publisher"], "own", SYNC),
        ("pvc://a/b", ["publisher"], "weights", SYNC),
        (str(manifest.parent / "a" / "b"), ["publisher"], "mine", SYNC),
    ]
