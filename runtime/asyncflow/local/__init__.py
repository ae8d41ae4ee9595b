"""Jobs on this machine: one supervisor places every replica of a plan as an operating-system process.

The decisions are pure functions (``lifecycle``); the other modules do the I/O.
"""
