"""HTTP requests to the first process of a run, on this machine or another one.

Invariant: no answer, and no missing answer, raises an error in the caller.
"""

from __future__ import annotations

import http.client
import logging
from contextlib import closing
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from pydantic import BaseModel, ValidationError

from asyncflow.driver.presence import LiveState

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
ANSWER_S = 2.0
"""Timeout of a request, in seconds."""
MOST_BYTES = 64 << 20
"""Largest answer in bytes; a larger one is treated as no answer."""


def ask(port: int, shape: type[M]) -> M | None:
    """Return ``/v1/status`` of the server at a port of this machine, or None without a valid answer in time.

    Blocks for a few seconds at most.
    """
    return ask_at(f"http://127.0.0.1:{port}", shape)


def ask_at(url: str, shape: type[M]) -> M | None:
    """Return ``/v1/status`` of the server at ``url``, as ``ask`` does."""
    answer = fetch(url, "/v1/status")
    try:
        return None if answer is None else shape.model_validate_json(answer)
    except ValidationError as error:
        _log.debug("no status: %s", error)
        return None


def ask_live(url: str) -> LiveState | None:
    """Return the state of members and tasks from the driver at ``url``, or None without a valid answer in time."""
    answer = fetch(url, "/v1/live")
    try:
        return None if answer is None else msgspec.json.decode(answer, type=LiveState)
    except msgspec.MsgspecError as error:
        _log.debug("no state: %s", error)
        return None


def fetch(url: str, path: str, *, within_s: float = ANSWER_S) -> bytes | None:
    """Return the answer of the server at ``url`` to ``GET path``, or None if it is missing, incomplete or too large.

    within_s: most seconds between two parts of the answer.
    """
    try:
        split = urlsplit(url)
        connection = http.client.HTTPConnection(split.hostname or "", split.port or 80, timeout=within_s)
        with closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(MOST_BYTES + 1)
            complete = not response.length and len(body) <= MOST_BYTES  # length: missing bytes
            return body if response.status == http.HTTPStatus.OK and complete else None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: invalid URL
        _log.debug("no answer of %s%s: %s", url, path, error)
        return None
