"""The queue for torch: tasks and optimizer steps as data sets for the ordinary ``DataLoader``.

Nothing else of the queue imports torch.
"""

from asyncflow.queue.torch.batch import Batch, Column
from asyncflow.queue.torch.dataset import QueueAddress, StreamingDataset
from asyncflow.queue.torch.exchange import share_batches
from asyncflow.queue.torch.steps import StepDataset

__all__ = ["Batch", "Column", "QueueAddress", "StepDataset", "StreamingDataset", "share_batches"]
