"""End of a job: its detection, the last actions, and the summary of the run.

A run succeeds when its last weights are in a checkpoint, every evaluation that is still possible is recorded, and the
trainer has written its exports. A run is suspended when its newest step is in a checkpoint. Members are directed to
stop only after that. A paused job reaches no further step, so it is suspended immediately: a trainer that is directed
to stop writes a checkpoint of the last step that it finished.

Invariants: when a success is declared, everything that it promises has been written; ``/v1/status`` names each wait
before that, and the last wait has a deadline; each figure of ``summary.json`` is computed from lines, from the audit of
the ledger, or from reports of roles, and is null if it was not measured. Durations include only the time in which the
job was up (``Lives.up_s``), not the time in which the run was suspended, or dead until it was resumed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncflow import clock
from asyncflow.api.status import Phase, RewardState
from asyncflow.driver.dispatch import CALL_TIMEOUT_S
from asyncflow.driver.evaluation import EvaluationResult
from asyncflow.driver.groups import RewardTally
from asyncflow.driver.journal import FIRST_DISPATCH, SUMMARY, write_whole
from asyncflow.driver.lives import Lives
from asyncflow.driver.members import Members
from asyncflow.driver.progress import RunProgress
from asyncflow.driver.tasks import TRAIN
from asyncflow.errors import DeadlineExceeded, PeerLost
from asyncflow.queue.client import QueueClient
from asyncflow.queue.protocol.messages import AuditReport
from asyncflow.rpc.membership import Best

LAST_HEARTBEAT_S = 2.0
"""Longest wait for a last heartbeat of all members, in seconds; it contains the figures of the last second."""


def summarize(
    progress: RunProgress,
    *,
    audit: AuditReport,
    phase: str,
    finished: float,
    lives: Lives,
    rewards: RewardState,
    devices: int,
    prompts_skipped: int,
    best: Best | None,
    exports: Mapping[str, int],
) -> dict[str, Any]:
    """Return the summary.

    finished: unix seconds; devices: as ``RLJobSpec.devices`` counts them; prompts_skipped: number of prompts that were
    too long; best: version that the trainer keeps as the best; exports: step of each exported model, by folder.
    """
    lines = progress.lines
    evaluations = [progress.evaluations[step] for step in sorted(progress.evaluations)]
    first_eval = evaluations[0] if evaluations else None
    last_eval = evaluations[-1] if evaluations else None
    dispatched = progress.at(FIRST_DISPATCH)
    tokens_trained = sum(int(line["tokens"]) for line in lines)
    training_s = lives.up_s(dispatched, lines[-1]["at"]) if lines and dispatched is not None else None
    samples = sum(int(line["samples"]) for line in lines)
    gaps = [float(line["logprob_gap_p99"]) for line in lines if line.get("logprob_gap_p99") is not None]
    return {
        "phase": phase,
        "steps": progress.done,
        "wall_s": lives.up_s(progress.started, finished),
        "training_s": training_s,
        "eval_prompts": last_eval.prompts if last_eval else None,
        "eval_accuracy_first": first_eval.accuracy if first_eval else None,
        "eval_accuracy_last": last_eval.accuracy if last_eval else None,
        "eval_greedy_first": first_eval.greedy if first_eval else None,
        "eval_greedy_last": last_eval.greedy if last_eval else None,
        "eval_reward_first": first_eval.reward if first_eval else None,
        "eval_reward_last": last_eval.reward if last_eval else None,
        "eval_pass_at_first": first_eval.pass_at if first_eval else {},
        "eval_pass_at_last": last_eval.pass_at if last_eval else {},
        "eval_sets_first": _sets(first_eval),
        "eval_sets_last": _sets(last_eval),
        "best": msgspec.to_builtins(best) if best else None,
        "exports": dict(exports),
        "reward_first": lines[0]["reward"] if lines else None,
        "reward_last": lines[-1]["reward"] if lines else None,
        "tokens_generated": lives.tokens_generated,
        "tokens_trained": tokens_trained,
        "tpspd": tokens_trained / training_s / devices if training_s and devices else None,
        "devices": devices,
        "staleness_start_max": max((line["staleness_start_max"] for line in lines), default=None),
        "staleness_start_mean": (
            sum(line["staleness_start_mean"] * line["samples"] for line in lines) / samples if samples else None
        ),
        "staleness_end_max": max((line["staleness_end_max"] for line in lines), default=None),
        "staleness_token_mean": (
            sum(line["staleness_token_mean"] * line["response_tokens"] for line in lines)
            / max(1, sum(line["response_tokens"] for line in lines))
            if lines
            else None
        ),
        "prompts_skipped": prompts_skipped,
        "groups_all_right": rewards.groups_all_right,
        "groups_all_wrong": rewards.groups_all_wrong,
        "samples_dispatched": audit.dispatched,
        "samples_trained": audit.trained,
        "samples_filtered": audit.filtered,
        "samples_dropped": audit.dropped,
        "samples_unfinished": audit.unfinished,
        "rewards_failed": rewards.failed,
        "first_failed_reward": rewards.first_failure or None,
        "samples_lost": audit.lost,
        "samples_duplicated": audit.duplicated,
        "idle_share": lives.idle_shares(finished),
        "steps_skipped": sum(int(line.get("skipped", 0)) for line in lines),
        "logprob_gap_p99": max(gaps, default=None),
        "trainer_attempts": audit.attempts,
        "redeliveries": audit.redeliveries,
        "redelivered_because": audit.reasons,
    }


def _sets(evaluation: EvaluationResult | None) -> dict[str, dict[str, Any]]:
    """Return the results of the named sets."""
    return {name: asdict(result) for name, result in evaluation.sets.items()} if evaluation else {}


@dataclass(kw_only=True)
class Ending:
    """Waits for the end of one job and concludes it.

    changed: waits until the state may have changed; unevaluated: returns the versions whose evaluation is missing and
    still possible; suspending: returns whether the job is to be suspended; export_s: most seconds from the last commit
    to the end of the export; devices: number of devices of the job; prompts_skipped: returns the number of prompts that
    were too long; checkpoint: step of the newest commit, and the time when this driver first saw it, by ``clock.now``.
    """

    folder: Path
    queue: QueueClient
    progress: RunProgress
    members: Members
    changed: Callable[[], Awaitable[None]]
    unevaluated: Callable[[], list[int]]
    suspending: Callable[[], bool]
    export_s: float
    devices: int
    rewards: RewardTally
    prompts_skipped: Callable[[], int]
    checkpoint: tuple[int, float] | None = field(default=None, init=False)

    async def reached(self) -> Phase:
        """Wait for the end and return its phase. Raises DeadlineExceeded if the trainer does not finish its export."""
        requested = self.progress.done
        while True:
            await self.changed()
            trained = self.progress.done >= self.progress.steps
            if trained and not self.unevaluated() and await self.committed():
                await self._exported()
                return "Succeeded"
            if self.suspending() and (self.rewards.paused or await self.committed()):
                return "Suspended"
            if self.suspending() and self.progress.done > requested:
                requested = self.progress.done
                self.members.ask_for_checkpoint()

    async def committed(self) -> bool:
        """Return whether the ledger records a checkpoint of the newest step; False if the queue is unreachable."""
        try:
            snapshot = await self.queue.snapshot(partition=TRAIN, timeout=CALL_TIMEOUT_S)
        except (PeerLost, DeadlineExceeded):
            return False
        self.note_commit(snapshot.last_committed_step)
        return snapshot.last_committed_step >= self.progress.done

    def note_commit(self, step: int) -> None:
        """Record the step of the newest checkpoint, 0 for none."""
        if step > 0 and (self.checkpoint is None or step > self.checkpoint[0]):
            self.checkpoint = (step, clock.now())

    async def conclude(self, phase: Phase) -> None:
        """Write the summary."""
        if phase == "Succeeded":
            await self.queue.close_partition(partition=TRAIN, step=self.progress.steps, timeout=CALL_TIMEOUT_S)
        audit = await self.queue.audit(timeout=CALL_TIMEOUT_S)
        finished = clock.now()
        await self.members.await_heartbeats(within_s=LAST_HEARTBEAT_S)
        self.members.save(clock.now())
        self.rewards.flush()
        self.progress.note(phase, at=finished)
        summary = summarize(
            self.progress,
            audit=audit,
            phase=phase,
            finished=finished,
            lives=self.members.lives,
            rewards=self.rewards.state,
            devices=self.devices,
            prompts_skipped=self.prompts_skipped(),
            best=self.members.kept_best,
            exports=self.members.exports,
        )
        write_whole(self.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")

    async def _exported(self) -> None:
        try:
            async with asyncio.timeout(self.export_s):
                while not self.members.exported:
                    await self.changed()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the trainer did not write export/ within {self.export_s:g} s",
                where="driver",
                hint="See its log; the weights are in the newest checkpoint, and the run can be resumed",
            ) from None
