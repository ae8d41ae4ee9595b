"""Plug-ins by entry points, and their own options."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from asyncflow import plugins
from asyncflow.errors import ManifestError
from asyncflow.plugins import installed, load_plugin, read_options
from asyncflow.queue.storage.backend import Backend
from asyncflow.rollout.engines.base import RolloutEngine

ENGINES = "asyncflow.rollout_engines"


class Options(msgspec.Struct, frozen=True):
    pace: float = 1.0
    loud: bool = False


class Keyed(msgspec.Struct, frozen=True):
    key: Literal["a", "b"] = "a"
    mode: Literal["major", "minor"] = "major"


def test_what_is_installed_is_found_by_its_name() -> None:
    assert installed(ENGINES) == ["simulated", "transformers", "vllm"]
    made = load_plugin(ENGINES, "simulated", kind=RolloutEngine, where="here")
    assert made.__name__ == "SimulatedEngine"


def test_what_is_put_on_the_path_is_found_and_what_is_taken_from_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "dice-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: dice\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{ENGINES}]\ndice = dice:Dice\n")
    with monkeypatch.context() as path:
        path.syspath_prepend(tmp_path)
        assert "dice" in installed(ENGINES)
    assert "dice" not in installed(ENGINES)


def test_what_cannot_be_used_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ManifestError, match=f"here: no installed package offers 'pigeon' in {ENGINES}. .*: simulated, transformers"
    ):
        load_plugin(ENGINES, "pigeon", kind=RolloutEngine, where="here")
    with pytest.raises(ManifestError, match="'simulated' is no Backend"):
        load_plugin(ENGINES, "simulated", kind=Backend, where="here")
    for value, why in (
        ("nowhere_at_all:A", "No module named 'nowhere_at_all'"),
        ("json:A", "'json' has no attribute 'A'"),
    ):
        broken = EntryPoint(name="broken", value=value, group=ENGINES)
        monkeypatch.setattr(plugins, "_offered", lambda group, only=broken: {only.name: only})
        with pytest.raises(ManifestError, match=f"'broken' cannot be imported: .*{why}"):
            load_plugin(ENGINES, "broken", kind=RolloutEngine, where="here")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(:", r"SyntaxError: .* \(faulty\.py:1\)"),
        ("import os\nraise ValueError(3)", r"ValueError: 3 \(faulty\.py:2\)"),
        ("import nowhere_at_all", r"No module named 'nowhere_at_all' \(faulty\.py:1\)"),
    ],
)
def test_a_module_that_fails_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    (tmp_path / "faulty.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    broken = EntryPoint(name="broken", value="faulty:A", group=ENGINES)
    monkeypatch.setattr(plugins, "_offered", lambda group: {broken.name: broken})
    with pytest.raises(ManifestError, match=f"here: 'broken' cannot be imported: .*{why}"):
        load_plugin(ENGINES, "broken", kind=RolloutEngine, where="here")


def test_a_class_without_a_required_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = EntryPoint(name="bare", value=f"{RolloutEngine.__module__}:RolloutEngine", group=ENGINES)
    monkeypatch.setattr(plugins, "_offered", lambda group: {bare.name: bare})
    with pytest.raises(ManifestError, match=r"here: 'bare': the class RolloutEngine lacks .*generate.*\. Define what"):
        load_plugin(ENGINES, "bare", kind=RolloutEngine, where="here")


class Animal:
    def speak(self) -> str:
        return ""


class Misspelt(Animal):
    def speek(self) -> str:
        return "moo"


class Helped(Misspelt):
    def speak(self) -> str:
        return self.speek()


def test_a_name_that_is_nearly_one_of_the_base_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {name: EntryPoint(name=name, value=f"{__name__}:{name}", group="own") for name in ("Misspelt", "Helped")}
    monkeypatch.setattr(plugins, "_offered", lambda group: points)
    told = r"here: 'Misspelt': nothing uses speek of the class Misspelt\. If it replaces speak of Animal, correct"
    with pytest.raises(ManifestError, match=told):
        load_plugin("own", "Misspelt", kind=Animal, where="here")
    assert load_plugin("own", "Helped", kind=Animal, where="here").__name__ == "Helped"


def test_options_have_a_meaning_or_are_refused() -> None:
    assert read_options({"pace": 2}, Options, where="here") == Options(pace=2.0)
    with pytest.raises(ManifestError, match=r"here: unknown option hue, size\. Known: pace, loud"):
        read_options({"size": 1, "hue": 2, "pace": 3}, Options, where="here")
    with pytest.raises(ManifestError, match=r"here: Expected `bool`, got `int`.*loud"):
        read_options({"loud": 3}, Options, where="here")
    with pytest.raises(ManifestError, match=r"Invalid enum value 'c' .*\. Set key to one of a, b$"):
        read_options({"key": "c", "mode": "minor"}, Keyed, where="here")
