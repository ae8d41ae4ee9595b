"""TLS between processes: who is let in, who is refused and why, and certificates that are renewed meanwhile."""

import contextlib
import logging
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncflow.api.names import TLS_ENV
from asyncflow.errors import ManifestError
from asyncflow.identity import ProcessIdentity
from asyncflow.plan.certificates import Authority, Leaf, period_of
from asyncflow.rpc import tls
from asyncflow.rpc.tls import Credentials, PeerRefused

JOB = "job-7"
AUTHORITY = Authority(seed=bytes(32), job=JOB)
Given = Callable[..., Path]


def _shaken(caller: ssl.SSLContext, answerer: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Shake hands within this process. Raises what either side says first."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = caller.wrap_bio(back, there), answerer.wrap_bio(there, back, server_side=True)
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                waiting.remove(end)
    return ends


def _met(caller: Path, answerer: Path) -> tuple[ProcessIdentity, ProcessIdentity]:
    """Return whom the answerer met, and whom the caller."""
    ours, theirs = Credentials(caller), Credentials(answerer)
    one, other = _shaken(ours.client(), theirs.server())
    return theirs.peer(other), ours.peer(one)


def _refused(caller: ssl.SSLContext, answerer: Path) -> str:
    """Return why the answerer refuses a caller."""
    theirs = Credentials(answerer)
    with pytest.raises((ssl.SSLError, PeerRefused)) as refused:
        theirs.peer(_shaken(caller, theirs.server())[1])
    return tls.refusal(refused.value).reason


def _with(folder: Path | None) -> ssl.SSLContext:
    """Return a context that believes every certificate, and shows what lies in ``folder``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def test_each_side_learns_who_the_other_is(given: Given):
    met = _met(given("rollout", 3), given("controller", 0))
    assert met == (ProcessIdentity(JOB, "rollout", 3), ProcessIdentity(JOB, "controller", 0))


def test_a_certificate_of_another_authority_is_refused(given: Given):
    stranger = given("rollout", seed=b"s" * 32)
    assert _refused(_with(stranger), given("driver")) == "other_authority"


def test_an_expired_certificate_is_refused(given: Given):
    assert _refused(_with(given("rollout", periods=-4)), given("driver")) == "expired"


def test_a_certificate_that_is_not_valid_yet_is_refused(given: Given):
    assert _refused(_with(given("rollout", periods=2)), given("driver")) == "expired"


def test_a_certificate_that_names_another_job_is_refused(given: Given):
    assert _refused(_with(given("rollout", named="job-8")), given("driver")) == "other_job"


def test_a_certificate_that_names_no_process_is_refused(given: Given):
    assert _refused(_with(given("rollout", named="a/b")), given("driver")) == "no_identity"


def test_who_shows_no_certificate_is_refused(given: Given):
    assert _refused(_with(None), given("driver")) == "no_certificate"


def test_an_older_tls_is_refused(given: Given):
    old = _with(None)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert _refused(old, given("driver")) == "no_tls"


def test_plain_text_is_refused(given: Given):
    came = ssl.MemoryBIO()
    came.write(b"GET / HTTP/1.1\r\n\r\n")
    end = Credentials(given("driver")).server().wrap_bio(came, ssl.MemoryBIO(), server_side=True)
    with pytest.raises(ssl.SSLError) as refused:
        end.do_handshake()
    assert tls.refusal(refused.value).reason == "no_tls"


def test_a_caller_that_ends_the_handshake_is_counted():
    assert tls.refusal(ConnectionResetError()).reason == "hung_up"


def test_a_caller_refuses_a_server_of_another_authority(given: Given):
    imposter = given("controller", seed=b"s" * 32)
    with pytest.raises(ssl.SSLError) as refused:
        _met(given("rollout"), imposter)
    assert tls.refusal(refused.value).reason == "other_authority"


def test_the_end_of_a_certificate_is_known(given: Given):
    one, _ = _shaken(Credentials(given("rollout")).client(), Credentials(given("driver")).server())
    assert 5 * 86_400 < tls.expires_in(one) <= 7 * 86_400


def test_a_renewed_certificate_is_shown_to_the_next_peer(given: Given, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tls, "_CHECK_INTERVAL_S", 0.0)
    ours, theirs = Credentials(given("rollout", 3)), Credentials(given("controller"))

    def serial() -> int:
        found = _shaken(ours.client(), theirs.server())[1].getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)

    before = serial()
    assert serial() == before
    given("rollout", 3, periods=-1)
    assert serial() != before
    assert ours.reload_errors == 0


def test_files_that_do_not_belong_together_are_not_used_yet(
    given: Given, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tls, "_CHECK_INTERVAL_S", 0.0)
    answerer, folder = given("controller"), given("rollout", 3)
    ours, theirs = Credentials(folder), Credentials(answerer)
    other = AUTHORITY.leaf("rollout", 3, period=period_of(time.time()) - 1)
    (folder / "tls.crt").write_bytes(other.certificate)
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            _shaken(ours.client(), theirs.server())
    assert ours.reload_errors == 2
    assert "cannot be used yet" in caplog.text
    (folder / "tls.key").write_bytes(other.key)
    _shaken(ours.client(), theirs.server())
    assert ours.reload_errors == 2


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nsecret\n-----END CERTIFICATE-----\n"])
def test_files_that_cannot_be_used_are_one_error_that_shows_nothing_of_them(given: Given, name: str, content):
    folder = given("rollout")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(ManifestError, match="the certificate of this process cannot be used") as error:
        Credentials(folder)
    assert "secret" not in str(error.value)
    assert str(folder) in str(error.value)


def test_an_own_certificate_that_has_expired_is_said_so(given: Given):
    with pytest.raises(ManifestError, match="expired"):
        Credentials(given("rollout", periods=-4))


def test_credentials_are_found_by_their_variable(given: Given, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TLS_ENV, raising=False)
    assert Credentials.of_environment() is None
    monkeypatch.setenv(TLS_ENV, str(given("storage", 2)))
    found = Credentials.of_environment()
    assert found is not None
    assert found.process == ProcessIdentity(JOB, "storage", 2)
    assert repr(found) == "Credentials(asyncflow://job-7/storage/2)"


def test_a_named_folder_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TLS_ENV, str(tmp_path / "nowhere"))
    with pytest.raises(ManifestError, match="nowhere"):
        Credentials.of_environment()


def test_only_the_owner_may_read_what_is_kept(given: Given):
    folder = given("rollout")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "ca.crt": 0o600,
        "tls.crt": 0o600,
        "tls.key": 0o600,
    }


def test_openssl_sees_tls_1_3_and_that_a_certificate_is_asked_for(given: Given):
    """A client that is not AsyncFlow's sees the protocol of its server, and that nothing goes without a certificate."""
    theirs, folder = Credentials(given("controller")), given("rollout", 3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-CAfile", str(folder / "ca.crt")]
        command += ["-cert", str(folder / "tls.crt"), "-key", str(folder / "tls.key"), "-verify_return_error", "-brief"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as seen:
            with theirs.server().wrap_socket(listening.accept()[0], server_side=True) as end:
                assert end.version() == "TLSv1.3"
                assert str(ProcessIdentity(JOB, "rollout", 3).uri) in str(end.getpeercert())
            said = seen.communicate(timeout=10)[0].decode()
    assert "Protocol version: TLSv1.3" in said
    assert "Verification: OK" in said
    assert "CN = controller-0" in said or "CN=controller-0" in said


def test_a_leaf_is_written_as_it_is(given: Given):
    leaf: Leaf = AUTHORITY.leaf("rollout", 0, period=period_of(time.time()))
    folder = given("rollout")
    assert (folder / "tls.crt").read_bytes() == leaf.certificate
    assert (folder / "ca.crt").read_bytes() == AUTHORITY.certificate
