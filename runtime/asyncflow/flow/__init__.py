"""Policies as plain state machines: no clock, no task, no socket. The runtime and the simulator drive the same objects."""
