"""The audit of a queue that has several controllers: every row counted once, over all ledgers.

The home's ledger has what became of rows; a shard's has what its tasks did with them, and is a copy in the rest.

Invariant: what is found in the home's ledger is found again in those that follow it, and told once.
"""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.ledger.records import newest
from asyncflow.queue.protocol.messages import AuditReport

_PROBLEMS = 20


def shard_ledger(home: Path, index: int) -> Path:
    """Return the folder of a controller's ledger, where ``home`` is that of the home's."""
    return home / str(index) if index else home


def audit_ledgers(home: Path) -> AuditReport:
    """Audit the home's ledger and those that lie beside it. Raises as ``audit_ledger`` does."""
    shards = sorted(int(path.name) for path in home.glob("[0-9]*") if path.is_dir() and newest(path) is not None)
    return merge_audits(audit_ledger(home), {index: audit_ledger(shard_ledger(home, index)) for index in shards})


def merge_audits(home: AuditReport, shards: dict[int, AuditReport]) -> AuditReport:
    """Return one report: rows as the home has them, and whatever a task did with one that it should not."""
    all_of = (home, *shards.values())
    found = [
        f"controller {index}: {problem}"
        for index, report in shards.items()
        for problem in report.problems
        if problem not in home.problems
    ]
    return replace(
        home,
        redeliveries=sum(report.redeliveries for report in all_of),
        resets=sum(report.resets for report in all_of),
        peeked=sum(report.peeked for report in all_of),
        problems=(home.problems + found)[:_PROBLEMS],
    )
