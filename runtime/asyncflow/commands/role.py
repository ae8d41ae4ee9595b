"""``asyncflow role NAME ...``: one process of one role.

Invariant: the leash is on before anything else is imported or done.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from asyncflow.leash import leash


def run(name: str, *, job: Path, driver: str, index: int, attempt: int, workdir: Path, http_port: int) -> int:
    """Run the role to its end and give its exit status. Raises ManifestError where there is no such role."""
    leash()
    from asyncflow.api.names import RoleName
    from asyncflow.errors import NotYetError

    module = f"asyncflow.roles.{name}"
    if name not in get_args(RoleName) or find_spec(module) is None:
        raise NotYetError(f"there is no role {name!r}", where="asyncflow role", hint="See asyncflow plan FILE")
    from asyncflow.roles.post import RoleOptions

    options = RoleOptions(
        role=name, job=job, driver=driver, index=index, attempt=attempt, workdir=workdir, http_port=http_port
    )
    status: int = import_module(module).main(options)
    return status
