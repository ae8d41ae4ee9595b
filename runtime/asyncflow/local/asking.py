"""Answers of the first process of a run over HTTP, on this machine or another. None of them ends the caller."""

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
"""Most seconds that an answer is waited for."""
MOST_BYTES = 64 << 20
"""Bytes of an answer beyond which it is nonsense."""


def ask(port: int, shape: type[M]) -> M | None:
    """Return ``/v1/status`` of who serves at a port of this machine; None where it does not answer in time, or answers
    nonsense. Blocks for seconds at most.
    """
    return ask_at(f"http://127.0.0.1:{port}", shape)


def ask_at(url: str, shape: type[M]) -> M | None:
    """Return ``/v1/status`` of who serves at ``url``, as ``ask`` does."""
    answer = fetch(url, "/v1/status")
    try:
        return None if answer is None else shape.model_validate_json(answer)
    except ValidationError as error:
        _log.debug("no status: %s", error)
        return None


def ask_live(url: str) -> LiveState | None:
    """Return what a driver at ``url`` says of its members and tasks; None as ``ask`` does."""
    answer = fetch(url, "/v1/live")
    try:
        return None if answer is None else msgspec.json.decode(answer, type=LiveState)
    except msgspec.MsgspecError as error:
        _log.debug("no state: %s", error)
        return None


def fetch(url: str, path: str, *, within_s: float = ANSWER_S) -> bytes | None:
    """Return what who serves at ``url`` answers to ``GET path``; None where that is no whole answer, or too much.

    within_s: most seconds between two pieces of the answer.
    """
    try:
        split = urlsplit(url)
        connection = http.client.HTTPConnection(split.hostname or "", split.port or 80, timeout=within_s)
        with closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(MOST_BYTES + 1)
            whole = not response.length and len(body) <= MOST_BYTES  # length: bytes of the answer that did not come
            return body if response.status == http.HTTPStatus.OK and whole else None
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: of an address that is none
        _log.debug("no answer of %s%s: %s", url, path, error)
        return None
