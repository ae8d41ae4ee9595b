"""Prompts of JSONL, Parquet and saved data sets: the same tasks whatever the form, in memory that does not grow."""

import gc
import json
import os
import sys
import tracemalloc
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict

from asyncflow.api.learning import EvalDataSpec, TrainDataSpec
from asyncflow.data.base import Prompt
from asyncflow.data.files import FileSource
from asyncflow.data.sources import open_source
from asyncflow.errors import ManifestError

SCHEMES = ("jsonl", "parquet", "dataset")
TURNS = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1"}]
ROWS = [
    {"ask": TURNS, "reward": {"truth": "2", "style": "rule"}, "info": {"index": 0, "tags": ["a", "b"]}, "level": 1.5},
    {"ask": TURNS[1:], "reward": {"truth": "2", "style": "rule"}, "info": {"index": 1, "tags": []}, "level": None},
]


def write(folder: Path, scheme: str, rows: list[dict]) -> str:
    path = folder / f"data-{scheme}"
    if scheme == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif scheme == "parquet":
        path.mkdir()
        half = len(rows) // 2
        for part, some in (("b/2", rows[half:]), ("a/1", rows[:half])):
            (path / part).parent.mkdir()
            Dataset.from_list(some, features=Dataset.from_list(rows).features).to_parquet(path / f"{part}.parquet")
    else:
        Dataset.from_list(rows).save_to_disk(path)
    return f"{scheme}://{path.name}"


def opened(folder: Path, source: str, *, size: int | None = None, **config: object) -> FileSource:
    given = {"source": source, "config": config, "seed": 3}
    data = EvalDataSpec(**given, size=size) if size else TrainDataSpec(**given)
    source_ = open_source(data, workdir=folder, cache=folder / "cache", where="data.eval" if size else "data.train")
    assert isinstance(source_, FileSource)
    return source_


@pytest.mark.parametrize("scheme", SCHEMES)
def test_columns_are_chosen_by_name_and_dots_lead_into_nested_ones(tmp_path: Path, scheme: str) -> None:
    named = {"prompt": "ask", "answer": "reward.truth"}
    source = opened(tmp_path, write(tmp_path, scheme, ROWS), **named, meta=["info.index", "level"])
    prompts = sorted((source.prompt(serial) for serial in range(2)), key=lambda prompt: prompt.meta["info.index"])
    assert [prompt.meta for prompt in prompts] == [{"info.index": 0, "level": 1.5}, {"info.index": 1, "level": None}]
    assert [len(prompt.messages) for prompt in prompts] == [2, 1]
    assert [prompt.answer for prompt in prompts] == ["2", "2"]
    assert {prompt.task for prompt in prompts} == {scheme}
    others = opened(tmp_path, f"{scheme}://data-{scheme}", **named).prompt(0).meta
    assert others.keys() == {"reward", "info", "level"}
    assert Prompt.unpack(prompts[0].packed()) == prompts[0]


def test_every_form_gives_the_same_prompts_in_the_same_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n % 90}", "answer": n} for n in range(100)]
    sources = [opened(tmp_path, write(tmp_path, scheme, rows)) for scheme in SCHEMES]
    asked = [[(p := source.prompt(serial)).question, p.answer] for source in sources for serial in range(200)]
    assert asked[:200] == asked[200:400] == asked[400:]
    assert {source.size for source in sources} == {90}, "of equal questions the first is kept"
    assert dict(map(tuple, asked))["q5"] == 5
    assert all(source.contains("q5") and not source.contains("q95") for source in sources)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_evaluation_takes_the_first_questions_of_a_file(tmp_path: Path, scheme: str) -> None:
    source = opened(tmp_path, write(tmp_path, scheme, [{"prompt": f"q{n}"} for n in range(40)]), size=8)
    assert {source.prompt(serial).question for serial in range(8)} == {f"q{n}" for n in range(8)}
    assert not any(source.contains(f"q{n}") for n in range(8, 200))
    with pytest.raises(ManifestError, match="41"):
        opened(tmp_path, f"{scheme}://data-{scheme}", size=41)


@pytest.mark.parametrize("scheme", ["jsonl", "dataset"])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, scheme: str) -> None:
    path, rows = tmp_path / "large", 1500
    text = "".join(f'{{"prompt": "q{n}", "answer": "{n:020000}"}}\n' for n in range(rows))
    path.with_suffix(".jsonl").write_text(text)
    if scheme == "dataset":
        Dataset.from_json(str(path.with_suffix(".jsonl")), cache_dir=str(tmp_path / "made")).save_to_disk(path)
    source_ = f"jsonl://{path}.jsonl" if scheme == "jsonl" else f"dataset://{path}"
    del text
    gc.collect()
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        source = opened(tmp_path, source_, answer="answer")
        for serial in range(0, rows, 10):
            source.prompt(serial)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert source.size == rows
    assert peak < 4 << 20, "of 30 MB"
    assert pa.total_allocated_bytes() - arrow < 4 << 20


def test_parquet_is_made_ready_once_and_only_its_used_columns(tmp_path: Path) -> None:
    source = write(tmp_path, "parquet", [{"prompt": f"q{n}", "answer": n, "page": "x" * 5000} for n in range(100)])
    opened(tmp_path, source, meta=[])
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
    assert len(made) == 1
    assert sum(path.stat().st_size for path in made) < 100_000
    opened(tmp_path, source, meta=[])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")} == made


def test_a_jsonl_file_that_is_replaced_stays_as_it_was_and_one_written_into_is_refused(tmp_path: Path) -> None:
    source = opened(tmp_path, write(tmp_path, "jsonl", [{"prompt": "old"}]))
    (tmp_path / "new").write_text('{"prompt": "new"}\n')
    (tmp_path / "new").replace(tmp_path / "data-jsonl")
    assert source.prompt(0).question == "old"
    again = opened(tmp_path, "jsonl://data-jsonl")
    with (tmp_path / "data-jsonl").open("a") as file:
        file.write('{"prompt": "more"}\n')
    os.utime(tmp_path / "data-jsonl")
    with pytest.raises(ManifestError, match="was written to"):
        again.prompt(0)


def test_lines_are_ended_by_line_feeds_alone(tmp_path: Path) -> None:
    long = "l" * 200_000
    text = f'\ufeff{{"prompt": "a\u2028b"}}\r\n\n{{"prompt": "{long}"}}\n  {{"prompt": "c"}}'
    (tmp_path / "data #1.jsonl").write_bytes(text.encode())
    source = opened(tmp_path, "data #1.jsonl")
    assert {source.prompt(serial).question for serial in range(3)} == {"a\u2028b", long, "c"}


def dataset_dict(folder: Path) -> None:
    rows = Dataset.from_list([{"prompt": "a"}])
    DatasetDict(train=rows, test=rows).save_to_disk(folder / "dict")


def test_a_split_is_a_folder_of_what_was_saved(tmp_path: Path) -> None:
    dataset_dict(tmp_path)
    assert opened(tmp_path, "dataset://dict/test").size == 1


@pytest.mark.parametrize(
    ("source", "config", "said"),
    [
        ("dataset://dict", {}, r"contains the splits test, train.*Name one split: dataset://PATH/SPLIT"),
        ("dataset://dict/valid", {}, r"is not a folder that save_to_disk .* next to it: test, train"),
        ("dataset://absent", {}, "is not a folder that save_to_disk"),
        ("dataset://broken", {}, r"broken: the data cannot be read"),
        ("dataset://none", {}, "there are no rows"),
        ("parquet://absent", {}, "there is no Parquet file at"),
        ("parquet://empty", {}, "there is no Parquet file at"),
        ("parquet://broken.parquet", {}, r"broken\.parquet: the data cannot be read"),
        ("parquet://none.parquet", {}, "there are no rows"),
        ("parquet://mixed", {}, "cannot be read.*same columns"),
        (
            "parquet://good.parquet",
            {"prompt": "text"},
            r"row 0: the row has no field 'text', like 2 of 2 rows.*row has: a",
        ),
        ("parquet://good.parquet", {"prompt": "n"}, r"row 0: the field 'n' is neither a string nor a list of messages"),
        ("parquet://good.parquet", {"prompt": "hole"}, r"row 1: the field 'hole' is neither"),
        ("parquet://good.parquet", {"answer": "truth"}, r"has no field 'truth'.*its fields: "),
        ("parquet://good.parquet", {"meta": ["levle"]}, r"has no field 'levle'"),
        ("parquet://good.parquet", {"meta": "level"}, "is invalid"),
        ("parquet://good.parquet", {"columns": []}, "unknown field `columns`"),
        ("parquet://good.parquet?prompt=a", {"prompt": "b"}, "prompt is set twice"),
        ("parquet://dated.parquet", {}, r"column 'day' has the type date32.*config\.meta.*of: prompt$"),
        ("parquet://nested.parquet", {}, r"column 'days' has the type .*date32.*which JSON cannot represent"),
        ("good.jsonl", {"answer": "truth"}, r"has no field 'truth'.*its fields: a, none, prompt"),
        ("good.jsonl", {"prompt": "none"}, r"'none' is neither a string nor a list of messages: .* Write a string, or"),
        ("good.csv", {}, r"good\.csv:1: the line is not JSON: .* Write one JSON object per line"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_when_it_is_opened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], source: str, config: dict, said: str
) -> None:
    dataset_dict(tmp_path)
    for folder in ("empty", "mixed", "broken"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    (tmp_path / "broken.parquet").write_text("no parquet")
    rows = {"prompt": ["p", "q"], "n": [1, 2], "hole": ["x", None], "a": ["1", "2"]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "good.parquet")
    Dataset.from_dict({"prompt": ["p"]}).to_parquet(tmp_path / "mixed" / "1.parquet")
    Dataset.from_dict({"prompt": [{"x": 1}]}).to_parquet(tmp_path / "mixed" / "2.parquet")
    pa.parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    Dataset.from_dict({"prompt": []}).save_to_disk(tmp_path / "none")
    Dataset.from_dict({"prompt": ["p"], "day": [date(2024, 1, 1)]}).to_parquet(tmp_path / "dated.parquet")
    nested = {"prompt": ["p"], "days": [[{"n": 1, "day": date(2024, 1, 1)}]]}
    Dataset.from_dict(nested).to_parquet(tmp_path / "nested.parquet")
    (tmp_path / "good.jsonl").write_text('{"prompt": "p", "a": "1", "none": []}')
    (tmp_path / "good.csv").write_text("prompt,a\np,1\n")
    capfd.readouterr()
    with pytest.raises(ManifestError, match=said):
        opened(tmp_path, source, **config)
    assert capfd.readouterr() == ("", ""), "nothing beside the error"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f'{{"prompt": "p", "answer": {10**30}}}', "cannot be sent.*ints"),
        ('{"prompt": "p", "answer": "\\ud800"}', "cannot be sent.*surrogates"),
        ('{"prompt": "p \\ud800", "answer": ""}', "cannot be sent.*surrogates"),
        ('{"prompt": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}', "tool_calls, which the model would"),
    ],
)
def test_what_no_row_of_the_queue_can_hold_is_refused_with_its_place(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "odd.jsonl").write_text(line)
    with pytest.raises(ManifestError, match=rf"odd\.jsonl:1: .*{said}"):
        opened(tmp_path, "odd.jsonl")


def test_a_date_that_config_leaves_out_is_no_obstacle(tmp_path: Path) -> None:
    Dataset.from_dict({"prompt": ["p"], "day": [date(2024, 1, 1)]}).to_parquet(tmp_path / "dated.parquet")
    assert opened(tmp_path, "parquet://dated.parquet", meta=[]).prompt(0).meta == {}


@pytest.mark.parametrize("scheme", ["parquet", "dataset"])
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ManifestError, match=r"needs the package datasets.*asyncflow\[data\]"):
        opened(tmp_path, f"{scheme}://data")
