"""Replay of a finished step, and the life of one sample, from the records of a run."""
