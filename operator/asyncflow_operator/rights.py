"""Selection of the namespaces to watch: of the configured namespaces, those in which the operator has rights.

When a namespace is deleted, its Role is deleted too. The watches of a namespace that the operator may not read would
never become complete, and the operator does nothing before all watches are. One deleted namespace would thus stop the
work on the jobs of all others.

Invariant: a process sees a whole namespace or nothing of it. It selects the namespaces once, before it starts to watch.
When the selection would differ, the process ends, and the next one selects again.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import compress
from typing import Final

from asyncflow_operator.cluster.client import Api, ApiError, Refusal
from asyncflow_operator.cluster.kinds import RLJOB

_FORBIDDEN: Final = 403
_SURE: Final = 2
"""Number of equal checks in a row before the selection changes: a Role is briefly absent while it is replaced."""

_log = logging.getLogger(__name__)


async def served(api: Api, namespaces: tuple[str, ...], *, current: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of ``namespaces`` in which the operator may list jobs, all of them if it may do so in none.

    current: the current selection, which decides about a namespace for which the server gives no answer.
    """
    allowed = await asyncio.gather(*(_allowed(api, name, otherwise=name in current) for name in namespaces))
    return tuple(compress(namespaces, allowed)) or namespaces


async def until_namespaces_change(
    api: Api, namespaces: tuple[str, ...], *, current: tuple[str, ...], every_s: float
) -> None:
    """Check every ``every_s`` seconds, until the selection from ``namespaces`` differs from ``current``."""
    differing = 0
    while differing < _SURE:
        await asyncio.sleep(every_s)
        selected = await served(api, namespaces, current=current)
        differing = differing + 1 if selected != current else 0
    removed, added = set(current) - set(selected), set(selected) - set(current)
    _log.warning(
        "the set of namespaces with rights has changed",
        extra={"without": ", ".join(sorted(removed)), "with": ", ".join(sorted(added))},
    )


async def _allowed(api: Api, namespace: str, *, otherwise: bool) -> bool:
    try:
        async for _ in api.pages(RLJOB, namespace=namespace, metadata_only=True, size=1):
            break
    except Refusal as refused:
        return refused.status != _FORBIDDEN
    except ApiError:
        return otherwise
    return True
