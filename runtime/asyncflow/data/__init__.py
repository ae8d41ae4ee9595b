"""Prompts: sources of checkable tasks, split into training and held-out, and how a task becomes token ids."""
