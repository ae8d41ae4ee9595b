"""Prompts that are put while a job runs: each has one serial for ever, whatever is put again, or killed in between."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.api.learning import EvalDataSpec, TrainDataSpec
from asyncflow.data.base import Message, Prompt
from asyncflow.data.put import PutSource
from asyncflow.data.sources import open_source
from asyncflow.errors import ManifestError, Refused
from asyncflow.session.engines import _prompts_of

ALL = [Prompt(question=f"{n}\n+ 1", answer=n + 1, meta={"n": n}, messages=(Message("user", "é"),)) for n in range(12)]


def source(file: Path) -> PutSource:
    found = PutSource()
    found.keep(file)
    return found


def questions(found: PutSource) -> list[Prompt]:
    return [found.prompt(serial) for serial in range(found.available)]


@given(calls=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12), cut=st.integers(0, 40))
def test_whatever_is_put_again_or_cut_off_each_prompt_has_its_serial(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[int, int]], cut: int
) -> None:
    file = tmp_path_factory.mktemp("put") / "prompts.jsonl"
    found, most = source(file), 0
    for first, count in calls:
        some = ALL[first : first + count]
        if first > found.available:
            with pytest.raises(Refused, match="is not the next serial"):
                found.put(some, first=first)
        else:
            most = max(most, first + len(some))
            assert found.put(some, first=first) == most
        assert questions(found) == ALL[:most]
    with file.open("ab") as unfinished:
        unfinished.write(b'{"question": "half of a line, which nobody acknowledged"'[:cut])
    again = source(file)
    assert questions(again) == ALL[:most]
    assert again.put(ALL[most:], first=most) == len(ALL)
    assert questions(source(file)) == ALL


def test_two_that_put_do_not_overwrite_each_other(tmp_path: Path) -> None:
    found = source(tmp_path / "prompts.jsonl")
    found.put(ALL[:2], first=0)
    with pytest.raises(Refused, match="other prompts already have these serials"):
        found.put([ALL[5]], first=1)
    assert questions(found) == ALL[:2]


def test_a_full_disk_adds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = source(tmp_path / "prompts.jsonl")
    found.put(ALL[:1], first=0)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            found.put(ALL[1:4], first=1)
    assert found.available == 1
    assert found.put(ALL[1:3], first=1) == 3
    assert questions(source(tmp_path / "prompts.jsonl")) == ALL[:3]


def test_a_file_that_is_new_keeps_its_name_when_the_power_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("asyncflow.durable.sync", synced.append)
    found = source(tmp_path / "prompts.jsonl")
    for serial in range(2):
        found.put(ALL[serial : serial + 1], first=serial)
    assert synced == [tmp_path]


def test_a_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"question": "1 + 1"}\n{"answer": 2}\n')
    with pytest.raises(ManifestError, match="line 2 is not a prompt"):
        source(tmp_path / "prompts.jsonl")


def test_only_training_prompts_are_put_and_nothing_of_it_is_configured(tmp_path: Path) -> None:
    opened = open_source(TrainDataSpec(source="put://"), workdir=tmp_path, cache=tmp_path, where="data.train")
    assert isinstance(opened, PutSource)
    for configured in (TrainDataSpec(source="put://there"), TrainDataSpec(source="put://", config={"split": "hash"})):
        with pytest.raises(ManifestError, match="put:// has no settings"):
            open_source(configured, workdir=tmp_path, cache=tmp_path, where="data.train")
    with pytest.raises(ManifestError, match="is not a source"):
        open_source(EvalDataSpec(source="put://", size=4), workdir=tmp_path, cache=tmp_path, where="data.eval")


@pytest.mark.parametrize("answer", [10**30, "\ud800"])
def test_a_prompt_that_no_message_can_hold_is_refused_by_its_number(answer: object) -> None:
    with pytest.raises(ManifestError, match="prompt 1 is invalid"):
        _prompts_of(["1+1", {"question": "1+1", "answer": answer}])
