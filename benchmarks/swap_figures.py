"""The figures of a delayed-update run and their limits. Pure, except for ``Figures.read``.

Invariant: every figure comes from the records of the run (logs, ledger, observed cells, ``metrics.jsonl``), and none
from its settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from run_lines import lines
from stopped_receiver import Incident
from swap_records import VersionChange, changes, published

from asyncflow.api.load import load_job
from asyncflow.queue.ledger.audit import audit_ledger
from asyncflow.queue.protocol.messages import AuditReport

STALLED = 0.05
"""The largest share of a transfer's time for which an instance may stall because of it."""
TRANSFER_S = (4.0, 6.5)
NOISE = 0.1
"""The share of a transfer by which two runs on a busy machine may differ."""
SAME = 0.1
"""The share by which the mean seconds from publication to swap may differ."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One line of the table. limit: "" for a figure without a limit."""

    what: str
    limit: str = ""
    measured: str
    met: bool = True


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The records of a run. changes: by rollout; steps: lines of metrics.jsonl; rows: lines of the row observer."""

    published: dict[int, float]
    changes: list[list[VersionChange]]
    steps: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    samples: int
    last: int
    audit: AuditReport
    incident: Incident | None

    @classmethod
    def read(cls, folder: Path, *, rollouts: int, incident: Incident | None) -> Figures:
        """Read the folder of a run that has ended."""
        algorithm = load_job(folder / "job.yaml").spec.algorithm
        logs = folder / "logs"
        return cls(
            published=published((logs / "driver-0.log").read_text()),
            changes=[changes((logs / f"rollout-{index}.log").read_text()) for index in range(rollouts)],
            steps=lines(folder),
            rows=lines(folder, "versions.jsonl"),
            samples=algorithm.steps * algorithm.prompts_per_step * algorithm.group_size,
            last=algorithm.steps,
            audit=audit_ledger(folder / "ledger"),
            incident=incident,
        )

    @property
    def all_changes(self) -> list[VersionChange]:
        """The changes of the rollouts that were never stopped."""
        victim = self.incident.victim if self.incident else None
        return [change for index, own in enumerate(self.changes) if index != victim for change in own]

    @property
    def t_gen(self) -> float:
        """The mean seconds of generating one D_k, without the change to θ_1, before which an instance generates two."""
        return fmean(change.since_s for change in self.all_changes if change.version > 1)

    @property
    def t_train(self) -> float:
        """The mean seconds of the trainer's own work on one step."""
        return fmean(line["compute_s"] + line["optimizer_s"] + line["publish_s"] for line in self.steps)

    def arrivals(self, selected: Sequence[VersionChange]) -> list[float]:
        """Return the seconds from the publication of each version until it was staged."""
        return [change.staged - self.published[change.version] for change in selected]

    def delays(self, selected: Sequence[VersionChange]) -> list[float]:
        """Return the seconds from the publication of each version until the swap to it."""
        return [change.swapped - self.published[change.version] for change in selected]


def plain_bars(run: Figures) -> list[Bar]:
    """Return the limits of the undisturbed run."""
    transfers = [change.transfer_s for change in run.all_changes]
    needed = run.t_train + fmean(transfers)
    expected = len(run.changes) * (run.last - 2)
    return [
        Bar(
            what="a transfer, real bytes over a capped link",
            limit="about 5 s",
            measured=f"{_span(transfers)} s for {run.all_changes[0].nbytes / 2**20:.0f} MiB",
            met=TRANSFER_S[0] <= min(transfers) and max(transfers) <= TRANSFER_S[1],
        ),
        Bar(
            what="T_gen, and T_train + transfer",
            limit="T_gen the longer",
            measured=f"{run.t_gen:.2f} s, {run.t_train:.2f} + {fmean(transfers):.2f} s",
            met=run.t_gen >= needed,
        ),
        Bar(
            what="swaps to a version that D_k needs",
            limit=str(expected),
            measured=str(len(transfers)),
            met=len(transfers) == expected,
        ),
        *_stalls(run.all_changes),
        Bar(
            what="from publication to staged, to swapped",
            measured=f"{_span(run.arrivals(run.all_changes))} s, {_span(run.delays(run.all_changes))} s",
        ),
        *_exactness(run),
    ]


def stopped_bars(run: Figures, plain: Figures, fewer: Figures, *, lease_s: float) -> list[Bar]:
    """Return the limits of the run with a stopped rollout.

    plain: the undisturbed run; fewer: a run with one rollout less, whose rollouts have the load of the others here.
    """
    incident = run.incident
    if incident is None:
        return [Bar(what="one rollout was stopped", limit="yes", measured="no", met=False)]
    after = [change for change in run.all_changes if incident.stopped < change.swapped < incident.continued]
    usual, noise = (
        max(plain.arrivals(plain.all_changes)),
        NOISE * max(change.transfer_s for change in plain.all_changes),
    )
    expected = (len(run.changes) - 1) * (run.last - 2)
    stopped_s, started = incident.continued - incident.stopped, run.published[incident.during]
    return [
        Bar(
            what=f"rollout {incident.victim} under SIGSTOP while it received θ{incident.during}",
            limit=f"longer than a lease, {lease_s:g} s",
            measured=f"{stopped_s:.1f} s, from {incident.stopped - started:.1f} s after publication",
            met=stopped_s > lease_s,
        ),
        Bar(
            what="its rows leased by other rollouts",
            limit=f"within {lease_s:g} s",
            measured=f"{incident.held} rows, {_span(incident.again)} s after the stop",
            met=len(incident.again) > 0 and max(incident.again) <= lease_s,
        ),
        Bar(
            what="the others' swaps, and those during the stop",
            limit=str(expected),
            measured=f"{len(run.all_changes)}, {len(after)}",
            met=len(run.all_changes) == expected and len(after) > 0,
        ),
        Bar(
            what="the others, from publication to staged",
            limit=f"at most {usual + noise:.2f} s",
            measured=f"{_span(run.arrivals(after))} s",
            met=max(run.arrivals(after)) <= usual + noise,
        ),
        *_stalls(after),
        Bar(
            what="the others, from publication to swapped, mean; of a run without the stopped one",
            limit=f"within {SAME:.0%}",
            measured=f"{fmean(run.delays(after)):.2f} s; {fmean(fewer.delays(fewer.all_changes)):.2f} s",
            met=abs(fmean(run.delays(after)) / fmean(fewer.delays(fewer.all_changes)) - 1) <= SAME,
        ),
        *_exactness(run),
    ]


def control_bars(run: Figures) -> list[Bar]:
    """Return the limits of the control, whose transfers are too long to be hidden and must cause stalls."""
    worst = max(change.stall_s / change.transfer_s for change in run.all_changes)
    return [
        Bar(
            what="T_gen without its stalls, and the transfer",
            measured=f"{run.t_gen - fmean(change.stall_s for change in run.all_changes if change.version > 1):.2f} s, "
            f"{_span([change.transfer_s for change in run.all_changes])} s",
        ),
        Bar(
            what="stalled, of the transfer",
            limit=f"more than {STALLED:.0%}: it cannot be hidden",
            measured=f"{_mean_stall(run.all_changes):.1%} in the mean, {worst:.1%} at worst",
            met=_mean_stall(run.all_changes) > STALLED,
        ),
        *_exactness(run),
    ]


def _stalls(selected: Sequence[VersionChange]) -> list[Bar]:
    worst = max(selected, key=lambda change: change.stall_s / change.transfer_s)
    share = worst.stall_s / worst.transfer_s
    return [
        Bar(
            what="stalled by receiving or swapping, worst of all transfers",
            limit=f"at most {STALLED:.0%} of it",
            measured=f"{share:.2%} ({worst.stall_s:.3f} of {worst.transfer_s:.2f} s); mean {_mean_stall(selected):.2%}",
            met=share <= STALLED,
        ),
        Bar(
            what="of a transfer without a sequence, for whatever reason",
            measured=f"{max(change.idle_s / change.transfer_s for change in selected):.2%} at worst, "
            f"loading took {_span([change.swap_s for change in selected], digits=3)} s",
        ),
    ]


def _exactness(run: Figures) -> list[Bar]:
    read = [row for row in run.rows if "versions" in row]
    mixed = sum(len(row["versions"]) != 1 for row in read)
    wrong = sum(row["versions"] != [max(0, row["step"] - 2)] for row in read)
    lags = ("staleness_start_max", "staleness_start_mean", "staleness_end_max", "staleness_token_mean")
    late = [line["step"] for line in run.steps if any(line[lag] != min(1, line["step"] - 1) for lag in lags)]
    rows = {(row["serial"], row["sample"]) for row in read}
    audit = run.audit
    return [
        Bar(
            what="responses whose cells were read; of mixed versions; D_k not from θ_max(0,k-2)",
            limit=f"{run.samples}; 0; 0",
            measured=f"{len(rows)}; {mixed}; {wrong}",
            met=len(rows) == run.samples and not mixed and not wrong,
        ),
        Bar(
            what="steps; those whose staleness is not 0 (k=1), 1 (k>1) for every token, as trained",
            limit=f"{run.last}; 0",
            measured=f"{len(run.steps)}; {len(late)}",
            met=len(run.steps) == run.last and not late,
        ),
        Bar(
            what="audit: trained; lost; duplicated",
            limit=f"{run.samples}; 0; 0",
            measured=f"{audit.trained}; {audit.lost}; {audit.duplicated} (redelivered {audit.redeliveries})",
            met=audit.ok and audit.trained == run.samples,
        ),
    ]


def _mean_stall(selected: Sequence[VersionChange]) -> float:
    return sum(change.stall_s for change in selected) / sum(change.transfer_s for change in selected)


def _span(values: Sequence[float], *, digits: int = 2) -> str:
    if not values:
        return "none"
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"
