"""Tests of how far the weights of a replay are from those of the run."""

from pathlib import Path
from unittest.mock import Mock

import torch

from asyncflow.replay.again import weights_gap
from asyncflow.training.checkpoint import CheckpointManifest, Checkpoints
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.torch.backend import WEIGHTS_FILE
from asyncflow.training.torch.shards import tensor_shard, write_gathered, write_shards


def test_the_gap_to_weights_that_one_rank_gathered_is_known(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "replay"
    theirs, own = ([tensor_shard("w", torch.full((3, 2), value))] for value in (1.0, 1.25))
    manifest = CheckpointManifest(attempt=0, step=1, samples=8)
    Checkpoints(run / "checkpoints").write(
        manifest, lambda folder: write_gathered(folder, {WEIGHTS_FILE: theirs}, group=SingleProcess(), ranks=Mock())
    )
    Checkpoints(target / "checkpoints").write(manifest, lambda folder: write_shards(folder / WEIGHTS_FILE, own))
    assert weights_gap(run, target, step=1) == 0.25
    assert weights_gap(run, target, step=2) is None
