"""Objective of training: advantages, losses, KL penalties, aggregation. Formulas only, no I/O and no state."""
