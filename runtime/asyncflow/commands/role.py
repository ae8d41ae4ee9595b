"""``asyncflow role NAME ...``: one process of one role.

Invariant: the leash is on before anything else is imported or done.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, get_args

from asyncflow.leash import leash


def run(name: str, **options: Any) -> int:
    """Run the role to its end and return its exit status; options: the fields of ``roles.post.RoleOptions``.

    Raises NotYetError where there is no such role.
    """
    leash()
    from asyncflow.api.names import RoleName
    from asyncflow.errors import NotYetError

    module = f"asyncflow.roles.{name}"
    if name not in get_args(RoleName) or find_spec(module) is None:
        raise NotYetError(f"there is no role {name!r}", where="asyncflow role", hint="See asyncflow plan FILE")
    from asyncflow.roles.post import RoleOptions

    status: int = import_module(module).main(RoleOptions(role=name, **options))
    return status
