"""Decisions: plans made from observations and the time. Pure: nothing here reads a clock or waits.

Invariant: equal observations at equal times give equal plans, and carrying out a plan leads to an observation that asks
for nothing more, unless something else happens.
"""

from asyncflow_operator.decide.job import decide_job
from asyncflow_operator.decide.queue import decide_queue
from asyncflow_operator.decide.weights import decide_sync

__all__ = ["decide_job", "decide_queue", "decide_sync"]
