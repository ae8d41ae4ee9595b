"""The reward ``http``: rewards from an HTTP server, e.g. of a reward model.

One request contains the samples of one batch: ``{"query": [prompt + response], "prompts": [...], "responses": [...],
"labels": [answer, ...]}``, the format of OpenRLHF's ``remote_rm_url``. The reply is ``{"rewards": [...]}``, optionally
with ``"details": [{...}, ...]``.

Invariants: the reward of a pair of prompt and response is not requested again while the pair is among the last
``cache`` pairs. A request that fails temporarily (no connection, 408, 429, 5xx) is repeated with a growing delay for
``retry_seconds``. An invalid reply raises an error and never becomes a reward.
"""

from __future__ import annotations

import hashlib
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
    """Settings of ``http``.

    url: URL of the server; cache: number of rewards that a process caches; retry_seconds: seconds for which a request
    is repeated, less than ``reward.timeoutSeconds``, so that the failure contains the server's last reply.
    """

    url: str = ""
    cache: Annotated[int, msgspec.Meta(ge=0)] = 10_000
    retry_seconds: Annotated[float, msgspec.Meta(ge=0)] = 5.0


class _Rewards(msgspec.Struct):
    """The server's reply."""

    rewards: list[float]
    details: list[dict[str, Any]] | None = None


class Endpoint:
    """Client of a reward server. Raises ManifestError if the settings are invalid."""

    def __init__(self, *, config: dict[str, Any]) -> None:
        self._options = read_options(config, EndpointOptions, where="spec.reward.config")
        if not self._options.url.startswith(("http://", "https://")):
            what = f"{self._options.url!r} is not an HTTP URL"
            raise ManifestError(what, where="spec.reward.config.url", hint="Set http://HOST... or https://HOST...")
        self._session: aiohttp.ClientSession | None = None
        self._known: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    async def __call__(self, *, responses: list[str], prompts: list[str], answers: list[Any]) -> list[dict[str, Any]]:
        """Return the rewards of samples. Raises DeadlineExceeded, and ValueError if the reply is invalid."""
        keys = [_digest(*pair) for pair in zip(prompts, responses, strict=True)]
        samples = zip(prompts, responses, answers, strict=True)
        wanted = dict(reversed(list(zip(keys, samples, strict=True))))
        found = {key: self._known[key] for key in wanted if key in self._known}
        if missing := [key for key in wanted if key not in found]:
            found |= zip(missing, await self._request([wanted[key] for key in missing]), strict=True)
        for key in wanted:
            self._known[key] = found[key]
            self._known.move_to_end(key)
        while len(self._known) > self._options.cache:
            self._known.popitem(last=False)
        return [found[key] for key in keys]

    async def _request(self, samples: list[tuple[str, str, Any]]) -> list[dict[str, Any]]:
        """Request rewards. samples: prompt, response and answer of each."""
        body = msgspec.json.encode(
            {
                "query": [prompt + response for prompt, response, _ in samples],
                "prompts": [prompt for prompt, _, _ in samples],
                "responses": [response for _, response, _ in samples],
                "labels": [answer for _, _, answer in samples],
            }
        )
        url = self._options.url
        text = await retry(lambda: self._post(body), what=f"the reward of {url}", timeout=self._options.retry_seconds)
        try:
            reply = msgspec.json.decode(text, type=_Rewards)
        except msgspec.DecodeError as error:
            raise ValueError(f"{url} answered {_shown(text)}: {error}") from error
        details = reply.details if reply.details is not None else [{}] * len(reply.rewards)
        if not len(samples) == len(reply.rewards) == len(details):
            counts = f"{len(reply.rewards)} rewards and {len(details)} details for {len(samples)} samples"
            raise ValueError(f"{url} answered {counts}")
        return [{"reward": reward, "details": each} for reward, each in zip(reply.rewards, details, strict=True)]

    async def _post(self, body: bytes) -> bytes:
        """Send one request. Raises PeerLost if it may be sent again, ValueError for a permanent failure."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Content-Type": "application/json"})
        url = self._options.url
        try:
            async with self._session.post(url, data=body) as answer:
                text, status = await answer.read(), answer.status
        except (aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"{url} does not answer: {error}", where="spec.reward.config.url") from error
        if status in _BUSY or status >= _SERVER_ERROR:
            raise PeerLost(f"{url} answered {status}: {_shown(text)}", where="spec.reward.config.url")
        if status != _OK:
            raise ValueError(f"{url} answered {status}: {_shown(text)}")
        return text


def _digest(prompt: str, response: str) -> bytes:
    """Return a key for a pair: long texts themselves would exceed the memory of the process."""
    text = f"{len(prompt)} {prompt}{response}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


def _shown(text: bytes) -> str:
    return text[:_MOST_SHOWN].decode(errors="replace")
