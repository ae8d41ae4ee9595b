"""Backends with which a trainer computes, found by entry points of the group ``asyncflow.trainer_backends``."""
