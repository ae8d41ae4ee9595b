"""Policies as plain state machines: no clock, no task, no socket, so that a simulator can drive the same objects."""
