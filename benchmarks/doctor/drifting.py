"""An engine whose log-probs have an error that grows with each version of the weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncflow.identity import Version
from asyncflow.rollout.engines.base import Completion, GenerationRequest
from asyncflow.rollout.engines.transformers import TransformersEngine


class Drifting(TransformersEngine):
    """The engine ``transformers``, with wrong log-probs for training responses."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one response."""
        done = await super().generate(request)
        if request.purpose != "train":
            return done
        steps = np.array([Version.unpack(int(packed)).step for packed in done.versions])
        off = np.random.default_rng(request.key.sample).normal(0.0, 0.02, len(steps))
        return replace(done, logprobs=(done.logprobs + steps * off).astype(np.float32))
