"""One process of the reward role: reward functions that score rows, run by ``tasks.worker``."""

from __future__ import annotations

import asyncio

from asyncflow.api.graph import REWARD
from asyncflow.api.names import EVAL, LOSS_MASK, TRAIN
from asyncflow.environments.transcripts import Transcriber, stop_ids_of
from asyncflow.errors import ManifestError
from asyncflow.models.source import materialize_config
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.rewards.service import open_rewards
from asyncflow.roles.context import JobContext, RoleOptions, run_role
from asyncflow.roles.task import work
from asyncflow.tasks.judging import REWARD_COLUMNS, Judge
from asyncflow.tasks.worker import TaskSettings
from asyncflow.telemetry.metrics import RewardMetrics


def main(options: RoleOptions) -> int:
    """Run one process of the reward."""
    return run_role(serve, options)


async def serve(context: JobContext) -> None:
    """Score rows until this process is to stop or to drain. Raises ManifestError if a function cannot be loaded."""
    spec, options = context.job.spec, context.options
    role = spec.reward.role
    if role is None:
        raise ManifestError("the job has no reward of its own", where="spec.reward.role", hint="Add it")
    folder = await asyncio.to_thread(materialize_config, spec.model.source, options.workdir)
    tokenizer = Tokenizer.load(folder)
    rewards = open_rewards(spec.reward, workdir=context.folder, run=options.workdir, within_s=context.start_s)
    settings = TaskSettings(
        partitions=(TRAIN, EVAL),
        task=REWARD,
        reads=("task", "response_ids", *((LOSS_MASK,) if spec.environment is not None else ())),
        writes=REWARD_COLUMNS,
        batch=role.batch,
        parallel=role.parallel,
        lease_s=role.lease_seconds,
        drain_s=role.drain_seconds,
    )
    transcriber = Transcriber(tokenizer=tokenizer, stop_ids=stop_ids_of(tokenizer, spec.sampling.stop))
    judge = Judge(rewards, transcriber=transcriber, sizes=spec.group_sizes)
    try:
        if await context.run_until_stopped(rewards.start()):
            role.check(by_group=rewards.by_group)
            await work(context, settings, judge.compute, metrics=RewardMetrics())
    finally:
        await rewards.close()
