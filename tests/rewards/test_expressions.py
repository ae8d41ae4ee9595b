"""The parsers of answers in this process, with nothing to end them: what could take for ever is refused at once."""

import signal
from collections.abc import Iterator

import pytest
import sympy

from asyncflow.rewards.expressions import algebra

SECONDS = 20


def _too_long(*_: object) -> None:
    pytest.fail(f"it takes more than {SECONDS} s")


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)


@pytest.mark.parametrize(
    "text",
    [
        "exp(400000000000*log(9))",
        "exp(x + 400000000000*log(9))",
        "E**(x + 400000000000*log(9))",
        "log(exp(400000000000*log(9)))",
        "2**(x + 400000000000) * 2**(-x)",
        "((((2**(x+1))**100)**100)**100)**100 * ((((2**(-x))**100)**100)**100)**100",
        "exp(1000*x)**100 * exp(-1000*x)",
        "9**9**9**9",
        "sqrt(" + "*".join(["(10**300+7)"] * 300) + ")",
        "log(" * 90 + "7" + ")" * 90,
        "exp(1e300)",
        "exp(0*(1/0))",
    ],
)
def test_what_could_take_for_ever_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"too large|too long|too deeply"):
        algebra(text)


@pytest.mark.parametrize("text", ["exp(-x**2/2)", "2*sin(3*x)**2", "x**3/3 + log(1000000*x)", "exp(10)", "2**(x+3)"])
def test_what_an_answer_says_is_worked_out(text: str) -> None:
    assert algebra(text) == sympy.sympify(text)
