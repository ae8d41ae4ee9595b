"""A backend of each kind, on real stores."""

import itertools
from collections.abc import AsyncIterator, Callable

import pytest
from store_world import WORLDS, MemoryWorld

from asyncflow.queue.storage.backend import Backend

_units = itertools.count()


@pytest.fixture(params=WORLDS)
async def backend(request: pytest.FixtureRequest, stores: Callable[[str], MemoryWorld]) -> AsyncIterator[Backend]:
    """A backend, open and empty."""
    made = await stores(request.param).backend(unit=next(_units))
    yield made
    await made.close()
