"""Tests of what is read of our Dockerfiles."""

from pathlib import Path

import pytest

from images import dockerfile

ROOT = Path(__file__).parents[2]


def test_the_operator_is_run_by_its_entry_point() -> None:
    read = dockerfile.read(ROOT / "images" / "operator" / "Dockerfile")
    assert read.extras == ("operator",)
    assert (read.config["Entrypoint"], read.config["Cmd"]) == (["asyncflow-operator"], ["run"])
    assert (read.config["User"], read.config["WorkingDir"]) == ("65532:65532", "/tmp")
    assert "PATH=/opt/asyncflow/bin:/usr/local/sbin:" in " ".join(read.config["Env"])


def test_the_runtime_has_its_extras_and_no_entry_point() -> None:
    read = dockerfile.read(ROOT / "images" / "runtime-cpu" / "Dockerfile")
    assert read.extras == ("torch", "lora", "gym", "math", "data", "mooncake", "redis")
    assert read.packages == ("libcurl4", "libibverbs1", "libnuma1", "redis-server")
    assert read.config["Entrypoint"] == []
    assert "HOME=/tmp" in read.config["Env"]


def test_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text('FROM base\nRUN pip install ".[torch]"\n')
    with pytest.raises(ValueError, match="RUN is not supported"):
        dockerfile.read(file)
