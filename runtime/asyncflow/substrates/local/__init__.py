"""The local substrate: one supervisor places every replica of a plan as an operating-system process.

The decisions are pure (``restart``, ``crew``, ``ending``); the rest does the I/O that they ask for.
"""
