"""W19, W20, W21: nothing received is ever run, nobody's process is ended by its name, and nothing heavy is loaded."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import asyncflow

SOURCE = Path(asyncflow.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LOADERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "ray"}
LOADERS |= {"xmlrpc", "code", "codeop"}
RUNNERS = {"eval", "exec", "compile", "__import__"}
PICKLING = {f"multiprocessing.{name}" for name in ("Pipe", "Queue", "SimpleQueue", "JoinableQueue", "Pool", "Manager")}
UNPICKLING = ("_pyobj", "recv_serialized", "_object_list", "gather_object")


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_w19_no_path_in_the_source_makes_code_or_objects_of_bytes(path):
    tree = ast.parse(path.read_text())
    names = set(imported(tree))
    assert not {name.partition(".")[0] for name in names} & LOADERS
    assert not names & {"multiprocessing.connection", "multiprocessing.managers", "multiprocessing.pool"}
    for function, words in calls(tree):
        assert function not in RUNNERS | PICKLING, function
        assert function not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), function
        assert not function.endswith(UNPICKLING), function
        assert words.get("allow_pickle", "False") == "False", function
        if function.endswith("torch.load"):
            assert words.get("weights_only") == "True"
        assert words.get("shell", "False") == "False", function


def test_w20_nobody_is_ended_by_name():
    for path in FILES:
        words = path.read_text()
        assert "pkill" not in words, path
        assert "killall" not in words, path


def test_w21_controller_and_units_load_neither_torch_nor_ray():
    program = (
        "import sys, asyncflow.roles.controller, asyncflow.roles.storage, asyncflow.queue.client.open_partition;"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
