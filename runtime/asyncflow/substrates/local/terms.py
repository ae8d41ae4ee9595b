"""Requests to a supervisor, and its answers. Invariant: plain immutable values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncflow.errors import AsyncFlowError
from asyncflow.substrates.local.ending import WITHIN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Command line to start for one seat and attempt, and environment variables beside the inherited ones.

    http: where it serves /metrics, "" where nobody knows.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    http: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Times of one run, in seconds. active_s: the job fails when it has not finished by then; end_s: for its end."""

    active_s: float | None = None
    end_s: float = WITHIN_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of a run.

    exit_code: 0, 1, or 128 + signal; failure: what to tell, where it failed; refused: a role refused its input.
    """

    exit_code: int
    failure: AsyncFlowError | None = None
    refused: bool = False
