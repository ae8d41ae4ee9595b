"""Who serves beyond this machine without a key says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from asyncflow.net.keys import Keys
from asyncflow.roles.base import run_role
from asyncflow.roles.post import JobPost, RoleOptions

COUNTING = Path(__file__).parents[2] / "examples" / "counting.yaml"


@pytest.mark.parametrize(
    ("host", "keyed", "warned"), [("127.0.0.1", False, False), ("10.0.0.7", True, False), ("10.0.0.7", False, True)]
)
def test_without_a_key_a_role_off_loopback_warns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    host: str,
    keyed: bool,
    warned: bool,
) -> None:
    monkeypatch.setenv("ASYNCFLOW_HOST", host)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    if keyed:
        Keys.generate(tmp_path / "key")
        monkeypatch.setenv("ASYNCFLOW_KEY_FILE", str(tmp_path / "key"))
    seen: list[JobPost] = []

    async def serve(post: JobPost) -> None:
        seen.append(post)

    options = RoleOptions(role="storage", job=COUNTING, driver="tcp://a:1", index=0, attempt=0, workdir=tmp_path)
    assert run_role(serve, options) == 0
    assert [(post.host, post.keys is not None) for post in seen] == [(host, keyed)]
    assert ("there is no key: whoever reaches 10.0.0.7" in capfd.readouterr().err) is warned
