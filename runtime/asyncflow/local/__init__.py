"""Jobs on this machine: one supervisor places every replica of a plan as an operating-system process.

The decisions are pure (``lifecycle``); the rest does the I/O that they ask for.
"""
