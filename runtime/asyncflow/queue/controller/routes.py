"""Which calls a controller answers, and which it answers in another way than a controller that stands alone.

Invariant: what a controller does not answer is refused by its server as a method that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

from msgspec import Struct

from asyncflow.net.rpc import Handler, NowHandler

Wrap: TypeAlias = Callable[[Handler], Handler]
"""Returns another handler, made of the usual one."""


class Routes(Protocol):
    """Where handlers are entered: a server, or something before it."""

    def route(self, method: str, request: type[Struct], handler: Handler) -> None:
        """Enter a handler that waits."""
        ...

    def route_now(self, method: str, request: type[Struct], handler: NowHandler) -> None:
        """Enter a handler that does not wait."""
        ...


class Chosen:
    """Enters with ``routes`` those of ``only`` (None: all), wrapped as ``wraps`` says."""

    def __init__(self, routes: Routes, *, only: Collection[str] | None, wraps: Mapping[str, Wrap]) -> None:
        self._routes = routes
        self._only = only
        self._wraps = wraps

    def route(self, method: str, request: type[Struct], handler: Handler) -> None:
        """Enter a handler that waits."""
        if self._only is None or method in self._only:
            wrap = self._wraps.get(method)
            self._routes.route(method, request, wrap(handler) if wrap is not None else handler)

    def route_now(self, method: str, request: type[Struct], handler: NowHandler) -> None:
        """Enter a handler that does not wait, unless it is wrapped."""
        if self._only is not None and method not in self._only:
            return
        if (wrap := self._wraps.get(method)) is None:
            self._routes.route_now(method, request, handler)
        else:
            self._routes.route(method, request, wrap(_waiting(handler)))


def _waiting(handler: NowHandler) -> Handler:
    async def handle(call: Any, frames: Any) -> Any:
        reply = handler(call, frames)
        return reply if isinstance(reply, Struct | tuple) else await reply

    return handle
