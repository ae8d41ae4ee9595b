"""Keys that nobody has to read."""

import base64
import re
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.net.keys import Keys
from asyncflow_operator.desired import Desired
from asyncflow_operator.desired.keys import key, secret_name, token, z85
from asyncflow_operator.observed import Owner

JOB = Owner(kind="RLJob", namespace="a", name="math", uid="uid-1")
MASTER = b"m" * 32


def test_a_key_is_written_in_z85():
    assert z85(bytes.fromhex("864fd26fb559f75b")) == "HelloWorld"  # the example of rfc.zeromq.org/spec/32


@given(st.binary(min_size=32, max_size=32))
def test_every_key_is_forty_characters_that_the_runtime_takes_and_no_two_are_alike(raw):
    text = z85(raw)
    assert Keys(secret=text.encode()).domain != Keys(secret=z85(bytes([raw[0] ^ 1]) + raw[1:]).encode()).domain


def test_the_runtime_takes_the_key(desired: Desired, job_state, tmp_path: Path):
    secret = next(each for each in desired.supporting(job_state()) if each["kind"] == "Secret")
    assert secret["metadata"]["name"] == secret_name(MASTER, job_state().owner)
    assert secret["immutable"]
    written = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    file = tmp_path / "key"
    file.write_text(written["key"])
    assert Keys.load(file).domain == Keys.load(file).domain
    assert written["token"] == desired.token(job_state().owner)
    assert len(written["token"]) == 64


def test_keys_belong_to_one_owner_and_one_master():
    owners = [JOB, replace(JOB, uid="uid-2"), replace(JOB, kind="TransferQueue")]
    made = {key(master, owner) for owner in owners for master in (MASTER, b"n" * 32)}
    assert len(made) == 6
    assert key(MASTER, replace(JOB, name="other", generation=9)) == key(MASTER, JOB)
    assert key(MASTER, JOB) != token(MASTER, JOB)


def test_the_name_of_a_secret_is_known_to_its_operator_alone():
    names = {secret_name(master, replace(JOB, uid=uid)) for uid in ("uid-1", "uid-2") for master in (MASTER, b"n" * 32)}
    assert len(names) == 4
    assert all(re.fullmatch(r"math-keys-[0-9a-f]{16}", name) for name in names)
    assert not any(name.removeprefix("math-keys-") in token(MASTER, JOB) for name in names)


def test_the_master_secret_has_no_printed_form(desired: Desired):
    assert "m" * 8 not in repr(desired)
