"""Policies as pure state machines without clock, task or socket, so that the simulator can run the same objects."""
