"""A replica of the critic as a role of its own: it packs the samples that trainer ranks send, and saves its state.

Invariants: values, gradient and updates equal those of a critic inside the trainer, up to the rounding differences
between packs. Each replica holds the whole critic, and all make the same updates. If memory runs out, the gradient
since the last update is computed again in packs of half the size; this happens once at most.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from asyncflow.flow.slots import SLOT_TOKENS
from asyncflow.models.device import find_device
from asyncflow.plugins import read_options
from asyncflow.rpc.columns import Jagged
from asyncflow.training.backend import OPTIONS
from asyncflow.training.batch import MicroBatch
from asyncflow.training.critic import CRITIC_FILE, CRITIC_STATE_FILE, NORM, Meeting
from asyncflow.training.ranks import SingleProcess
from asyncflow.training.settings import BackendSettings, TorchOptions
from asyncflow.training.slice_files import unwritable
from asyncflow.training.torch.critic import Critic, open_critic
from asyncflow.training.torch.device import (
    TensorGroup,
    backends,
    choose_interface,
    collective,
    limit_waits,
    open_store,
)
from asyncflow.training.torch.figures import StepFigures
from asyncflow.training.torch.model import choose_kernels
from asyncflow.training.torch.packs import Packs
from asyncflow.training.torch.shards import copied, write_shards

_COLLECTIVE = collective(where="critic", who="the critics")


class _Replicas:
    """The process group of the critic's replicas, unused if there is only one. host: address of this process."""

    def __init__(self, *, host: str) -> None:
        self._host = host
        self._joined = False

    @_COLLECTIVE
    def meet(self, meeting: Meeting, *, device: torch.device, timeout_s: float) -> None:
        """Join the group after all replicas have come. Raises PeerLost if one does not come."""
        timeout = timedelta(seconds=timeout_s)
        store = open_store(meeting.host, meeting.port, world=meeting.world, listener=meeting.listener, timeout=timeout)
        store.set(f"here/{meeting.rank}", "")
        store.wait([f"here/{rank}" for rank in range(meeting.world)], timeout)
        choose_interface(self._host)
        limit_waits(device.type, timeout_s=timeout_s)
        try:
            dist.init_process_group(
                backends(device), store=store, rank=meeting.rank, world_size=meeting.world, timeout=timeout
            )
        except BaseException:
            dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - torch counts a group that it failed to create
            raise
        self._joined = True

    @_COLLECTIVE
    def add(self, gradient: Tensor) -> None:
        """Replace ``gradient`` by the sum over all replicas, and wait for it. Raises PeerLost if one is lost."""
        if self._joined:
            dist.all_reduce(gradient)
            gradient[:1].item()

    def close(self) -> None:
        """Leave the group."""
        if self._joined:
            dist.destroy_process_group()
            self._joined = False


class TorchCritic:
    """See ``CriticModel``. settings: the trainer's, with this process's device and threads; folder: the model's."""

    files: tuple[str, ...] = (CRITIC_FILE, CRITIC_STATE_FILE)

    def __init__(self, folder: Path, settings: BackendSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._options = read_options(settings.options, TorchOptions, where=OPTIONS)
        torch.set_num_threads(max(1, settings.threads))
        self._device = find_device(settings.device, share=settings.share, where="spec.critic.role.accelerator")
        choose_kernels(self._device, deterministic=settings.deterministic)
        torch.manual_seed(settings.seed)
        self._group = SingleProcess()
        self._figures = StepFigures()
        self._step: list[MicroBatch] = []
        self._opened: Critic | None = None
        self._settled: dict[str, float] | None = None
        self._replicas = _Replicas(host=settings.host)

    def load(self, checkpoint: Path | None, meeting: Meeting | None = None) -> None:
        """See ``CriticModel``."""
        self._replicas.close()
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device.index)  # the device is a setting of each thread
        self._opened = None
        self._opened = open_critic(
            self._folder,
            checkpoint,
            resumed=checkpoint is not None,
            settings=self._settings,
            options=self._options,
            device=self._device,
            group=self._group,
            ranks=TensorGroup(
                self._group,
                device=self._device,
                host=self._settings.host,
                timeout_s=self._options.collective_timeout_s,
            ),
        )
        tokens = self._settings.pack_tokens or max(SLOT_TOKENS, self._settings.longest_part)
        self._packs = Packs(self._settings, tokens=tokens, group=self._group, padded=self._critic.padded)
        self._figures, self._step, self._settled = StepFigures(), [], None
        if meeting is not None:
            self._replicas.meet(meeting, device=self._device, timeout_s=self._options.collective_timeout_s)

    def values(self, batch: MicroBatch) -> Jagged:
        """See ``CriticModel``."""
        return self._packs.evaluated(batch, _with_loss_tokens(batch), self._critic.evaluate)

    def learn(self, batch: MicroBatch) -> None:
        """See ``CriticModel``."""
        self._settled = None
        self._step.append(batch)
        try:
            self._add(batch)
        except torch.OutOfMemoryError as full:
            self._packs.halve(full)
        else:
            return
        batches = self._step
        self.forget()
        torch.accelerator.empty_cache()
        for one in batches:
            self._step.append(one)
            self._add(one)

    def _add(self, batch: MicroBatch) -> None:
        for pack in self._packs.of(batch, _with_loss_tokens(batch)):
            self._critic.learn(batch, pack, figures=self._figures)

    def forget(self) -> None:
        """See ``CriticModel``."""
        self._critic.optimizer.clear()
        self._figures, self._step, self._settled = StepFigures(), [], None

    def settle(self) -> dict[str, float]:
        """See ``CriticModel``."""
        gradient = self._critic.optimizer.gradient
        if self._settled is None:
            self._replicas.add(gradient)
            self._step, self._settled = [], self._figures.take()
        return self._settled | {NORM: gradient.norm().item()}

    def update(self, step: int, *, divisor: float, moves: bool) -> None:
        """See ``CriticModel``."""
        optimizer = self._critic.optimizer
        size = optimizer.normalise(divisor, norm=lambda gradient: gradient.norm().item())
        if moves:
            optimizer.move(step, norm=size)
        optimizer.clear()
        self._settled = None

    def copy(self) -> Callable[[Path], None]:
        """See ``CriticModel``. The returned function raises OSError or DiskError if the disk fails."""
        state = {name: copied(shards, group=self._group) for name, shards in self._critic.state().items()}

        def write(folder: Path) -> None:
            try:
                for name, shards in state.items():
                    write_shards(folder / name, shards)
            except SafetensorError as error:
                raise unwritable(folder, error) from error

        return write

    @property
    def _critic(self) -> Critic:
        assert self._opened is not None, "load must be called first"
        return self._opened


def _with_loss_tokens(batch: MicroBatch) -> np.ndarray:
    return np.flatnonzero(batch.loss_lengths() > 0)
