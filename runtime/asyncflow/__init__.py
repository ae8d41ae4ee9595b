"""AsyncFlow: asynchronous reinforcement-learning post-training of language models.

``train`` runs a job on this machine, ``load`` reads and checks a manifest, and ``RLJob`` is a job made in Python.
``connect`` and ``aconnect`` are clients of a queue, for threads and for an event loop, with ``BlockingPartition`` and
``Partition`` for its rows. ``StreamingDataset``, ``StepDataset`` and ``share_batches`` are its data sets for torch.
``init_engines`` makes this process the trainer of a job, or a client of a queue, with AsyncFlow's five verbs
(``Engines``). ``Trainer`` is a loop to subclass, and ``create_stream_data_loader`` a loader of a stage's rows.
``MetricSink`` is the base class of metric sinks.

Invariant: importing the package loads no heavy dependency; each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncflow.api.job import RLJob
    from asyncflow.commands.preflight import load
    from asyncflow.commands.run import train
    from asyncflow.queue.blocking import BlockingPartition, connect
    from asyncflow.queue.client import aconnect
    from asyncflow.queue.partition import Partition
    from asyncflow.queue.protocol.messages import Samples, TaskSpec
    from asyncflow.queue.torch import Batch, QueueAddress, StepDataset, StreamingDataset, share_batches
    from asyncflow.rpc.columns import Jagged
    from asyncflow.session.engines import ClaimedRows, Engines, init_engines
    from asyncflow.session.experience import Experience
    from asyncflow.session.loader import create_stream_data_loader
    from asyncflow.session.trainer import Trainer
    from asyncflow.telemetry.sinks.base import MetricSink

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "BlockingPartition",
    "ClaimedRows",
    "Engines",
    "Experience",
    "Jagged",
    "MetricSink",
    "Partition",
    "QueueAddress",
    "RLJob",
    "Samples",
    "StepDataset",
    "StreamingDataset",
    "TaskSpec",
    "Trainer",
    "__version__",
    "aconnect",
    "connect",
    "create_stream_data_loader",
    "init_engines",
    "load",
    "share_batches",
    "train",
]

_MODULES = {
    "Batch": "asyncflow.queue.torch",
    "BlockingPartition": "asyncflow.queue.blocking",
    "ClaimedRows": "asyncflow.session.engines",
    "Engines": "asyncflow.session.engines",
    "Experience": "asyncflow.session.experience",
    "Jagged": "asyncflow.rpc.columns",
    "MetricSink": "asyncflow.telemetry.sinks.base",
    "Partition": "asyncflow.queue.partition",
    "QueueAddress": "asyncflow.queue.torch",
    "RLJob": "asyncflow.api.job",
    "Samples": "asyncflow.queue.protocol.messages",
    "StepDataset": "asyncflow.queue.torch",
    "StreamingDataset": "asyncflow.queue.torch",
    "Trainer": "asyncflow.session.trainer",
    "TaskSpec": "asyncflow.queue.protocol.messages",
    "aconnect": "asyncflow.queue.client",
    "connect": "asyncflow.queue.blocking",
    "create_stream_data_loader": "asyncflow.session.loader",
    "init_engines": "asyncflow.session.engines",
    "load": "asyncflow.commands.preflight",
    "share_batches": "asyncflow.queue.torch",
    "train": "asyncflow.commands.run",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
