"""Rewards of generated samples: scored one by one, or all samples of a prompt together.

A reward function over groups needs all samples of a prompt. The ``rollout`` task leases whole groups only, so all rows
of a group are in one claim, at this instance, and at one storage unit. They are generated here, wait for each other
without a slot, and are scored and delivered together.

Invariants: a function over groups is never called with a part of a group. If a row of a group leaves this instance
before the group is scored (it is drained, or a lease is lost), the waiting samples are given back too, with their
responses, so that the next holder has the whole group. If some samples of a group were delivered before and the others
are made again because a storage unit lost them, these have no reward (``incomplete``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from asyncflow.data.base import Message
from asyncflow.rewards.service import Rewards
from asyncflow.rewards.wire import RewardResult
from asyncflow.rollout.job import Job


class Scoring:
    """Scores samples by ``rewards``. sizes: number of samples of a group, by purpose."""

    def __init__(self, rewards: Rewards, *, sizes: Mapping[str, int]) -> None:
        self._rewards = rewards
        self._sizes = sizes

    async def score(self, job: Job, transcript: list[Message]) -> RewardResult | None:
        """Return the reward of a response of ``job``, or None if its group is broken up.

        transcript: the response as texts. If groups are scored together, waits for the other samples of the group.
        """
        example = job.example(transcript)
        if not self._rewards.by_group:
            return (await self._rewards.score([example]))[0]
        group, size = job.group, self._sizes.get(job.purpose, 0)
        if len(group.jobs) < size:
            return RewardResult.incomplete(len(group.jobs), size=size)
        group.examples[job] = example
        if group.scored is None:
            group.scored = asyncio.get_running_loop().create_future()
        if group.broken:
            group.break_up()
        elif len(group.examples) == len(group.jobs):
            jobs = sorted(group.jobs, key=lambda each: each.row.meta.sample)
            results = await self._rewards.score([group.examples[each] for each in jobs])
            if not group.scored.done():
                group.scored.set_result(dict(zip(jobs, results, strict=True)))
        scored = await asyncio.shield(group.scored)
        return None if scored is None else scored[job]
