"""Write train.jsonl and eval.jsonl: the 200 sums and differences of two one-digit numbers, in four wordings each.

Invariant: no wording of a held-out sum is in the training data. The sum alone determines whether it is held out.
"""

import hashlib
import json
from itertools import product
from pathlib import Path

WORDINGS = (
    "State the final answer to the following arithmetic problem: {sum} =",
    "What is {sum}?",
    "Calculate {sum}.",
    "{sum} =",
)
HELD_OUT = 100


def lines() -> tuple[list[str], list[str]]:
    """Return the lines of the training and of the held-out file."""
    answers = {f"{a} {sign} {b}": a + b if sign == "+" else a - b for sign, a, b in product("+-", range(10), range(10))}
    shuffled = sorted(answers, key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out, train = shuffled[:HELD_OUT], shuffled[HELD_OUT:]
    return _worded(train, answers), _worded(held_out, answers)


def _worded(sums: list[str], answers: dict[str, int]) -> list[str]:
    return [
        json.dumps({"prompt": wording.format(sum=text), "answer": str(answers[text]), "sum": text})
        for wording in WORDINGS
        for text in sums
    ]


if __name__ == "__main__":
    for name, content in zip(("train", "eval"), lines(), strict=True):
        (Path(__file__).parent / f"{name}.jsonl").write_text("\n".join(content) + "\n", encoding="utf-8")
