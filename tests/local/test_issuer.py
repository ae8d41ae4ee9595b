"""A job's authority on one machine: kept in its folder, renewed in time, shown to nobody else."""

import errno
import threading
import time
from pathlib import Path

import pytest

from asyncflow.errors import ManifestError
from asyncflow.identity import ProcessIdentity
from asyncflow.local import issuer as module
from asyncflow.local.issuer import Issuer
from asyncflow.plan.certificates import PERIOD_S
from asyncflow.rpc.tls import Credentials


def test_who_opens_the_folder_again_goes_on_with_the_same_authority(tmp_path: Path) -> None:
    first = Issuer(tmp_path / "tls")
    again = Issuer(tmp_path / "tls")
    assert first.authority.certificate == again.authority.certificate
    assert first.credentials("driver").process == ProcessIdentity(again.authority.job, "driver", 0)
    assert Issuer(tmp_path / "other").authority.certificate != first.authority.certificate


def test_nobody_else_may_look_into_it(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "tls")
    issuer.issue("storage", 1)
    for path in (issuer.folder, *issuer.folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0


def test_only_who_uses_the_store_gets_its_password(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path / "tls")
    assert issuer.credentials("storage").secret("store") == issuer.credentials("holder").secret("store") != ""
    assert issuer.credentials("rollout").secret("store") == ""


def test_certificates_of_a_period_that_is_over_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(tmp_path / "tls")
    files = [issuer.issue(role) / "tls.crt" for role in ("driver", "storage")]
    before = [file.read_bytes() for file in files]
    issuer.renew()
    assert [file.read_bytes() for file in files] == before
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now - PERIOD_S)
    issuer.renew()
    assert not set(before) & {file.read_bytes() for file in files}
    assert Credentials(files[1].parent).process.role == "storage"


def test_certificates_are_renewed_for_as_long_as_the_job_lasts_however_often_the_disk_refuses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer(tmp_path / "tls")
    renewals: list[int] = []
    again = threading.Event()

    def renew() -> None:
        renewals.append(len(renewals))
        if len(renewals) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        again.set()

    monkeypatch.setattr(module, "_RENEW_S", 0.001)
    monkeypatch.setattr(issuer, "renew", renew)
    with issuer.renewing() as same:
        assert same is issuer
        assert again.wait(20)
    ended = len(renewals)
    time.sleep(0.02)
    assert len(renewals) == ended


@pytest.mark.parametrize("content", ["", "seed", "job 00ff", "job " + "zz" * 32])
def test_a_folder_that_holds_no_authority_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "seed").write_text(content)
    with pytest.raises(ManifestError, match="no certificate authority") as error:
        Issuer(tmp_path)
    assert "zz" not in str(error.value)
