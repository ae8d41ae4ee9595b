"""Safe parsers of answers: Python literals, arithmetic, and algebra, without execution of the text.

A response is untrusted text, so ``eval`` and ``sympy.parse_expr`` (which calls ``eval`` after tokenizing) would let it
run code in the process. Here the text is parsed to a syntax tree, and only the node types that a function supports are
evaluated; all others raise ValueError.

Invariant: constants bound the work and the memory of each function for any text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, cast

import sympy

MAX_LENGTH: Final = 20_000
MAX_NODES: Final = 5_000
MAX_DIGITS: Final = 400
MAX_POWER: Final = 100
"""Largest exponent of a base that contains a symbol or a root."""
MAX_BITS: Final = 8_192
"""Most bits in the numerator or the denominator of a power."""
MAX_ARGUMENT: Final = 10**18
"""Largest number in the argument of a function: some functions factorize it."""
MAX_EXPONENT: Final = 1_000
"""Largest number in the argument of ``exp``, and in an exponent with a symbol, since the symbol may cancel out."""
MAX_NESTED: Final = 6
"""Deepest nesting of functions: sympy computes the sign of expressions without symbols."""

_BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: Final[dict[type[ast.unaryop], Callable[[Any], Any]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTION_NAMES: Final = "sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt"
_FUNCTIONS: Final = {name: getattr(sympy, name) for name in _FUNCTION_NAMES.split(" ")}
_CONSTANTS: Final = MappingProxyType({"pi": sympy.pi, "E": sympy.E, "I": sympy.I})


def literal(text: str) -> Any:
    """Return the value of a Python literal: numbers, strings, lists, tuples, sets and dictionaries of them.

    Raises ValueError for any other text, and for one longer than MAX_LENGTH characters.
    """
    try:
        return ast.literal_eval(_parse(text))
    except (TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"not a Python literal: {type(error).__name__}") from None


def arithmetic(text: str) -> Fraction:
    """Return the exact value of an expression of decimal numbers, ``+ - * /`` and parentheses.

    Raises ValueError for any other text, and ZeroDivisionError.
    """
    return cast(Fraction, _Arithmetic().evaluate(text))


def algebra(text: str, local_dict: Mapping[str, Any] = _CONSTANTS) -> Any:
    """Return the sympy expression of ``text``: numbers, symbols, ``+ - * / **`` and elementary functions.

    local_dict: values of names; any other name is a constant or a symbol. The function replaces ``sympy.parse_expr``
    and has the same arguments. Raises ValueError for any other text, and for powers that are too large.
    """
    return _Algebra({**_CONSTANTS, **local_dict}).evaluate(text)


def _parse(text: str) -> ast.Expression:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"the text has {len(text)} characters, more than {MAX_LENGTH}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an expression: {type(error).__name__}") from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ValueError(f"the expression has more than {MAX_NODES} terms")
    return tree


class _Arithmetic:
    """Evaluator of numbers and the four operations."""

    def evaluate(self, text: str) -> Any:
        tree = _parse(text)
        try:
            return self.value(tree.body)
        except RecursionError:
            raise ValueError("the expression is nested too deeply") from None

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](self.value(node.left), self.value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _UNARY[type(node.op)](self.value(node.operand))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            digits = repr(node.value)
            if len(digits) > MAX_DIGITS:
                raise ValueError(f"a number has {len(digits)} digits, more than {MAX_DIGITS}")
            return self.number(digits)
        return self.other(node)

    def number(self, digits: str) -> Any:
        return Fraction(digits)

    def other(self, node: ast.expr) -> Any:
        raise ValueError(f"{type(node).__name__} is not supported in an answer")


class _Algebra(_Arithmetic):
    """Evaluator that also supports names, powers and functions."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._depth = 0

    def number(self, digits: str) -> Any:
        return sympy.Integer(digits) if digits.isdigit() else sympy.Float(digits)

    def other(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) if name not in _FUNCTIONS:
                return self._names[name] if name in self._names else sympy.Symbol(name)
            case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
                return _power(self.value(base), self.value(exponent))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                return self._call(name, argument)
        return super().other(node)

    def _call(self, name: str, argument: ast.expr) -> Any:
        if self._depth == MAX_NESTED:
            raise ValueError("functions are nested too deeply")
        self._depth += 1
        value = self.value(argument)
        self._depth -= 1
        _check_numbers(value, most=MAX_EXPONENT if name == "exp" else MAX_ARGUMENT)
        return _FUNCTIONS[name](value)


def _check_numbers(expression: Any, *, most: int) -> None:
    """Raise ValueError if a number in ``expression``, or a denominator, is greater than ``most``."""
    for number in expression.atoms(sympy.Number):
        if not (number.is_finite and abs(number) <= most and (not number.is_Rational or number.q <= most)):
            raise ValueError(f"a number is larger than {most}, so the computation could take too long")


def _power(base: Any, exponent: Any) -> Any:
    """Return ``base ** exponent``. Raises ValueError if the computation could take too long."""
    if exponent.is_number:
        size = abs(exponent)
        bits = max(abs(int(base.p)), int(base.q)).bit_length() if base.is_Rational else 0
        if not (size.is_real and size <= (max(1, MAX_BITS // bits) if bits else MAX_POWER)):
            raise ValueError("a power is too large")
    else:
        _check_numbers(exponent, most=MAX_EXPONENT)
    power = base**exponent
    if isinstance(power, sympy.Pow | sympy.exp):
        _check_numbers(power.as_base_exp()[1], most=MAX_EXPONENT)
    return power
