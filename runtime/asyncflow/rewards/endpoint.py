"""The reward ``http``: rewards of a server, as reward models are served beside a training.

One request has the samples of one batch: ``{"query": [prompt + response], "prompts": [...], "responses": [...],
"labels": [answer, ...]}``, the form of OpenRLHF's ``remote_rm_url``; the answer is ``{"rewards": [...]}``, and may have
``"details": [{...}, ...]``.

Invariants: a pair of prompt and response that has its reward is not asked for again while it is among the last
``cache`` ones; a request that was refused for want of time or room (no connection, 408, 429, 5xx) is repeated after a
growing pause, for ``retry_seconds``; what the server says wrong is raised and never a reward.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any, Final

import aiohttp
import msgspec

from asyncflow.errors import ManifestError, PeerLost
from asyncflow.plugins import read_options
from asyncflow.rpc.retry import retry

_BUSY: Final = (408, 429)
_SERVER_ERROR: Final = 500
_OK: Final = 200
_MOST_SHOWN: Final = 500


class EndpointOptions(msgspec.Struct, frozen=True):
    """Settings.

    url: of the server; cache: rewards that a process remembers; retry_seconds: how long a request is repeated, less
    than ``reward.timeoutSeconds``, so that what the server says is known.
    """

    url: str = ""
    cache: Annotated[int, msgspec.Meta(ge=0)] = 10_000
    retry_seconds: Annotated[float, msgspec.Meta(ge=0)] = 5.0


class _Rewards(msgspec.Struct):
    """The server's answer."""

    rewards: list[float]
    details: list[dict[str, Any]] | None = None


class Endpoint:
    """A server of rewards. Raises ManifestError for settings that have no meaning."""

    def __init__(self, *, config: dict[str, Any]) -> None:
        self._options = read_options(config, EndpointOptions, where="reward.config")
        if not self._options.url.startswith(("http://", "https://")):
            raise ManifestError(f"{self._options.url!r} is no URL", where="reward.config.url", hint="Give http://...")
        self._session: aiohttp.ClientSession | None = None
        self._known: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()

    async def __call__(self, *, responses: list[str], prompts: list[str], answers: list[Any]) -> list[dict[str, Any]]:
        """Return the rewards of samples. Raises DeadlineExceeded, ValueError where the server answers otherwise."""
        keys = list(zip(prompts, responses, strict=True))
        wanted = dict(reversed([(key, answer) for key, answer in zip(keys, answers, strict=True)]))
        found = {key: self._known[key] for key in wanted if key in self._known}
        if asked := [key for key in wanted if key not in found]:
            found |= zip(asked, await self._ask(asked, [wanted[key] for key in asked]), strict=True)
        for key in wanted:
            self._known[key] = found[key]
            self._known.move_to_end(key)
        while len(self._known) > self._options.cache:
            self._known.popitem(last=False)
        return [found[key] for key in keys]

    async def _ask(self, keys: list[tuple[str, str]], labels: list[Any]) -> list[dict[str, Any]]:
        body = msgspec.json.encode(
            {
                "query": ["".join(key) for key in keys],
                "prompts": [prompt for prompt, _ in keys],
                "responses": [response for _, response in keys],
                "labels": labels,
            }
        )
        url = self._options.url
        text = await retry(lambda: self._post(body), what=f"the reward of {url}", timeout=self._options.retry_seconds)
        try:
            told = msgspec.json.decode(text, type=_Rewards)
        except msgspec.DecodeError as error:
            raise ValueError(f"{url} answered {_shown(text)}: {error}") from error
        details = told.details if told.details is not None else [{}] * len(told.rewards)
        if not len(keys) == len(told.rewards) == len(details):
            raise ValueError(f"{url} answered {len(told.rewards)} rewards, {len(details)} details for {len(keys)}")
        return [{"reward": reward, "details": each} for reward, each in zip(told.rewards, details, strict=True)]

    async def _post(self, body: bytes) -> bytes:
        """Send one request. Raises PeerLost where it may be sent again, ValueError where that would not help."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Content-Type": "application/json"})
        url = self._options.url
        try:
            async with self._session.post(url, data=body) as answer:
                text, status = await answer.read(), answer.status
        except (aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"{url} does not answer: {error}", where="reward.config.url") from error
        if status in _BUSY or status >= _SERVER_ERROR:
            raise PeerLost(f"{url} answered {status}: {_shown(text)}", where="reward.config.url")
        if status != _OK:
            raise ValueError(f"{url} answered {status}: {_shown(text)}")
        return text


def _shown(text: bytes) -> str:
    return text[:_MOST_SHOWN].decode(errors="replace")
