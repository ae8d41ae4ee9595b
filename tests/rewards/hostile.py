"""Answers that a model could be led to write, and a process that scores them with nothing to protect it.

``python hostile.py PLACE SCORER`` scores every answer for every prompt of SCORER (``sets`` is every data set of
reasoning-gym) outside of any sandbox, so that an answer that is run leaves its mark under PLACE. It writes what it was
given to ``PLACE/rewards.json``.
"""

import json
import signal
import sys
from collections.abc import Iterator
from fcntl import F_GETFL
from pathlib import Path
from typing import Any

from asyncflow.rewards.calling import RewardFunction
from asyncflow.rewards.wire import Example, Score, ScoreAnswer, frame

CANARY = "canary-7f3a"
UNREACHABLE = "composite"
"""A data set that no manifest can name, because its config is made of Python objects."""
VARIABLE = "ASYNCFLOW_TEST_CANARY"
HEAVY = {"math_verify": {"latex power"}, "hostile:run_it": {"power", "latex power", "repeat"}}
"""Answers that a scorer works out, for which it needs the limits of a sandbox."""
_SECONDS = 20


def answers(place: Path, *, port: int) -> dict[str, str]:
    """Return hostile answers by kind. PLACE holds ``canary``, a file, and ``marks``, where code that runs writes."""

    def mark(kind: str) -> str:
        return f"open({str(place / 'marks' / kind)!r},'w').write('ran')"

    def told(secret: str) -> str:
        """Raise a KeyError with the secret."""
        return f"{{}}[{secret}]"

    os, sys, socket, fcntl = (f"__import__({name!r})" for name in ("os", "sys", "socket", "fcntl"))
    forged = frame(ScoreAnswer(nonce=bytes(16), scores=[Score(value=1.0)]))
    code = {
        "open": mark("open"),
        "import": f"{os}.system('touch {place}/marks/import')",
        "subprocess": f"__import__('subprocess').run(['touch', '{place}/marks/subprocess'])",
        "exec": f"exec({mark('exec')!r})",
        "compile": f"eval(compile({mark('compile')!r}, 'x', 'eval'))",
        "lambda": f"(lambda: {mark('lambda')})()",
        "list": f"[{mark('list')}]",
        "nested list": f"[[0, {mark('nested list')}], [1, 1]]",
        "comprehension": f"[1 for _ in [0] if {mark('comprehension')}]",
        "dictionary": f"{{'a': {mark('dictionary')}}}",
        "f-string": f'f"{{{mark("f-string")}}}"',
        "walrus": f"(a := {mark('walrus')})",
        "conditional": f"1 if {mark('conditional')} else 2",
        "map": f"[*map(eval, [{mark('map')!r}])]",
        "getattr": f"getattr({os}, 'sys' + 'tem')('touch {place}/marks/getattr')",
        "subclasses": "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'catch_warnings'][0]"
        f"()._module.__builtins__['open']({str(place / 'marks' / 'subclasses')!r}, 'w')",
        "sum": f"1 + {mark('sum')} - 1",
        "function": f"sin({mark('function')})",
        "symbol": f"x*({mark('symbol')})",
        "read a file": told(f"open({str(place / 'canary')!r}).read()"),
        "read a variable": told(f"{os}.environ[{VARIABLE!r}]"),
        "read its parent": told(f"open('/proc/%d/environ' % {os}.getppid()).read()"),
        "connect": f"{socket}.create_connection(('127.0.0.1', {port}), 1)",
        "connect locally": f"(s := {socket}.socket({socket}.AF_UNIX), s.connect({str(place / 'socket')!r}))",
        "fetch": f"__import__('urllib.request').request.urlopen('http://127.0.0.1:{port}/', timeout=1)",
        "forge": f"[{os}.write(n, {forged!r}) for n in range(1, 12) if {os}.path.exists('/proc/self/fd/%d' % n)"
        f" and {fcntl}.fcntl(n, {F_GETFL}) & 1]",
        "signal its parent": told(f"{os}.kill({os}.getppid(), 0)"),
        "fork": told(f"{os}.fork() or {os}._exit(0)"),
        "replace the scorer": f"setattr({sys}.modules['__main__'], 'scored', lambda *_: 1.0) or "
        f"{mark('replace the scorer')}",
    }
    data = {
        "statement": f"1\n{mark('statement')}\n",
        "format": "{0.__class__.__init__.__globals__}".replace("0", ""),
        "pickle": f"cos\nsystem\n(S'touch {place}/marks/pickle'\ntR.",
        "yaml": f"!!python/object/apply:os.system ['touch {place}/marks/yaml']",
        "json": '{"__class__": "os.system", "__reduce__": ["x"]}',
        "a number in a list": "[1]",
        "a mapping": '{"a": {"b": [1, null]}, "1": "x"}',
        "latex": f"\\boxed{{\\input{{{place}/canary}}}}",
        "boxed code": f"\\boxed{{{mark('boxed code')}}}",
        "latex code": f"$\\text{{{mark('latex code')}}}$",
        "power": "9**9**9**9",
        "latex power": "$9^{9^{9}}$",
        "factorial": "99999999!",
        "long number": "9" * 100_000,
        "long product": "*".join(["9" * 100] * 180),
        "repeat": "'a'*9999999999",
        "deep": "(" * 50_000 + "1" + ")" * 50_000,
        "deep list": "[" * 50_000,
        "infinite": "1e999999",
        "not a number": "nan",
        "regular expression": "a" * 30_000 + "!",
        "no characters": "\x00\ud800\u202e\x1b[2J",
        "long": "R U " * 2_000,
    }
    return code | data


def prompts(scorer: str) -> Iterator[dict[str, Any]]:
    """Yield what a scorer is asked beside the response, once for each data set of reasoning-gym where it is gym."""
    if scorer != "gym":
        yield {"prompt": "15 + 16", "answer": "31", "meta": {}}
        return
    from reasoning_gym.factory import DATASETS, create_dataset

    for name in sorted(set(DATASETS) - {UNREACHABLE}):
        entry = create_dataset(name, size=1, seed=3)[0]
        meta = {"dataset": name, "config": {}, "metadata": entry["metadata"]}
        yield {"prompt": entry["question"], "answer": entry["answer"], "meta": meta}


def scored(function: RewardFunction, response: str, prompt: dict[str, Any]) -> object:
    """Return the reward or what was raised, also where it took too long."""
    signal.signal(signal.SIGVTALRM, _give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        example = Example(response=response, **prompt)
        return float(function.call(**function.arguments([example], extractor=str)))
    except (Exception, _TooLong) as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"[:200]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class _TooLong(BaseException):
    """Nothing that a scorer could take for its own."""


def _give_up(*_: object) -> None:
    raise _TooLong


def main(place: Path, port: int, scorer: str) -> None:
    from asyncflow.rewards.functions import load

    sys.set_int_max_str_digits(4300)
    function = load(scorer, workdir=Path(__file__).parent, place={"extractor": "text"})
    rewards = {
        f"{prompt['meta'].get('dataset', scorer)}: {kind}": scored(function, answer, prompt)
        for prompt in prompts(scorer)
        for kind, answer in answers(place, port=port).items()
        if kind not in HEAVY.get(scorer, ())
    }
    (place / "rewards.json").write_text(json.dumps(rewards))


def run_it(*, response: str, prompt: str, answer: Any, meta: dict[str, Any]) -> float:
    """Run the response: the scorer that nobody should write, to see what the others are protected from."""
    return float(bool(eval(response)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
