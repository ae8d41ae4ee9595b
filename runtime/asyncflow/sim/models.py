"""Models of durations: engines, trainer, links, queue, rewards; and the file that ``asyncflow sim fit`` writes.

Invariant: models hold only seconds and counts, no state; 0 means that an action takes no time, so a scenario without
models of links, queue and rewards is ideal.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Self

import msgspec

from asyncflow.errors import ManifestError
from asyncflow.rollout.lengths import Lengths

_HINT = "asyncflow sim fit DIR writes such a file"

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class EngineModel(msgspec.Struct, frozen=True, kw_only=True):
    """An engine with processor sharing; the fields are those of the options of the simulated engine.

    slots: number of concurrent sequences; token_s, prefill_s, load_s: seconds per token, per response and per load of a
    version; share_s: additional seconds per token for each further running sequence, so that n of them take token_s +
    share_s * (n - 1) for one token each; recompute_s: seconds per token whose cache is recomputed when weights are
    loaded under running sequences (their prompts and their tokens so far); lengths: of responses.
    """

    slots: _Count = 1
    token_s: _Seconds = 0.0
    share_s: _Seconds = 0.0
    prefill_s: _Seconds = 0.0
    load_s: _Seconds = 0.0
    recompute_s: _Seconds = 0.0
    lengths: Lengths = Lengths()

    def __post_init__(self) -> None:
        """Raise ValueError for share_s without token_s."""
        if self.share_s and not self.token_s:
            raise ValueError("share_s without token_s: a sequence that runs alone must take time, too")

    @property
    def share(self) -> float:
        """Slowdown of running sequences by each further sequence, as a share of token_s."""
        return self.share_s / self.token_s if self.share_s else 0.0


class TrainerModel(msgspec.Struct, frozen=True, kw_only=True):
    """A gang of ranks.

    Forward and backward of a slot take slot_s + sample_s * samples + token_s * tokens, with the largest counts among
    the ranks. optimizer_s: other seconds of a step; copy_s: after that, until the weights may change again; publish_s:
    until the version can be pulled, including the copy; checkpoint_s: for which a checkpoint delays the trainer.
    """

    slot_s: _Seconds = 0.0
    sample_s: _Seconds = 0.0
    token_s: _Seconds = 0.0
    optimizer_s: _Seconds = 0.0
    copy_s: _Seconds = 0.0
    publish_s: _Seconds = 0.0
    checkpoint_s: _Seconds = 0.0


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer of a version to a rollout.

    pull_s: seconds of one pull; hop_s: additional seconds for each level of the tree along which a version spreads, in
    which each receiver forwards data to ``fanout`` others while it receives it.
    """

    pull_s: _Seconds = 0.0
    hop_s: _Seconds = 0.0
    fanout: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 2

    def seconds(self, place: int) -> float:
        """Return the seconds of the pull with number ``place``, counted from 0."""
        if not self.hop_s:
            return self.pull_s
        if self.fanout == 1:
            return self.pull_s + self.hop_s * place
        level = math.floor(math.log(place * (self.fanout - 1) + 1, self.fanout) + 1e-9)
        return self.pull_s + self.hop_s * level


class StorageModel(msgspec.Struct, frozen=True, kw_only=True):
    """The delays of the queue.

    put_s: from the admission of a prompt until it can be claimed; claim_s: from a claim for which rows are ready until
    the engine may start them; write_s: from the reward of a sample until its row is complete; decide_s: from the last
    row of a group until the trainer may have it; slot_s: from the decision about a slot until the trainer has it.
    units, byte_s, token_bytes: number of storage units, each of which transfers sequentially, seconds per byte of a
    transfer, and bytes of a response token.
    """

    put_s: _Seconds = 0.0
    claim_s: _Seconds = 0.0
    write_s: _Seconds = 0.0
    decide_s: _Seconds = 0.0
    slot_s: _Seconds = 0.0
    units: _Count = 1
    byte_s: _Seconds = 0.0
    token_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 16


class RewardTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a sample: lognormal with median ``seconds``; at most ``workers`` concurrently in each rollout."""

    seconds: _Seconds = 0.0
    sigma: _Seconds = 0.0
    workers: _Count = 1


class StartModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until a role works.

    restart_s: from the kill of a rollout until its replacement exists; detect_s: until its rows can be claimed again.
    """

    trainer_s: _Seconds = 0.0
    rollout_s: _Seconds = 0.0
    restart_s: _Seconds = 1.0
    detect_s: _Seconds = 0.0


class Colocation(msgspec.Struct, frozen=True, kw_only=True):
    """One set of devices that first generates and then trains: the baseline of the papers.

    to_train_s: from the last sequence of a step to its training (the engines free the devices, weights are resharded);
    to_generate_s: the way back, in place of publication and pull.
    """

    to_train_s: _Seconds = 0.0
    to_generate_s: _Seconds = 0.0


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """All models of a job. prompt_tokens: mean tokens of a prompt."""

    engine: EngineModel
    trainer: TrainerModel
    link: LinkModel = LinkModel()
    storage: StorageModel = StorageModel()
    reward: RewardTimes = RewardTimes()
    start: StartModel = StartModel()
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file that ``write`` wrote. Raises ManifestError."""
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except OSError as error:
            raise ManifestError(f"cannot be read: {error.strerror}", where=str(file), hint=_HINT) from error
        except msgspec.DecodeError as error:
            raise ManifestError(f"holds no models: {error}", where=str(file), hint=_HINT) from error

    def write(self, file: Path) -> None:
        """Write all models as JSON. Raises ManifestError if the file cannot be written."""
        try:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        except OSError as error:
            raise ManifestError(
                f"cannot be written: {error.strerror}", where=str(file), hint="Use another path"
            ) from error
