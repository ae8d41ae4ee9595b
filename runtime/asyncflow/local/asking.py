"""The status that the first process of a run serves, asked from this machine. No answer ends the caller."""

from __future__ import annotations

import http.client
import logging
from typing import TypeVar

from pydantic import BaseModel, ValidationError

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
ANSWER_S = 2.0
"""Most seconds that an answer is waited for."""


def ask(port: int, shape: type[M]) -> M | None:
    """Return ``/v1/status`` of who serves at a port of this machine; None where it does not answer in time, or answers
    nonsense. Blocks for seconds at most.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/v1/status")
        response = connection.getresponse()
        return shape.model_validate_json(response.read()) if response.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException, ValidationError) as error:
        _log.debug("no status: %s", error)
        return None
    finally:
        connection.close()
