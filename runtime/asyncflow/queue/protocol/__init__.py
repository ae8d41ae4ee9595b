"""The messages that cross the queue's sockets."""
