"""Diagnosis of a run, finished, killed or going on: pure findings over one frozen ``Evidence``."""
