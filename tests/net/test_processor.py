"""Whether idle processor time may be used: what cgroups of both versions say of a quota."""

import inspect
import os
from pathlib import Path

import pytest

from asyncflow.net import processor

QUOTAS = {
    "a pod's limit, in its own namespace": ("0::/\n", {"cpu.max": "50000 100000\n"}, True),
    "a pod without a limit": ("0::/\n", {"cpu.max": "max 100000\n"}, False),
    "a service's": ("0::/system.slice/run.service\n", {"system.slice/run.service/cpu.max": "20000 100000\n"}, True),
    "a slice's": ("0::/system.slice/run.service\n", {"system.slice/cpu.max": "20000 100000\n"}, True),
    "another one's": ("0::/system.slice/run.service\n", {"user.slice/cpu.max": "20000 100000\n"}, False),
    "the first version's": (
        "3:cpu,cpuacct:/pod\n1:name=systemd:/x\n",
        {"cpu,cpuacct/cpu.cfs_quota_us": "50000\n"},
        True,
    ),
    "none of the first version": ("3:cpu,cpuacct:/pod\n", {"cpu,cpuacct/pod/cpu.cfs_quota_us": "-1\n"}, False),
    "what cannot be read": ("0::/gone\n", {}, False),
    "what says nothing": ("nonsense\n0::/\n", {"cpu.max": "\n"}, False),
}


@pytest.mark.parametrize(("mine", "files", "limited"), QUOTAS.values(), ids=QUOTAS)
def test_a_quota_of_any_cgroup_above_counts(tmp_path: Path, mine: str, files: dict[str, str], limited: bool) -> None:
    (tmp_path / "mine").write_text(mine)
    for name, text in files.items():
        (tmp_path / "cgroups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroups" / name).write_text(text)
    assert processor.has_quota(mine=tmp_path / "mine", cgroups=tmp_path / "cgroups") is limited


def test_one_core_a_quota_or_the_switch_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    may = inspect.unwrap(processor.may_look_on)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(processor, "has_quota", lambda: False)
    monkeypatch.delenv(processor.BUSY_WAIT_ENV, raising=False)
    assert may()
    monkeypatch.setenv(processor.BUSY_WAIT_ENV, "off")
    assert not may()
    monkeypatch.delenv(processor.BUSY_WAIT_ENV)
    monkeypatch.setattr(processor, "has_quota", lambda: True)
    assert not may()
    monkeypatch.setattr(processor, "has_quota", lambda: False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert not may()
