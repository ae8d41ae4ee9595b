"""The part of the engine inside vLLM's worker processes (``--worker-extension-cls``): weights, and times of prefills.

    stage:     a mapping of the sender's memory -> tensors next to the running model, on a separate stream and thread
    swap:      ``model_runner.reload_weights`` from the staged tensors, while generation is paused
    prefills:  times of the steps in which ``model_runner.execute_model`` reads more of a sequence than its last token

The methods are called by name through ``/collective_rpc`` and return JSON values.

Invariants: the running model is unchanged before ``asyncflow_swap``; after it, the model holds exactly the staged
tensors. All calls except the swap take microseconds, because they block the engine's loop.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from asyncflow import clock

Placed = dict[str, Any]
"""Location of a tensor in the shared memory: name, dtype, shape, offset in bytes."""

_SPARE = 1 << 30
"""Bytes of device memory that staged tensors leave free."""
_MOST_PREFILLS = 4096
"""Number of times, the newest, that are kept until they are fetched."""
_NEXT_S = 0.02
"""Maximum seconds between two consecutive steps: the time for sampling and scheduling."""


class Staging:
    """Staging of one version in a worker.

    stream: of the device, None on a CPU; room: bytes that may be allocated there.
    where: ``host`` or ``device`` once staged; error: the reason for a failure; done: whether one of them is set.
    """

    def __init__(self, path: str, placed: list[Placed], *, stream: torch.Stream | None, room: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.where = ""
        self.error = ""
        self._stream = stream
        self._room = room
        threading.Thread(target=self._stage, args=(_mapped(path), placed), daemon=True).start()

    @property
    def done(self) -> bool:
        """True once the tensors are staged, or staging has failed."""
        return bool(self.where or self.error)

    def _stage(self, memory: mmap.mmap, placed: list[Placed]) -> None:
        try:
            self.tensors, where = self._transferred({each["name"]: _tensor(memory, each) for each in placed})
        except Exception as error:  # noqa: BLE001  returned by asyncflow_staged(), which the engine polls
            self.error = f"{type(error).__name__}: {error}"
        else:
            self.where = where

    def _transferred(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
        """Copy ``tensors`` to the device if there is room, otherwise into pinned memory of the host."""
        if self._stream is None:
            return tensors, "host"
        try:
            if sum(tensor.nbytes for tensor in tensors.values()) + _SPARE <= self._room:
                with self._stream:
                    staged = {name: tensor.to(self._stream.device) for name, tensor in tensors.items()}
                self._stream.synchronize()
                return staged, "device"
        except torch.OutOfMemoryError:
            pass  # another process has allocated the memory meanwhile
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}, "host"


class Prefills:
    """Times of the steps of ``runner`` that read prompts, or read partial sequences again.

    A sequence that only waits during such a step does not count. Consecutive steps form one time. device: computes the
    steps; a device other than the CPU runs them asynchronously, so its events measure the times.
    """

    def __init__(self, runner: Any, device: torch.device) -> None:
        self._device = device
        self._found: deque[tuple[float, float, bool]] = deque(maxlen=_MOST_PREFILLS)
        self._started: SimpleQueue[tuple[torch.Event, torch.Event, bool]] = SimpleQueue()
        self._follows = False
        self._execute = runner.execute_model
        runner.execute_model = self._timed
        if device.type != "cpu":
            threading.Thread(target=self._watch, name="prefills", daemon=True).start()

    def take(self) -> list[tuple[float, float]]:
        """Return begin and end, in Unix seconds, of the times that have ended since the last call."""
        taken: list[tuple[float, float]] = []
        for _ in range(len(self._found)):
            begin, end, follows = self._found.popleft()
            if follows and taken and begin - taken[-1][1] < _NEXT_S:
                begin = taken.pop()[0]
            taken.append((begin, end))
        return taken

    def _timed(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        follows, self._follows = self._follows, _reads(scheduled)
        if not self._follows:
            return self._execute(scheduled, *arguments, **options)
        if self._device.type == "cpu":
            begin = clock.now()
            result = self._execute(scheduled, *arguments, **options)
            self._found.append((begin, clock.now(), follows))
            return result
        reached = self._event()
        result = self._execute(scheduled, *arguments, **options)
        self._started.put((reached, self._event(), follows))
        return result

    def _event(self) -> torch.Event:
        """Return an event that the device reaches after all work submitted so far."""
        event = torch.Event(self._device, blocking=True)
        event.record()
        return event

    def _watch(self) -> None:
        while True:
            reached, done, follows = self._started.get()
            reached.synchronize()
            begin = clock.now()
            done.synchronize()
            self._found.append((begin, clock.now(), follows))


def _reads(scheduled: Any) -> bool:
    """Return whether a step reads more of a sequence than its last token and the draft tokens after it."""
    drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
    last = len(scheduled.num_scheduled_tokens) + drafts
    return bool(scheduled.scheduled_new_reqs) or scheduled.total_num_scheduled_tokens > last


class WorkerExtension:
    """Methods that vLLM adds to its workers."""

    model_runner: Any
    device: torch.device
    _asyncflow_staging: Staging | None = None
    _asyncflow_stream: torch.Stream | None = None
    _asyncflow_prefills: Prefills | None = None

    def asyncflow_stage(self, path: str, tensors: list[Placed], share: float) -> dict[str, str]:
        """Start to stage ``tensors``, which are in the file ``path``, and return immediately.

        share: fraction of the device's memory that this process may use. With several workers per engine, each reads
        its part from the memory that all of them map, at the swap.
        """
        self._asyncflow_staging = None
        device, room = torch.device(self.device), 0
        if device.type != "cpu" and self.model_runner.parallel_config.world_size == 1:
            # Torch's allocator gives every stream its own memory, so all versions share one stream.
            self._asyncflow_stream = self._asyncflow_stream or torch.Stream(device)
            module = torch.get_device_module(device)
            free, total = module.mem_get_info(device)
            room = min(free, int(total * share) - module.memory_reserved(device))
        self._asyncflow_staging = Staging(path, tensors, stream=self._asyncflow_stream, room=room)
        return {}

    def asyncflow_staged(self) -> dict[str, Any]:
        """Return ``done``, ``where`` the staged tensors are, and the ``error`` that prevented staging."""
        staging = self._asyncflow_staging
        if staging is None:
            return {"done": True, "where": "", "error": "nothing was staged"}
        return {"done": staging.done, "where": staging.where, "error": staging.error}

    def asyncflow_swap(self) -> dict[str, Any]:
        """Load the staged tensors.

        Return ``tokens``: the number of tokens of each running request by id, None if it is not known.
        """
        staging, self._asyncflow_staging = self._asyncflow_staging, None
        assert staging is not None
        with torch.inference_mode():
            self.model_runner.reload_weights(weights_iterator=iter(staging.tensors.items()))
            for layer in _packed_embeddings(self.model_runner.model):
                layer.quant_method.process_weights_after_loading(layer)
        del staging
        if (device := torch.device(self.device)).type != "cpu":
            torch.accelerator.synchronize(device)
            torch.get_device_module(device).empty_cache()  # torch.accelerator's version fails on NPUs (torch_npu 2.10)
        requests = getattr(self.model_runner, "requests", None)
        counts = None if requests is None else {name: len(each.output_token_ids) for name, each in requests.items()}
        return {"tokens": counts}

    def asyncflow_prefills(self) -> dict[str, Any]:
        """Return ``spans``: begin and end of each time at which prompts were read since the last call.

        The first call starts the measurement.
        """
        if self._asyncflow_prefills is None:
            self._asyncflow_prefills = Prefills(self.model_runner, torch.device(self.device))
        return {"spans": self._asyncflow_prefills.take()}


def _packed_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """Return the embeddings of which vLLM's CPU kernels hold a packed copy.

    ``reload_weights`` does not update the copy if the output layer is tied to the embedding.
    """
    return (layer for layer in model.modules() if hasattr(layer, "cpu_linear") and hasattr(layer, "num_embeddings"))


def _mapped(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _tensor(memory: mmap.mmap, placed: Placed) -> Tensor:
    kind, shape = getattr(torch, placed["dtype"]), tuple(placed["shape"])
    count = 1
    for extent in shape:
        count *= extent
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=placed["offset"]).view(shape)
