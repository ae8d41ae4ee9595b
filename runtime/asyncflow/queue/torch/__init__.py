"""The queue for torch: tasks and optimizer steps as data sets for the ordinary ``DataLoader``.

Nothing else of the queue imports torch.
"""

from asyncflow.queue.torch.batch import Batch
from asyncflow.queue.torch.column import Column
from asyncflow.queue.torch.dataset import StreamingDataset
from asyncflow.queue.torch.exchange import shared
from asyncflow.queue.torch.place import Queue
from asyncflow.queue.torch.steps import StepDataset

__all__ = ["Batch", "Column", "Queue", "StepDataset", "StreamingDataset", "shared"]
