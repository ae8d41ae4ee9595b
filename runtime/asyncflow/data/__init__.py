"""Prompts: sources of checkable tasks, split into training and held-out, and their conversion to token ids."""
