"""Diagnosis of a run that is active, finished or killed: pure checks over one frozen ``Evidence``."""
