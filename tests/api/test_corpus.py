"""Every bad manifest of the corpus is refused at the places that its first lines name; every example is accepted."""

import re
from pathlib import Path

import pytest

from asyncflow.api.base import COLLECT
from asyncflow.api.check import inspect
from asyncflow.api.document import parse
from asyncflow.api.load import KINDS, load, to_yaml
from asyncflow.errors import ManifestError, NotYetError

HERE = Path(__file__).parent
BAD = sorted((HERE / "bad").glob("*.yaml"))
EXAMPLES = sorted((HERE.parents[1] / "examples").glob("*.yaml"))


def places(file: Path) -> list[str]:
    return re.findall(r"^# refused: (\S+)$", file.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_a_bad_manifest_is_refused_with_path_value_reason_and_fix(file: Path) -> None:
    with pytest.raises(ManifestError) as refused:
        load(file)
    message = str(refused.value)
    assert not isinstance(refused.value, NotYetError)
    assert refused.value.where == str(file)
    for place in places(file):
        assert re.search(rf"(^|\s){re.escape(place)}( = .+)? \(line \d+\): .+\. .+", message), message


@pytest.mark.parametrize("file", BAD, ids=lambda file: file.stem)
def test_nothing_else_is_wrong_with_it(file: Path) -> None:
    data = parse(file.read_text(), source=file.name).data
    if (model := KINDS.get(data["kind"])) is None or file.stem == "wrong-version":
        return
    _, problems = inspect(model, data)
    assert sorted(problem.path for problem in problems) == sorted(places(file))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_accepted_and_survives_a_round_trip(file: Path) -> None:
    manifest = load(file)
    again = type(manifest).model_validate(parse(to_yaml(manifest), source="again").data, context=COLLECT)
    assert again == manifest


def test_the_quickstart_is_an_example() -> None:
    assert "quickstart" in [file.stem for file in EXAMPLES]
