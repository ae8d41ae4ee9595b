"""Certificates: the same each time, valid around their period, and naming one process of one job."""

import datetime
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.identity import ProcessIdentity
from asyncflow.plan.certificates import PERIOD_S, SEED_BYTES, Authority, period_of

SEED = bytes(range(SEED_BYTES))
HOUR = datetime.timedelta(hours=1)
DAY = datetime.timedelta(days=1)


def _parsed(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def test_what_is_made_again_is_the_same_to_the_byte():
    first, again = (Authority(seed=SEED, job="job-7") for _ in range(2))
    assert first.certificate == again.certificate
    assert first.leaf("rollout", 3, period=10_300) == again.leaf("rollout", 3, period=10_300)
    assert first.secret("token") == again.secret("token")


@pytest.mark.parametrize(
    "other",
    [
        Authority(seed=SEED, job="job-8").leaf("rollout", 3, period=10_300),
        Authority(seed=SEED[::-1], job="job-7").leaf("rollout", 3, period=10_300),
        Authority(seed=SEED, job="job-7").leaf("trainer", 3, period=10_300),
        Authority(seed=SEED, job="job-7").leaf("rollout", 4, period=10_300),
        Authority(seed=SEED, job="job-7").leaf("rollout", 3, period=10_301),
    ],
    ids=["job", "seed", "role", "index", "period"],
)
def test_whatever_differs_gives_another_key_and_serial(other):
    leaf = Authority(seed=SEED, job="job-7").leaf("rollout", 3, period=10_300)
    assert leaf.key != other.key
    assert _parsed(leaf.certificate).serial_number != _parsed(other.certificate).serial_number


def test_secrets_differ_by_purpose_and_from_another_jobs():
    one, other = Authority(seed=SEED, job="job-7"), Authority(seed=SEED, job="job-8")
    assert len({one.secret("token"), one.secret("store"), other.secret("token"), SEED.hex()}) == 4


def test_a_certificate_names_its_process_and_nothing_else():
    found = _parsed(Authority(seed=SEED, job="job-7").leaf("rollout", 3, period=10_300).certificate)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["asyncflow://job-7/rollout/3", "rollout-3"]
    assert ProcessIdentity.of(names[0].value) == ProcessIdentity("job-7", "rollout", 3)
    usages = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_certificate_is_valid_an_hour_before_its_period_and_five_days_after_it():
    found = _parsed(Authority(seed=SEED, job="job-7").leaf("driver", 0, period=10_300).certificate)
    begin = datetime.datetime.fromtimestamp(10_300 * PERIOD_S, datetime.UTC)
    assert found.not_valid_before_utc == begin - HOUR
    assert found.not_valid_after_utc == begin + 7 * DAY


@given(st.floats(min_value=0, max_value=1e11))
def test_a_period_is_two_days(now):
    assert period_of(now) * PERIOD_S <= now < (period_of(now) + 1) * PERIOD_S


def test_an_authority_signs_processes_and_no_authorities():
    found = _parsed(Authority(seed=SEED, job="job-7").certificate)
    basic = found.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (basic.ca, basic.path_length) == (True, 0)


@pytest.mark.parametrize("period", [0, 10_300], ids=["the clock begins", "2026"])
def test_openssl_verifies_a_certificate_under_its_own_authority_only(tmp_path: Path, period: int):
    one, other = Authority(seed=SEED, job="job-7"), Authority(seed=SEED, job="job-8")
    at = period * PERIOD_S + 1
    (tmp_path / "leaf").write_bytes(one.leaf("rollout", 3, period=period).certificate)
    (tmp_path / "own").write_bytes(one.certificate)
    (tmp_path / "other").write_bytes(other.certificate)

    def verified(authority: str, *, at: int) -> bool:
        command = ["openssl", "verify", "-x509_strict", "-attime", str(at), "-CAfile", authority, "leaf"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0

    assert verified("own", at=at)
    assert not verified("other", at=at)
    assert not verified("own", at=at + 8 * 86_400)


def test_a_key_is_not_shown():
    authority = Authority(seed=SEED, job="job-7")
    leaf = authority.leaf("rollout", 3, period=10_300)
    secret = leaf.key.decode().splitlines()[1]
    assert secret not in repr(leaf)
    assert SEED.hex() not in repr(authority)


def test_a_seed_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        Authority(seed=b"short", job="job-7")


@pytest.mark.parametrize(
    "uri",
    ["", "asyncflow://job/rollout", "asyncflow://job/rollout/03", "https://job/rollout/3", "asyncflow://a/b/rollout/3"],
)
def test_what_names_no_process_is_none(uri):
    assert ProcessIdentity.of(uri) is None


@given(
    st.from_regex(r"[a-z0-9-]{1,36}", fullmatch=True), st.sampled_from(["rollout", "driver"]), st.integers(0, 10**9 - 1)
)
def test_a_process_is_found_again_by_its_name(job, role, index):
    process = ProcessIdentity(job, role, index)
    assert ProcessIdentity.of(process.uri) == process
