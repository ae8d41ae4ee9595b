"""Rollout: engines that generate, and the worker that feeds them with rows from the queue."""
