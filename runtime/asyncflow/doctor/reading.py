"""Evidence of a run, read from its folder or from its driver.

Invariants: nothing is written. A file that is missing, incomplete or damaged makes only its own figures unavailable,
with a warning if it is damaged, but a run without a manifest is refused. The folder of an active run is read as it is,
and its driver is queried for its current status.
"""

from __future__ import annotations

import io
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from asyncflow.api.job import RLJob
from asyncflow.api.load import load_job
from asyncflow.api.status import DriverStatus
from asyncflow.doctor.evidence import Evidence, surviving
from asyncflow.driver.journal import EVENTS, FIRST_DISPATCH, LIVES, METRICS, REWARDS, SUMMARY
from asyncflow.driver.lives import Life
from asyncflow.errors import ManifestError
from asyncflow.local.folder import JOB, check_run
from asyncflow.local.http_client import ask_at, fetch
from asyncflow.local.record import load_record
from asyncflow.telemetry.lines import new_lines
from asyncflow.telemetry.spans import read_timeline
from asyncflow.timeline.causes import Shares, attribute, shares

log = logging.getLogger(__name__)

T = TypeVar("T")
_ANSWER_S = 20.0
NO_SHARES: Mapping[str, Shares] = MappingProxyType({})


class RewardOutcomes(msgspec.Struct, frozen=True):
    """Outcomes of all judged samples, as in ``rewards.json``."""

    scored: int = 0
    failed: dict[str, int] = {}
    first_failure: str = ""


class EvidenceReply(msgspec.Struct, frozen=True):
    """Reply to ``GET /v1/evidence``."""

    job: dict[str, Any]
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    lives: dict[str, Life]
    rewards: RewardOutcomes


def address_of(target: str) -> str | None:
    """Return the URL of a driver's HTTP that ``target`` names; None if it names a folder.

    Raises ManifestError if it names neither.
    """
    if Path(target).is_dir():
        return None
    scheme, separator, rest = target.rpartition("://")
    if scheme in ("", "http") and _names_port(rest):
        return f"http://{rest}"
    hint = "Use the folder of a run, e.g. runs/quickstart, or HOST:PORT of its driver's HTTP (9571 on Kubernetes)"
    what = "this is not the address of a driver's HTTP" if separator or ":" in rest else "there is no such folder"
    raise ManifestError(what, where=target, hint=hint)


def _names_port(rest: str) -> bool:
    """Return whether ``rest`` is exactly HOST:PORT."""
    try:
        split = urlsplit(f"http://{rest}")
        return bool(split.hostname and split.port) and split.username is None and split.netloc == rest
    except ValueError:
        return False


def read(target: str) -> Evidence:
    """Return the evidence of the run in a folder, or of the driver at an address. Raises ManifestError."""
    url = address_of(target)
    return read_folder(Path(target)) if url is None else read_driver(url)


def read_folder(folder: Path) -> Evidence:
    """Return the evidence in a run's files, and its driver's status if it is active. Raises ManifestError."""
    check_run(folder)
    rewards = _json(folder / REWARDS, RewardOutcomes) or RewardOutcomes()
    return _evidence(
        load_job(folder / JOB),
        EvidenceReply(
            job={},
            steps=new_lines(folder / METRICS, 0)[0],
            events=new_lines(folder / EVENTS, 0)[0],
            lives=_json(folder / LIVES, dict[str, Life]) or {},
            rewards=rewards,
        ),
        status=_status_of(folder),
        spent=spent_of(folder),
    )


def spent_of(folder: Path, *, last_s: float | None = None) -> dict[str, Shares]:
    """Return the seconds of each process of a run by kind and cause, from its spans; {} if there are none.

    last_s: only of so many last seconds, by default from the first prompt on.
    """
    try:
        timeline = read_timeline(folder)
    except ManifestError:
        return {}
    if last_s is not None:
        begin = timeline.end - last_s
        return shares(attribute(timeline.since(begin)), begin=begin)
    return shares(attribute(timeline), begin=timeline.first(FIRST_DISPATCH))


def read_driver(url: str) -> Evidence:
    """Return the evidence of the driver at ``url``. Raises ManifestError if no driver answers."""
    answer = fetch(url, "/v1/evidence", within_s=_ANSWER_S)
    if answer is None:
        hint = "On Kubernetes: kubectl port-forward pod/JOB-driver-0 9571, then 127.0.0.1:9571"
        raise ManifestError("no driver of a job answers there", where=url, hint=hint)
    try:
        known = msgspec.json.decode(answer, type=EvidenceReply)
    except msgspec.MsgspecError as error:
        raise ManifestError(f"the answer is not that of a driver: {error}", where=f"{url}/v1/evidence") from error
    job = load_job(io.BytesIO(msgspec.json.encode(known.job)))
    return _evidence(job, known, status=ask_at(url, DriverStatus))


def _evidence(
    job: RLJob, known: EvidenceReply, *, status: DriverStatus | None, spent: Mapping[str, Shares] = NO_SHARES
) -> Evidence:
    causes: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    lived: defaultdict[str, float] = defaultdict(float)
    for process in spent.values():
        lived[process.role] += process.seconds
        for cause, idle in process.idle.items():
            causes[process.role][cause] += idle
    return Evidence(
        name=job.name,
        spec=job.spec,
        steps=surviving(line for line in known.steps if _is_step(line)),
        events=known.events,
        lives=known.lives,
        scored=known.rewards.scored,
        failed=known.rewards.failed,
        first_failure=known.rewards.first_failure,
        status=status,
        causes=causes,
        lived=lived,
    )


def _is_step(line: Mapping[str, Any]) -> bool:
    return {"step", "attempt", "wall_s"} <= line.keys()


def _status_of(folder: Path) -> DriverStatus | None:
    """Return the status of a run's driver; None if the run has ended or the driver does not answer."""
    if (folder / SUMMARY).is_file():
        return None
    record = load_record(folder)
    return ask_at(record.http, DriverStatus) if record is not None and record.http else None


def _json(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read, so checks of its figures find nothing: %s", path, error)
        return None
