"""Secrets that nobody has to read: which of them a pod sees, and what is in them."""

import base64
import contextlib
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncflow.api.names import CLIENT, OPERATOR
from asyncflow.errors import ManifestError
from asyncflow.identity import ProcessIdentity
from asyncflow.plan.certificates import period_of
from asyncflow.rpc import tls
from asyncflow.rpc.tls import Credentials
from asyncflow_operator.desired import Desired
from asyncflow_operator.desired.objects import family_of
from asyncflow_operator.desired.secrets import KEYS, LEAVES, OwnerSecrets, SecretPart, part_name
from asyncflow_operator.observed import JobState, Manifest, Owner

JOB = Owner(kind="RLJob", namespace="a", name="math", uid="uid-1")
MASTER = b"m" * 32
NOW = period_of(time.time())
ROLES = ("driver", "controller", "master", "holder", "storage", "trainer", "rollout")

JobStates = Callable[..., JobState]


def content(secret: Manifest) -> dict[str, bytes]:
    return {name: base64.b64decode(value) for name, value in secret["data"].items()}


def mounted(desired: Desired, state: JobState, role: str, index: int, *, period: int = NOW) -> dict[str, bytes]:
    """Return the files below /etc/asyncflow that come from Secrets, as a kubelet writes them for this pod."""
    parts = [KEYS, *ROLES, *(f"{each}-1" for each in ROLES)]
    by_name = {desired.secrets(state.owner).name(part): part for part in parts}
    files: dict[str, bytes] = {}
    for source in desired.pod(state, role, index, 0)["spec"]["volumes"][0]["projected"]["sources"]:
        if "secret" in source:
            name, _, chunk = by_name[source["secret"]["name"]].partition("-")
            part = SecretPart(role=name, first=int(chunk or 0) * LEAVES, leaves=LEAVES, period=period)
            held = content(desired.secret(state.owner, part))
            files |= {item["path"]: held[item["key"]] for item in source["secret"]["items"]}
    return files


@pytest.mark.parametrize(("role", "index"), [("driver", 0), ("rollout", 2), ("rollout", LEAVES + 1), ("storage", 1)])
def test_a_pod_is_the_process_of_its_certificate_and_has_no_other(
    desired: Desired, job_state: JobStates, tmp_path: Path, role: str, index: int
) -> None:
    state = job_state()
    files = mounted(desired, state, role, index)
    beside = {"driver": {"token"}, "storage": {"tls/store"}}.get(role, set())
    assert files.keys() == {"tls/ca.crt", "tls/tls.crt", "tls/tls.key"} | beside
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    credentials = Credentials(tmp_path / "tls")
    assert credentials.process == ProcessIdentity(state.owner.uid, role, index)
    assert bool(credentials.secret("store")) == (role == "storage")


def test_a_process_reads_its_certificate_again_when_the_kubelet_has_brought_another(
    desired: Desired, job_state: JobStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet writes all files into a new folder, and has one link name that instead of the old one."""
    state, looks = job_state(), iter(range(0, 100, 10))
    monkeypatch.setattr(tls, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    (tmp_path / "tls").symlink_to("..data/tls")
    serials = []
    for period in (NOW - 1, NOW):
        (tmp_path / f"..{period}" / "tls").mkdir(parents=True)
        for name, data in mounted(desired, state, "rollout", 1, period=period).items():
            (tmp_path / f"..{period}" / name).write_bytes(data)
        (tmp_path / "..new").symlink_to(f"..{period}")
        (tmp_path / "..new").rename(tmp_path / "..data")
        if not serials:
            credentials = Credentials(tmp_path / "tls")
        credentials.look()
        serials.append(shown(credentials))
    assert credentials.reload_errors == 0
    assert len(set(serials)) == 2


def shown(credentials: Credentials) -> bytes:
    """Return the certificate that a process shows to whoever dials it."""
    ends = [ssl.MemoryBIO(), ssl.MemoryBIO()]
    client = credentials._client.wrap_bio(*ends)
    server = credentials._server.wrap_bio(*reversed(ends), server_side=True)
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return client.getpeercert(binary_form=True) or b""


def test_a_pod_of_a_rollout_sees_neither_the_trainers_key_nor_that_of_the_authority(
    desired: Desired, job_state: JobStates
) -> None:
    state = job_state(trainer={"replicas": 2})
    rollout, trainer = (mounted(desired, state, role, 0) for role in ("rollout", "trainer"))
    assert rollout["tls/ca.crt"] == trainer["tls/ca.crt"]
    assert rollout["tls/tls.key"] != trainer["tls/tls.key"]
    whole = content(desired.secret(state.owner, SecretPart(role="rollout", leaves=8, period=NOW)))
    assert whole.keys() == {"ca.crt", *(f"{index}.{kind}" for index in range(8) for kind in ("crt", "key"))}
    trainers = content(desired.secret(state.owner, SecretPart(role="trainer", leaves=2, period=NOW)))
    assert not {whole[name] for name in whole.keys() - {"ca.crt"}} & set(trainers.values())
    assert whole["ca.crt"].count(b"BEGIN") == 1
    assert b"PRIVATE" not in whole["ca.crt"]


def test_a_full_secret_is_less_than_half_of_what_one_may_hold() -> None:
    secrets = OwnerSecrets(JOB, MASTER)
    part = SecretPart(role="rollout", first=9_984, leaves=LEAVES, period=NOW)
    assert sum(map(len, content(secrets.make(family_of(JOB), part)).values())) < 1 << 19
    assert part.name == part_name("rollout", 10_000) == "rollout-39"


def test_the_same_secret_is_the_same_to_the_byte_and_another_period_another(desired: Desired) -> None:
    part = SecretPart(role="rollout", leaves=3, period=NOW)
    assert desired.secret(JOB, part) == desired.secret(JOB, part)
    later = desired.secret(JOB, replace(part, period=NOW + 1))
    assert later["metadata"]["name"] == desired.secret(JOB, part)["metadata"]["name"]
    same = {key for key, value in later["data"].items() if desired.secret(JOB, part)["data"][key] == value}
    assert same == {"ca.crt"}


def test_the_certificate_of_a_person_lies_as_the_runtime_reads_it(desired: Desired, tmp_path: Path) -> None:
    queue = replace(JOB, kind="TransferQueue")
    made = desired.secret(queue, SecretPart(role=CLIENT, leaves=1, period=NOW))
    for name, data in content(made).items():
        (tmp_path / name).write_bytes(data)
    assert Credentials(tmp_path).process == ProcessIdentity("uid-1", "client", 0)
    assert made["metadata"]["labels"]["asyncflow.dev/role"] == "client"


def test_what_the_operator_shows_to_a_driver_is_of_the_same_authority(desired: Desired, tmp_path: Path) -> None:
    for name, data in desired.secrets(JOB).operator(NOW).items():
        (tmp_path / name).write_bytes(data)
    assert Credentials(tmp_path).process == ProcessIdentity("uid-1", OPERATOR, 0)
    (tmp_path / "ca.crt").write_bytes(desired.secrets(replace(JOB, uid="uid-2")).operator(NOW)["ca.crt"])
    with pytest.raises(ManifestError):
        Credentials(tmp_path)


def test_token_and_password_are_in_a_secret_of_their_own(desired: Desired) -> None:
    held = content(desired.secret(JOB, SecretPart(role=KEYS)))
    assert held.keys() == {"token", "store"}
    assert all(re.fullmatch(rb"[0-9a-f]{64}", value) for value in held.values())
    assert len(set(held.values())) == 2


def test_secrets_belong_to_one_owner_and_one_master() -> None:
    owners = [JOB, replace(JOB, uid="uid-2"), replace(JOB, kind="TransferQueue")]
    made = [OwnerSecrets(owner, master).operator(NOW) for owner in owners for master in (MASTER, b"n" * 32)]
    assert len({each["tls.key"] for each in made}) == len({each["ca.crt"] for each in made}) == 6
    assert OwnerSecrets(replace(JOB, name="other", generation=9), MASTER).operator(NOW) == made[0]


def test_the_name_of_a_secret_is_known_to_its_operator_alone() -> None:
    parts = (KEYS, "rollout", "rollout-1", "trainer", CLIENT)
    names = {
        OwnerSecrets(replace(JOB, uid=uid), master).name(part)
        for part in parts
        for uid in ("uid-1", "uid-2")
        for master in (MASTER, b"n" * 32)
    }
    assert len(names) == 20
    assert all(re.fullmatch(r"math-(keys|tls-[a-z]+(-1)?)-[0-9a-f]{16}", name) for name in names)
    assert len({name[-16:] for name in names}) == 20


def test_the_master_secret_has_no_printed_form(desired: Desired, job_state: JobStates) -> None:
    assert "m" * 8 not in repr(desired)
    assert "m" * 8 not in repr(desired.secrets(JOB))
