from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncflow import __version__
from asyncflow.errors import ManifestError
from asyncflow_operator.main import app
from asyncflow_operator.settings import PREFIX, Settings, settings


def test_every_setting_is_an_option_and_a_variable() -> None:
    shown = CliRunner().invoke(app, ["run", "--help"]).output
    assert all(f"--{name.replace('_', '-')}" in shown for name in Settings.model_fields)
    options = {option.name: option for option in app.commands["run"].params if option.name != "help"}
    assert {name: option.envvar for name, option in options.items()} == {
        name: f"{PREFIX}{name.upper()}" for name in Settings.model_fields
    }


def test_lists_are_separated_by_commas() -> None:
    chosen = settings({"key_file": "/k", "namespaces": "a, b,", "watchers": ""})
    assert (chosen.namespaces, chosen.watchers) == (("a", "b"), ())


def test_a_wrong_value_is_one_line_that_names_option_and_variable() -> None:
    with pytest.raises(ManifestError, match=r"--workers: .*ASYNCFLOW_OPERATOR_WORKERS"):
        settings({"key_file": "/k", "workers": "0"})


def test_a_master_secret_is_read_without_the_line_end_and_may_not_be_short(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("x" * 32 + "\n")
    assert settings({"key_file": str(file)}).master_secret() == b"x" * 32
    file.write_text("short")
    with pytest.raises(ManifestError, match="16 random bytes"):
        settings({"key_file": str(file)}).master_secret()


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"], prog_name="asyncflow-operator").output.split() == [
        "asyncflow-operator",
        __version__,
    ]
