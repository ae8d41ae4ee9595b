"""The critic in a process of its own: what it computes is what the critic inside a trainer does, and moves with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ppo_reference import rewarded
from test_ppo import arrays, critic_of, moving, train
from train_reference import assert_same_bits, samples

from asyncflow.errors import DiskError, ManifestError, Refused
from asyncflow.rpc.columns import Jagged
from asyncflow.rpc.server import RpcServer
from asyncflow.training.batch import MicroBatch
from asyncflow.training.checkpoint import Checkpoints
from asyncflow.training.counting import CountingBackend
from asyncflow.training.critic import CriticLink, CriticService
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, OptimizerSettings
from asyncflow.training.torch.backend import TorchBackend
from asyncflow.training.torch.critic_role import TorchCritic


class Apart:
    """Critics behind sockets, in an event loop of their own thread, and links to the newest of them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.loop = asyncio.new_event_loop()
        self.critic: Any = None
        self._model = model
        self._address: str | None = None
        self._servers: list[tuple[RpcServer, CriticService]] = []
        self._links: list[CriticLink] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def start(self, settings: BackendSettings, kind: type[TorchBackend | CountingBackend] = TorchBackend) -> None:
        """Start a critic, which takes the place of the one before."""

        def make() -> Any:
            self.critic = kind.separate_critic(settings, folder=self._model)
            return self.critic

        service = CriticService(make, checkpoints=self.checkpoints)
        server = RpcServer(name="critic-0")
        service.attach(server)
        self._address = self.run(server.start())
        self._servers.append((server, service))

    def link(self, attempt: int = 0) -> CriticLink:
        checkpoints = Checkpoints(self.checkpoints)
        checkpoints.group = SingleProcess()
        checkpoints.claim(attempt)
        link = CriticLink(rank=0, attempt=attempt, find=lambda _: self._address, loop=self.loop, patience_s=30)
        self._links.append(link)
        return link

    def close(self) -> None:
        for link in self._links:
            self.run(link.close())
        for server, service in self._servers:
            self.run(server.close())
            service.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def apart(tmp_path: Path, tiny_folder: Path) -> Iterator[Apart]:
    found = Apart(tmp_path, tiny_folder)
    yield found
    found.close()


def linked(apart: Apart, folder: Path, **more: Any) -> TorchBackend:
    """The backend whose critic is apart, with the settings of ``moving``."""
    settings = moving(folder, **more).settings
    apart.start(settings)
    trainer = TorchBackend(settings, group=SingleProcess())
    trainer.critic_link = apart.link()
    trainer.load(folder, checkpoint=None)
    return trainer


def all_arrays(trainer: TorchBackend, critic: TorchCritic) -> dict[str, np.ndarray]:
    """The weights of both models, under the names that ``arrays`` gives them."""
    trainer._critic = critic._opened
    found = arrays(trainer)
    trainer._critic = None
    return found


def streamed(trainer: TorchBackend, first: int, last: int) -> dict[str, float]:
    """Train as micro-batches come, one update a step."""
    batch, metrics = rewarded(samples()), {}
    for step in range(first, last + 1):
        for part in (range(7), range(7, 20)):
            trainer.micro_batch(batch.take(part), version=None)
        metrics = trainer.finish_step(step)
    return metrics


@pytest.mark.parametrize("trained", [streamed, train], ids=["streamed", "several updates"])
def test_it_learns_what_the_critic_inside_learns(apart: Apart, tiny_folder: Path, trained: Any) -> None:
    inside, other = moving(tiny_folder), linked(apart, tiny_folder)
    for first, last in ((1, 1), (2, 4)):
        metrics, wanted = trained(other, first, last), trained(inside, first, last)
        assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    assert wanted["critic_grad_norm"] > 0
    assert "explained_variance" in metrics
    found, expected = all_arrays(other, apart.critic), arrays(inside)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=2e-6, err_msg=name)


def test_a_checkpoint_is_that_of_a_trainer_with_its_critic_inside(apart: Apart, tiny_folder: Path) -> None:
    trainer = linked(apart, tiny_folder)
    streamed(trainer, 1, 2)
    folder = apart.checkpoints / "step-000002"
    folder.mkdir()
    write = trainer.snapshot()
    saved = all_arrays(trainer, apart.critic)
    metrics = streamed(trainer, 3, 4)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(write, folder).result()
    inside = moving(tiny_folder)
    inside.load(tiny_folder, checkpoint=folder)
    assert_same_bits(arrays(inside), saved)
    apart.start(trainer.settings)
    resumed = TorchBackend(trainer.settings, group=SingleProcess())
    resumed.critic_link = apart.link(attempt=1)
    resumed.load(tiny_folder, checkpoint=folder)
    assert_same_bits(all_arrays(resumed, apart.critic), saved)
    assert streamed(resumed, 3, 4) == metrics


@pytest.mark.parametrize("spoilt", ["policy", "critic"])
def test_where_one_gradient_is_not_finite_neither_model_moves(apart: Apart, tiny_folder: Path, spoilt: str) -> None:
    trainer = linked(apart, tiny_folder)
    streamed(trainer, 1, 1)
    trainer.critic_link.settle(1)
    before = all_arrays(trainer, apart.critic)
    trainer.micro_batch(rewarded(samples()), version=None)
    trainer.critic_link.settle(2)
    {"policy": trainer._optimizer, "critic": apart.critic._critic.optimizer}[spoilt].gradient[7] = float("nan")
    assert trainer.finish_step(2)["skipped"] == 1
    trainer.critic_link.settle(2)
    assert_same_bits(all_arrays(trainer, apart.critic), before)
    assert streamed(trainer, 3, 3)["skipped"] == 0


@pytest.mark.parametrize("kind", [TorchBackend, CountingBackend])
def test_no_rank_sends_samples_of_the_next_update_before_the_critic_has_made_this_one(
    apart: Apart, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[TorchBackend | CountingBackend]
) -> None:
    settings = moving(tiny_folder).settings if kind is TorchBackend else COUNTING
    apart.start(settings, kind)
    trainer = kind(settings, group=SingleProcess())
    trainer.critic_link = apart.link()
    trainer.load(tiny_folder, checkpoint=None)
    trainer.micro_batch(rewarded(samples().take(range(4))), version=None)
    calls = []
    gather, update = trainer.group.gather, trainer.critic_link.update
    monkeypatch.setattr(
        trainer.group, "gather", lambda *args, **more: (calls.append("gather"), gather(*args, **more))[1]
    )
    monkeypatch.setattr(
        trainer.critic_link, "update", lambda *args, **more: (calls.append("update"), update(*args, **more))
    )
    trainer.update(1)
    assert calls[-2:] == ["update", "gather"]


def test_what_is_forgotten_is_not_learned(apart: Apart, tiny_folder: Path) -> None:
    once, twice = moving(tiny_folder), linked(apart, tiny_folder)
    twice.micro_batch(rewarded(samples()), version=None)
    twice._discard_step()
    assert streamed(twice, 1, 1) == pytest.approx(streamed(once, 1, 1), rel=1e-4, abs=1e-7)


def counted(count: int) -> MicroBatch:
    batch = samples().take(range(count))
    zeros = Jagged(np.zeros(len(batch.responses.values), np.float32), batch.responses.offsets)
    return MicroBatch(**{**vars(batch), "values": zeros, "returns": zeros})


COUNTING = BackendSettings(optimizer=OptimizerSettings(learning_rate=1e-3, steps=4), group_size=4)


def test_what_comes_twice_counts_once(apart: Apart) -> None:
    apart.start(COUNTING, CountingBackend)
    link = apart.link()
    link.load(None)
    link.learn(counted(3))
    link._numbers -= 1
    link.learn(counted(3))
    link.settle(1)
    link.update(1, divisor=1.0, moves=True)
    link._updates -= 1
    link.learn(counted(2))
    link.update(1, divisor=1.0, moves=True)
    link.settle(1)
    assert apart.critic._counts.sum() == 3, "the second update is the first one again"
    assert apart.critic._pending.sum() == 2


def test_a_critic_that_was_started_again_answers_only_who_has_it_begin(apart: Apart) -> None:
    apart.start(COUNTING, CountingBackend)
    link = apart.link()
    with pytest.raises(Refused, match="was not loaded by attempt 0"):
        link.values(counted(2))
    link.load(None)
    assert link.values(counted(2)).values.tolist() == [0.0] * len(counted(2).responses.values)
    newer = apart.link(attempt=1)
    newer.load(None)
    with pytest.raises(Refused, match="not loaded by attempt 0"):
        link.learn(counted(2))
    with pytest.raises(Refused, match="attempt 0 of the trainer was replaced by attempt 1"):
        link.load(None)
    apart.start(COUNTING, CountingBackend)
    lost = apart.link(attempt=1)
    with pytest.raises(Refused, match="not loaded by attempt 1"):
        lost.settle(1)


def test_what_a_batch_did_wrong_the_trainer_hears(apart: Apart) -> None:
    apart.start(BackendSettings(**{**vars(COUNTING), "options": {"capacity": 1}}), CountingBackend)
    link = apart.link()
    link.load(None)
    link.learn(counted(3))
    with pytest.raises(ManifestError, match="has index"):
        link.settle(1)


def test_a_critic_that_sees_other_checkpoints_is_found_out(apart: Apart, tmp_path: Path) -> None:
    apart.start(COUNTING, CountingBackend)
    link = apart.link()
    apart.checkpoints.rename(tmp_path / "elsewhere")
    with pytest.raises(ManifestError, match=r"sees the checkpoints of attempt None.*ReadWriteMany"):
        link.load(None)
    (tmp_path / "elsewhere").rename(apart.checkpoints)
    link.load(None)
    link.copy()
    (apart.checkpoints / "step-000001").mkdir()
    other = tmp_path / "other" / "step-000001"
    other.mkdir(parents=True)
    with pytest.raises(DiskError, match=r"critic-counts\.npy to another folder"):
        link.write(other)


def test_critics_are_those_of_the_backend(tiny_folder: Path) -> None:
    assert isinstance(TorchBackend.separate_critic(moving(tiny_folder).settings, folder=tiny_folder), TorchCritic)
    assert critic_of(moving(tiny_folder))
