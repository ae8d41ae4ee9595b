"""What crosses the queue's sockets, and nothing else."""
