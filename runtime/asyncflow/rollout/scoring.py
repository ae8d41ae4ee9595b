"""The rewards of generated samples: of each alone, or of all samples of a prompt at once.

A function over groups has to see all samples of a prompt. The ``rollout`` task gives whole groups only, so all rows of
one are in one claim, here, and at one storage unit: they are generated here, wait for one another without a slot, and
are scored, and delivered, together.

Invariants: no function over groups is called with a part of a group. Where a row of a group leaves this instance before
the group is scored (it is drained, or a lease is lost), those that wait are given back too, with their responses: the
next holder has the whole group. Where others of a group were delivered before and these come again, because a storage
unit lost them, they have no reward (``incomplete``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from asyncflow.data.base import Message
from asyncflow.rewards.service import Rewards
from asyncflow.rewards.wire import RewardResult
from asyncflow.rollout.job import Job


class Scoring:
    """Has samples scored by ``rewards``. sizes: samples of a group, by purpose."""

    def __init__(self, rewards: Rewards, *, sizes: Mapping[str, int]) -> None:
        self._rewards = rewards
        self._sizes = sizes

    async def score(self, job: Job, transcript: list[Message]) -> RewardResult | None:
        """Return the reward of what was made for ``job``, as texts; None where its group came apart.

        Waits for the other samples of its group where these are scored together.
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
        if group.apart:
            group.come_apart()
        elif len(group.examples) == len(group.jobs):
            jobs = sorted(group.jobs, key=lambda each: each.row.meta.sample)
            results = await self._rewards.score([group.examples[each] for each in jobs])
            if not group.scored.done():
                group.scored.set_result(dict(zip(jobs, results, strict=True)))
        scored = await asyncio.shield(group.scored)
        return None if scored is None else scored[job]
