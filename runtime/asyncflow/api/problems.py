"""Problems of a manifest: where each is, which value it has, why it is wrong, and what would be right.

Invariant: a manifest is refused once, with every problem that was found, each in one line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow.errors import ManifestError, NotYetError

Place = tuple[str | int, ...]
"""Keys and indices from the root of a manifest to a value."""
MISSING: Any = object()
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    place: keys as written in the manifest; value: what was found, MISSING where nothing was; reason: why that is wrong;
    fix: what would be right; line: where in the file, 0 where unknown; planned: a later version will accept it.
    """

    place: Place
    reason: str
    fix: str
    value: Any = MISSING
    line: int = 0
    planned: bool = False

    @property
    def path(self) -> str:
        """The place as people write it: ``spec.rollout.template.env[0].name``."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.place).removeprefix(".")

    @property
    def what(self) -> str:
        """Path, line, value and reason."""
        found = "" if self.value is MISSING else f" = {shown(self.value)}"
        line = f" (line {self.line})" if self.line else ""
        return f"{self.path or 'manifest'}{found}{line}: {self.reason}"

    def __str__(self) -> str:
        return f"{self.what}. {self.fix}"


def shown(value: object) -> str:
    """Return a value in few characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def refusal(problems: Sequence[Problem], *, source: str) -> ManifestError:
    """Return the one error for all problems; a NotYetError where nothing else is wrong."""
    kind = NotYetError if all(problem.planned for problem in problems) else ManifestError
    if len(problems) == 1:
        return kind(problems[0].what, where=source, hint=problems[0].fix)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return kind(f"{len(problems)} problems{lines}", where=source)
