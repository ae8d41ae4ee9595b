"""What a user of a queue needs: ``visit`` or ``visiting`` a queue by its address, and open partitions of it."""

from asyncflow.queue.client.blocking import BlockingQueue
from asyncflow.queue.client.blocking_visitor import visiting
from asyncflow.queue.client.client import QueueClient
from asyncflow.queue.client.open_partition import BlockingPartition, OpenPartition
from asyncflow.queue.client.visitor import visit

__all__ = ["BlockingPartition", "BlockingQueue", "OpenPartition", "QueueClient", "visit", "visiting"]
