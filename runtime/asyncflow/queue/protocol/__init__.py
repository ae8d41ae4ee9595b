"""The messages that cross the queue's sockets, and nothing else."""
