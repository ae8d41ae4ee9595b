"""The last stage of a Dockerfile: its run configuration, AsyncFlow's extras and Debian packages.

Invariant: the Dockerfile is the only description of an image. An unknown instruction is refused, so that an image from
here cannot differ silently from the one that docker builds.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_BASE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EXTRAS: Final = re.compile(r'pip install .*"\.\[([\w,-]+)\]"')
_PACKAGES: Final = re.compile(
    r"apt-get update +&& apt-get install --yes --no-install-recommends ([\w .+-]+?) +&& rm -rf \S+"
)
_PASSED_OVER: Final = frozenset(("ARG", "COPY", "EXPOSE"))
_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")


@dataclass(kw_only=True)
class Dockerfile:
    """The parsed content of a Dockerfile.

    extras: the extras that AsyncFlow is installed with; packages: Debian packages; config: the OCI image configuration.
    """

    extras: tuple[str, ...]
    packages: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> Dockerfile:
    """Parse a Dockerfile. Raises ValueError for an instruction that it does not support."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    extras = [match.group(1) for match in map(_EXTRAS.search, lines) if match]
    last = max(number for number, (word, *_) in enumerate(instructions) if word == "FROM")
    env = {"PATH": _BASE_PATH}
    read = Dockerfile(extras=tuple(extras[-1].split(",")))
    for word, rest in instructions[last + 1 :]:
        if word == "ENV":
            for assignment in shlex.split(rest):
                name, _, value = assignment.partition("=")
                env[name] = _VARIABLE.sub(lambda found: env.get(found.group(1), ""), value)
        elif word in ("USER", "WORKDIR"):
            read.config["User" if word == "USER" else "WorkingDir"] = rest
        elif word == "RUN" and (named := _PACKAGES.fullmatch(rest)):
            read.packages += tuple(named.group(1).split())
        elif word in ("ENTRYPOINT", "CMD"):
            read.config["Entrypoint" if word == "ENTRYPOINT" else "Cmd"] = json.loads(rest)
        elif word not in _PASSED_OVER:
            raise ValueError(f"{path}: the instruction {word} is not supported")
    read.config["Env"] = [f"{name}={value}" for name, value in env.items()]
    return read
