"""TransferQueue 0.1.11, which verl, NeMo-RL and ROLL use, with its settings for the lowest latency.

It runs in its own environment (``environment.peer_python``), on Ray. Its client polls every millisecond.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import psutil
import ray
import torch
import transfer_queue
from implementations import Implementation
from omegaconf import OmegaConf
from samples import Sample
from tensordict import TensorDict
from transfer_queue.client import TransferQueueClient

_POLL_S = 0.001
_BACKEND = "SimpleStorage"


@dataclass(frozen=True)
class Attached:
    """The sockets of the controller and of the storage."""

    controller: Any
    storage: Any


class TransferQueue(Implementation):
    """TransferQueue with its default storage in memory."""

    def start(self, *, units: int, tasks: Mapping[str, Sequence[str]]) -> Attached:
        self._tasks = tasks
        ray.init(
            num_cpus=64,
            include_dashboard=False,
            namespace="bench",
            log_to_driver=False,
            object_store_memory=200 << 20,
        )
        settings = {
            "controller": {"sampler": "SequentialSampler", "polling_mode": True},
            "metrics": {"enabled": False},
            "backend": {
                "storage_backend": _BACKEND,
                _BACKEND: {"num_data_storage_units": units, "total_storage_size": None},
            },
        }
        self._settings = transfer_queue.init(OmegaConf.create(settings, flags={"allow_objects": True}))
        self._client = transfer_queue.get_client()
        return Attached((self._settings.controller.zmq_info, dict(tasks)), self._settings.backend[_BACKEND])

    def attach(self, handle: Attached) -> None:
        sockets, self._tasks = handle.controller
        self._client = TransferQueueClient(f"bench_{uuid4().hex[:8]}", sockets)
        self._client.initialize_storage_manager(_BACKEND, handle.storage)

    def close(self) -> None:
        if hasattr(self, "_settings"):
            transfer_queue.close()
            ray.shutdown()
        else:
            self._client.close()

    @property
    def pids(self) -> dict[str, int]:
        """The pids of its actors, which are identified by the ports on which they listen."""
        ports = {self._settings.controller.zmq_info.ports["request_handle_socket"]: "controller"}
        for index, unit in enumerate(self._settings.backend[_BACKEND].zmq_info.values()):
            ports[unit.ports["put_get_socket"]] = f"unit{index}"
        found = {}
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port in ports and connection.pid:
                found[ports[connection.laddr.port]] = connection.pid
        return found

    def pack(self, samples: Sequence[Sample]) -> TensorDict:
        columns = {}
        for name in samples[0]:
            rows = [torch.from_numpy(np.ascontiguousarray(sample[name])) for sample in samples]
            equal = all(row.shape == rows[0].shape for row in rows)
            columns[name] = torch.stack(rows) if equal else torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict(columns, batch_size=len(samples))

    def unpack(self, packed: TensorDict) -> list[Sample]:
        apart = {name: [row.numpy() for row in column.unbind()] for name, column in packed.items()}
        return [dict(zip(apart, row, strict=True)) for row in zip(*apart.values(), strict=True)]

    def put(self, partition: str, packed: TensorDict) -> Any:
        return self._client.put(packed, partition_id=partition)

    def write(self, rows: Any, packed: TensorDict) -> None:
        self._client.put(packed, metadata=rows)

    def claim(self, partition: str, task: str, count: int, *, timeout: float) -> Any | None:
        last = time.perf_counter() + timeout
        columns = list(self._tasks[task])
        while True:
            rows = self._client.get_meta(data_fields=columns, batch_size=count, partition_id=partition, task_name=task)
            if rows.size:
                return rows
            if time.perf_counter() >= last:
                return None
            time.sleep(_POLL_S)

    def fetch(self, rows: Any, columns: Sequence[str]) -> TensorDict:
        return self._client.get_data(rows if rows.field_names == sorted(columns) else rows.select_fields(list(columns)))

    def clear(self, partition: str) -> None:
        self._client.clear_partition(partition)

    def names(self, rows: Any) -> list[Hashable]:
        return list(rows.global_indexes)
