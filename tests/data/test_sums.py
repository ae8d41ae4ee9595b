"""The data of examples/smollm2.yaml: 400 different held-out questions about sums that are trained in no wording."""

import importlib.util
import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "sums"


def read(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_what_is_held_out_is_trained_in_no_wording():
    train, held_out = read("train"), read("eval")
    assert len({task["prompt"] for task in held_out}) == 400
    assert not {task["sum"] for task in train} & {task["sum"] for task in held_out}


def test_answers_are_right():
    for task in read("train") + read("eval"):
        left, sign, right = task["sum"].split()
        assert int(task["answer"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert task["sum"] in task["prompt"]


def test_files_are_what_the_script_makes():
    spec = importlib.util.spec_from_file_location("make_sums", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, lines in zip(("train", "eval"), module.lines(), strict=True):
        assert (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() == lines
