"""One sample, scored alone."""

from typing import Any

from asyncflow.rewards.wire import Example


async def one(scorer: Any, example: Example) -> Any:
    (result,) = await scorer.score([example])
    return result
