"""Rollout: engines that generate, and the worker that feeds them from the queue."""
