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
PICKLING = {"Pipe", "Queue", "SimpleQueue", "JoinableQueue", "Pool", "Manager"}
"""What gives objects to other processes, made by ``multiprocessing`` or a context of it."""
UNPICKLING = ("_pyobj", "recv_serialized", "_object_list", "gather_object")
UNSAFE = {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}
HIDDEN = {"torch.load", *UNSAFE, *(f"multiprocessing.{name}" for name in PICKLING)}
HIDDEN |= {f"multiprocessing.{room}" for room in ("connection", "managers", "pool", "queues")}
"""What must not be imported by a name of its own, by which its calls would not be known."""


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            yield str(getattr(node.args[0], "value", ""))


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}


def offences(source):
    """Return what in a source makes code or objects of bytes, or could."""
    tree = ast.parse(source)
    for name in imported(tree):
        if name.partition(".")[0] in LOADERS or name in HIDDEN:
            yield name
    for function, words in calls(tree):
        owner, _, name = function.rpartition(".")
        if (
            function in RUNNERS | UNSAFE
            or function.endswith(UNPICKLING)
            or (owner and name in PICKLING and owner not in ("asyncio", "queue"))
            or (function.endswith("torch.load") and words.get("weights_only") != "True")
            or words.get("allow_pickle", "False") != "False"
            or words.get("shell", "False") != "False"
        ):
            yield function


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_w19_no_path_in_the_source_makes_code_or_objects_of_bytes(path):
    assert list(offences(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import_module('pickle')",
        "importlib.import_module('cloudpickle.cloudpickle')",
        "from multiprocessing import Queue",
        "from multiprocessing import connection",
        "multiprocessing.Pipe()",
        "get_context('spawn').Queue(4)",
        "torch.multiprocessing.SimpleQueue()",
        "from torch import load",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "from yaml import unsafe_load",
        "yaml.load(text)",
        "np.load(file, allow_pickle=True)",
        "socket.recv_pyobj()",
        "dist.broadcast_object_list(found)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_w19_every_way_to_do_it_would_be_found(source):
    assert list(offences(source))


def test_w20_nobody_is_ended_by_name():
    for path in FILES:
        words = path.read_text()
        assert "pkill" not in words, path
        assert "killall" not in words, path


def test_w21_controller_and_units_load_neither_torch_nor_ray():
    program = (
        "import sys, asyncflow.roles.controller, asyncflow.roles.storage, asyncflow.queue.client;"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
