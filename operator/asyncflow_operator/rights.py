"""Namespaces of an operator of single ones in which it has its rights: those alone are watched.

With a namespace goes the Role in it. Watches of what may not be read would never be complete, and nothing is done
before they are, so that one namespace that is deleted would leave the jobs of all others alone.

Invariant: a process sees a whole namespace or nothing of it. Which ones it watches is decided once, before it does;
when another choice is right it ends, and its successor decides anew.
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
"""Times in a row that another choice was right before it is made: Roles that are replaced are away for a moment."""

_log = logging.getLogger(__name__)


async def served(api: Api, namespaces: tuple[str, ...], *, now: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of ``namespaces`` whose jobs may be listed, all where there are none.

    now: those that count as before where the server gives no answer.
    """
    allowed = await asyncio.gather(*(_allowed(api, name, otherwise=name in now) for name in namespaces))
    return tuple(compress(namespaces, allowed)) or namespaces


async def until_others(api: Api, namespaces: tuple[str, ...], *, now: tuple[str, ...], every_s: float) -> None:
    """Look every ``every_s`` seconds, until others of ``namespaces`` are to be served than ``now``."""
    seen = 0
    while seen < _SURE:
        await asyncio.sleep(every_s)
        right = await served(api, namespaces, now=now)
        seen = seen + 1 if right != now else 0
    gone, come = ", ".join(sorted(set(now) - set(right))), ", ".join(sorted(set(right) - set(now)))
    _log.warning("the namespaces with rights are others now", extra={"without": gone, "with": come})


async def _allowed(api: Api, namespace: str, *, otherwise: bool) -> bool:
    try:
        async for _ in api.pages(RLJOB, namespace=namespace, metadata_only=True, size=1):
            break
    except Refusal as refused:
        return refused.status != _FORBIDDEN
    except ApiError:
        return otherwise
    return True
