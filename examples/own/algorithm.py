"""A user-defined algorithm with its own loss: the policy gradient with truncated importance weights min(ρ, 2)."""

import sys

from torch import Tensor

import asyncflow


class TruncatedImportance(asyncflow.Trainer):
    def update(self, batch: asyncflow.Experience) -> Tensor:
        logprobs = self.logprobs(batch)
        ratio = (logprobs.detach() - batch.logprobs).exp().clamp(max=2.0)
        return -(ratio * batch.advantages[:, None] * logprobs)[batch.mask].sum()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python algorithm.py JOB.yaml FOLDER [PATH=VALUE ...]")
    with asyncflow.init_engines(sys.argv[1], output=sys.argv[2], overrides=sys.argv[3:]) as engines:
        TruncatedImportance(engines).fit()
