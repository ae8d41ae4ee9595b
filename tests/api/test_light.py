"""Importing the contract or the plan is quick and brings nothing heavy with it."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "kopf", "aiohttp", "numpy", "rich")


@pytest.mark.process
@pytest.mark.parametrize("module", ["asyncflow.api", "asyncflow.api.load", "asyncflow.api.crd", "asyncflow.plan"])
def test_an_import_brings_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {set(HEAVY)!r}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == ""


def test_names_are_found_when_they_are_used() -> None:
    import asyncflow.api as api

    assert {name for name in api.__all__ if getattr(api, name).__name__ != name} == set()
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = api.nothing_of_the_kind
