"""Desired objects: pure functions that build the objects that should exist, without clock, I/O or state."""

from asyncflow.plan.queue import queue_roles
from asyncflow_operator.desired.blueprint import Registry
from asyncflow_operator.desired.bundle import Desired, DesiredSettings
from asyncflow_operator.desired.objects import digest

__all__ = ["Desired", "DesiredSettings", "Registry", "digest", "queue_roles"]
