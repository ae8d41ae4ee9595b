"""Decisions: pure functions from an observation and the time to a plan. No function reads a clock or waits.

Invariants: equal observations at equal times give equal plans. After a plan has been carried out, the next observation
gives an empty plan, unless the cluster has changed in another way.
"""

from asyncflow_operator.decide.job import decide_job
from asyncflow_operator.decide.queue import decide_queue
from asyncflow_operator.decide.weights import decide_sync

__all__ = ["decide_job", "decide_queue", "decide_sync"]
